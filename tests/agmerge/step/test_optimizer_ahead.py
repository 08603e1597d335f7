# SPDX-License-Identifier: Apache-2.0
"""``sparsify="ahead"``: every tensor is selected from by itself, so the plan says only what travels together."""

from __future__ import annotations

import copy
import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    WIDTH,
    AwkwardModel,
    Parts,
    Sent,
    agreed,
    awkward_batch,
    awkward_groups,
    digest,
    mlp,
    on_ranks,
    random_plan,
    residuals,
    seeded,
    sgd,
    train,
    trained,
    wrap,
)
from torch import nn

import agmerge
import merging
import sparsifiers
from agmerge import testing
from agmerge.exchanges import SegmentBuffers
from agmerge.planning import measuring
from agmerge.planning.replanner import FIRST
from agmerge.step.merge_buffers import MergeBuffers

MODEL = seeded(mlp)
PLANS: dict[str, Any] = {
    "layerwise": "layerwise",
    "single": "single",
    "count": merging.get("count", tensors=4),
    "threshold": merging.get("threshold", bytes=4096),
    "random 1": random_plan(1, 6),
    "random 2": random_plan(2, 6),
}
COMPRESSORS = ["topk", "adtopk", "dgc", "randomk"]
PARTS, AWKWARD = seeded(Parts), seeded(AwkwardModel, 7)


def runs(size: int, model: nn.Module, plan: Any, steps: int = 4, **options: Any) -> list[str]:
    """Digests after every step, the same on every rank."""
    inner = functools.partial(sgd, momentum=0.0 if options.get("memory") == "dgc" else 0.9)
    options = {"sparsify": "ahead", "dense_sum": "ordered", "density": 0.05, **options}
    return trained(size, model, steps, inner, merging=plan, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_trained_does_not_depend_on_the_plan(size: int, compression: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(MODEL).to(dtype)
    options: dict[str, Any] = {"compression": compression, "memory": "residual"}
    found = {name: runs(size, model, plan, **options) for name, plan in PLANS.items()}
    assert len(set(found["single"])) == 4
    assert all(seen == found["single"] for seen in found.values()), found


def test_neither_do_momenta_and_states_of_a_sparsifier() -> None:
    found = [runs(3, MODEL, plan, steps=8, compression="dgc", memory="dgc") for plan in PLANS.values()]
    assert all(seen == found[0] for seen in found) and len(set(found[0])) == 8


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_layer_by_layer_ahead_is_behind(compression: str) -> None:
    options: dict[str, Any] = {"compression": compression, "memory": "residual", "dense": []}
    assert runs(2, MODEL, "layerwise", **options) == runs(2, MODEL, "layerwise", sparsify="behind", **options)
    # With tensors that are merged it is not, so both were really used.
    assert runs(2, MODEL, "single", **options) != runs(2, MODEL, "single", sparsify="behind", **options)


@pytest.mark.parametrize("compression", sparsifiers.names())
def test_every_tensor_is_heard_in_every_step(compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a bias beside a weight of a thousand times its gradient; behind, it would wait."""
    sent = Sent(monkeypatch)
    heard: list[dict[str, int]] = []

    def body(rank: int, model: nn.Sequential) -> None:
        model.get_parameter("0.weight").register_hook(lambda gradient: gradient * 1000)
        options: dict[str, Any] = {"density": 0.01, "dense": [], "memory": "residual"}
        optimizer = wrap(model, sgd(model), compression=compression, merging="single", sparsify="ahead", **options)
        for step in range(3):
            train(model, optimizer, rank, [step])
            heard.append({name: int(values.count_nonzero()) for name, values in sent.of.pop(rank).items()})

    model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    on_ranks(1, model, body)
    names = {name for name, _ in model.named_parameters()}
    for counts in heard:
        assert counts.keys() == names and min(counts.values()) >= 1, counts


@pytest.mark.parametrize("seed", range(4))
def test_with_as_many_elements_behind_keeps_the_smaller_residual(seed: int) -> None:
    """The largest of a union are the best that so many coordinates can do."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), seed)

    def body(rank: int, here: nn.Module, sparsify: str) -> tuple[int, float]:
        options: dict[str, Any] = {"compression": "topk", "density": 1 / 32, "merging": "single"}
        optimizer = wrap(here, sparsify=sparsify, **options)
        train(here, optimizer, rank, [seed])
        stats = optimizer.stats()
        return stats["elements_sent"], stats["residual_norm"]

    ahead, behind = (on_ranks(2, model, partial(body, sparsify=sparsify)) for sparsify in ("ahead", "behind"))
    for (many, left), (as_many, least) in zip(ahead, behind, strict=True):
        assert many == as_many == 4 * (1024 // 32 + WIDTH)
        assert 0 < least < left


@pytest.mark.parametrize("by", ["path", "plan"])
@pytest.mark.parametrize("sparsify", ["auto", "ahead"])
def test_a_plan_that_was_saved_ahead_is_replayed_ahead(by: str, sparsify: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    def body(rank: int, model: nn.Module, plan: Any, **options: Any) -> tuple[list[str], merging.Plan]:
        optimizer = wrap(model, compression="topk", merging=plan, **options)
        seen = train(model, optimizer, rank, range(4))
        if not path.exists() and rank == 0:
            optimizer.plan.save(path)
        return seen, optimizer.plan

    seen, plan = agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, "single", sparsify="ahead")))
    assert plan.labels == ("ahead",)
    given = path if by == "path" else merging.Plan.load(path)
    assert agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, given, sparsify=sparsify))) == (seen, plan)
    bare = merging.Plan(plan.counts, names=plan.names)  # says nothing about it
    assert agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, bare)))[0] != seen
    assert agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, bare, sparsify="ahead"))) == (seen, plan)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_density_one_ahead_is_dense_to_the_bit(size: int) -> None:
    none = runs(size, MODEL, "single", compression="none", sparsify="auto", density=1.0)
    for plan in PLANS.values():
        for dense in (None, list[str]()):
            options: dict[str, Any] = {"compression": "topk", "density": 1.0, "dense": dense, "dense_sum": "native"}
            assert runs(size, MODEL, plan, **options) == none


@pytest.mark.parametrize("passes", [1, 3])
def test_accumulated_gradients_are_selected_from_once(passes: int) -> None:
    def body(rank: int, model: nn.Module, plan: Any) -> tuple[list[str], int]:
        optimizer = wrap(model, merging=plan, sparsify="ahead", backward_passes_per_step=passes, dense_sum="ordered")
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            for part in range(passes):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
                model(x).square().mean().backward()
            optimizer.step()
            seen.append(digest(model))
        return seen, optimizer.stats()["elements_sent"]

    found = [agreed(on_ranks(2, MODEL, partial(body, plan=plan))) for plan in PLANS.values()]
    assert all(one == found[0] for one in found) and len(set(found[0][0])) == 4


@pytest.mark.parametrize("compression", ["topk", "adtopk", "redsync", "dgc"])
def test_ahead_a_plan_from_times_trains_what_any_other_plan_does(
    compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So neither probes nor changes of plan leave a trace: not in a residual, nor in what a sparsifier remembers."""
    monkeypatch.setattr(measuring.DriftDetector, "look", lambda *_: measuring.Finding.PROBE)
    options: dict[str, Any] = {"sparsify": "ahead", "dense_sum": "ordered", "compression": compression}

    def body(rank: int, model: nn.Module, planner: Any) -> tuple[list[str], int]:
        optimizer = wrap(model, merging=planner, density=0.05, memory="residual", **options)
        seen = train(model, optimizer, rank, range(FIRST + 6))
        return seen, len(optimizer.plan.counts)

    fixed, one = agreed(on_ranks(2, MODEL, partial(body, planner="single")))
    planner = merging.get("agmerge", intra=False, phases=2, check_every=3)
    found, two = agreed(on_ranks(2, MODEL, partial(body, planner=planner)))
    assert found == fixed and len(set(found)) == FIRST + 6
    assert (one, two) == (1, 2)


# -- awkward parameters ------------------------------------------------------------------------------------------


def test_layers_that_only_some_ranks_use_do_not_depend_on_the_plan_either() -> None:
    def body(rank: int, model: Parts, plan: Any) -> tuple[list[str], list[tuple[str, str, int]]]:
        optimizer = wrap(model, compression="topk", merging=plan, sparsify="ahead", dense_sum="ordered", dense=[])
        seen = []
        for step in range(8):
            optimizer.zero_grad()
            model.loss(rank, step, ["a", "ab", "b", ""][(step + rank) % 4]).backward()
            optimizer.step()
            seen.append(digest(model))
        return seen, testing.calls()

    plans = ["layerwise", "single", random_plan(3, 8)]
    found = [agreed(on_ranks(3, PARTS, partial(body, plan=plan)))[0] for plan in plans]
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 8


def awkward(size: int, plan: Any) -> tuple[list[str], set[str]]:
    """Digests after every step, and who has a residual in the end."""

    def body(rank: int, model: AwkwardModel) -> tuple[list[str], set[str]]:
        inner = torch.optim.SGD(awkward_groups(model), lr=0.05, momentum=0.9)
        options: dict[str, Any] = {"compression": "topk", "sparsify": "ahead", "dense_sum": "ordered"}
        optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), merging=plan, **options)
        seen = []
        for step in range(12):
            if step == 6:
                model.unfreeze()
            optimizer.zero_grad()
            model.loss(awkward_batch(rank, step), rank, step).backward()
            optimizer.step()
            seen.append(digest(model))
        assert model.unused.weight.grad is None and model.frozen.weight.grad is None
        assert model.only_rank_1.weight.grad is not None and model.late.weight.grad is not None
        return seen, {name for name, kept in residuals(optimizer).items() if kept.any()}

    found = on_ranks(size, AWKWARD, body)
    return agreed([seen for seen, _ in found]), found[1][1]


@pytest.mark.parametrize("size", [2, 3])
def test_awkward_parameters_do_not_depend_on_the_plan_either(size: int) -> None:
    plans = ["layerwise", "single", merging.get("threshold", bytes=8192)]
    found = [awkward(size, plan) for plan in plans]
    assert found[0] == found[1] == found[2]
    seen, kept = found[0]
    assert len(set(seen)) == 12
    assert {"only_rank_1.weight", "alternating.weight", "late.weight", "in_half.weight", "conv.weight"} <= kept
    assert "unused.weight" not in kept


def test_freezing_and_thawing_repeats_the_round_with_every_rank() -> None:
    """The empty messages of an attempt that is given up have the sizes that the plan says, tensor by tensor."""

    def body(rank: int, model: Parts) -> list[str]:
        optimizer = wrap(model, compression="topk", merging="single", sparsify="ahead", dense=[])
        seen = []
        for step in range(6):
            model.b.requires_grad_(step not in (2, 3))
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            optimizer.step()
            seen.append(digest(model))
        return seen

    assert len(set(agreed(on_ranks(3, PARTS, body)))) == 6


@pytest.mark.parametrize("compression", ["randomk", "adtopk", "topk"])
def test_padding_between_tensors_is_never_chosen(compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = MergeBuffers.vector
    seen: list[tuple[int, int]] = []

    def vector(session: MergeBuffers, operand: SegmentBuffers, step: int) -> Any:
        found = original(session, operand, step)
        seen.append((found[0].numel(), operand.segment.numel))
        return found

    monkeypatch.setattr(MergeBuffers, "vector", vector)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))

    def body(rank: int, net: nn.Module) -> None:
        options: dict[str, Any] = {"compression": compression, "dense": [], "density": 0.5, "sparsify": "ahead"}
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = agmerge.DistributedOptimizer(inner, net.named_parameters(), merging="single", **options)
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.ones(2, 7)).sum().backward()
            optimizer.step()
        assert all(bool(p.grad.any()) for p in net.parameters() if p.grad is not None)

    on_ranks(2, model, body)
    assert seen and all(given == numel for given, numel in seen)


@pytest.mark.parametrize(("before", "after"), [("behind", "ahead"), ("ahead", "behind")])
def test_what_the_script_asks_for_now_counts_more_than_the_plan_of_a_checkpoint(before: str, after: str) -> None:
    def body(rank: int, net: nn.Module) -> tuple[str, ...]:
        def wrapped(sparsify: str) -> agmerge.DistributedOptimizer:
            inner = torch.optim.SGD(net.parameters(), lr=0.1)
            return agmerge.DistributedOptimizer(
                inner, net.named_parameters(), compression="topk", merging="layerwise", sparsify=sparsify
            )

        def step(optimizer: agmerge.DistributedOptimizer) -> None:
            net(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        first = wrapped(before)
        step(first)
        saved = first.state_dict()
        first.close()
        second = wrapped(after)
        second.load_state_dict(saved)
        step(second)
        assert second.plan is not None
        return second.plan.labels

    labels = agreed(on_ranks(2, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), body))
    assert set(labels) == {"ahead" if after == "ahead" else ""}


def test_a_compressor_set_later_is_sparsified_ahead_if_the_script_says_so() -> None:
    def body(rank: int, net: nn.Module) -> tuple[str, ...]:
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = agmerge.DistributedOptimizer(
            inner, net.named_parameters(), compression="topk", merging="layerwise", sparsify="ahead"
        )
        for compression in ("none", "topk"):
            optimizer.set_compressor(compression)
            net(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.plan is not None
        return optimizer.plan.labels

    assert set(agreed(on_ranks(2, nn.Sequential(nn.Linear(64, 64)), body))) == {"ahead"}


def test_a_planner_of_the_scripts_own_that_fails_is_the_same_error_on_all_ranks() -> None:
    class Broken(merging.Planner):
        name, timed = "broken", False

        def partition(self, profile: merging.Profile, costs: merging.Costs, mode: str) -> merging.Plan:
            raise KeyError("no such model")

    def body(rank: int, net: nn.Module) -> str:
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = agmerge.DistributedOptimizer(inner, net.named_parameters(), merging=Broken())
        net(torch.ones(2, 64)).sum().backward()
        with pytest.raises(ValueError, match="KeyError: 'no such model'") as raised:
            optimizer.step()
        return str(raised.value)

    agreed(on_ranks(2, nn.Sequential(nn.Linear(64, 64)), body))
