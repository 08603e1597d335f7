# SPDX-License-Identifier: Apache-2.0
"""Another number of workers: consolidated checkpoints, and groups that change while the optimizer lives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import (
    agreed,
    assert_near,
    digest,
    loss_of,
    mlp,
    on_ranks,
    residuals,
    seeded,
    sgd,
    strict_warnings,
    through_a_file,
    train,
    wrap,
)
from torch import Tensor, nn

import agmerge
import sparsifiers
from agmerge import testing
from agmerge.ops import Average, Sum
from agmerge.step.agreed_state import rescaled, weight_factor
from agmerge.step.config import SMALL

MODEL = seeded(mlp)
DGC = sparsifiers.memory("dgc", momentum=0.9)


def plain(model: nn.Module) -> torch.optim.SGD:
    return sgd(model, lr=0.05, momentum=0.0)


def gathered(size: int, steps: int = 5, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """What rank 0 gets of all ranks, and what each of them saves by itself, after a few steps."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, plain(model), **options)
        train(model, optimizer, rank, range(steps))
        return agmerge.gather_state(optimizer), optimizer.state_dict()["agmerge"]

    found = on_ranks(size, MODEL, body)
    assert all(whole is None for whole, _ in found[1:])
    return through_a_file(found[0][0]), [section for _, section in found]


def waiting(
    sections: list[dict[str, Any]], op: Any, kind: str = "residuals", of: Callable[[Tensor], Tensor] = torch.clone
) -> dict[str, Tensor]:
    """What is still to come of all ranks together, by name, as an update; of=torch.abs: the magnitudes in that sum."""
    weight = 1.0 / len(sections) if op is Average else 1.0
    parts = {name: [of(one[kind][name]) for one in sections if name in one[kind]] for name in sections[0][kind]}
    return {name: torch.stack(tensors).double().sum(0) * weight for name, tensors in parts.items()}


def loaded(whole: Any, size: int, **options: Any) -> list[dict[str, Any]]:
    def body(rank: int, model: nn.Module) -> dict[str, Any]:
        optimizer = wrap(model, plain(model), **options)
        optimizer.load_state_dict(copy.deepcopy(whole))
        section: dict[str, Any] = optimizer.state_dict()["agmerge"]
        train(model, optimizer, rank, range(5, 8))
        assert optimizer.state_dict()["agmerge"]["steps"] == 8
        return section | {"digest": digest(model)}

    with strict_warnings():
        sections = on_ranks(size, MODEL, body)
    agreed([section.pop("digest") for section in sections])
    return sections


@pytest.mark.values
@pytest.mark.parametrize("op", [Average, Sum])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 2), (2, 3), (1, 3), (3, 1)])
def test_what_is_still_to_come_stays_the_same(sizes: tuple[int, int], op: Any) -> None:
    whole, before = gathered(sizes[0], compression="topk", op=op)
    after = loaded(whole, sizes[1], compression="topk", op=op)
    grown = sizes[1] % sizes[0] == 0 and (op is Sum or sizes == (2, 4))  # multiplied by a power of two, or not at all
    magnitudes = waiting(before, op, of=torch.abs)
    for name, expected in waiting(before, op).items():
        assert bool(expected.any()) is (expected.numel() >= SMALL)
        assert_near(waiting(after, op)[name], expected, magnitudes[name], roundings=0 if grown else 4)


def test_what_rounding_has_left_of_whole_tensors_likewise() -> None:
    options: dict[str, Any] = {"compression": "topk", "wire": "int8"}
    whole, before = gathered(4, **options)
    after = loaded(whole, 2, **options)
    magnitudes = waiting(before, Average, of=torch.abs)
    for name, expected in waiting(before, Average).items():
        assert expected.any()
        assert_near(waiting(after, Average)[name], expected, magnitudes[name])


def test_it_arrives() -> None:
    """With a dense exchange afterwards, the update of a step without gradients is what was waiting."""
    whole, before = gathered(4, compression="topk")
    expected, magnitudes = waiting(before, Average), waiting(before, Average, of=torch.abs)

    def body(rank: int, model: nn.Module) -> dict[str, Tensor]:
        optimizer = wrap(model, plain(model), compression="topk", density=1.0)
        optimizer.load_state_dict(copy.deepcopy(whole))
        (0.0 * sum(p.sum() for p in model.parameters())).backward()
        optimizer.step()
        assert not any(one.any() for name, one in residuals(optimizer).items())
        return {name: p.grad for name, p in model.named_parameters()}

    for found in on_ranks(2, MODEL, body):
        for name, update in expected.items():
            assert_near(found[name], update, magnitudes[name])


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)])
def test_momenta_of_a_ranks_own_gradients_likewise_and_of_averages_as_they_are(sizes: tuple[int, int]) -> None:
    options: dict[str, Any] = {"compression": "dgc", "memory": DGC}
    whole, before = gathered(sizes[0], **options)
    after = loaded(whole, sizes[1], **options)
    magnitudes, averaged = waiting(before, Average, "momenta", of=torch.abs), before[0]["averaged_momenta"]
    assert magnitudes and averaged and not magnitudes.keys() & averaged.keys()
    for name, expected in waiting(before, Average, "momenta").items():
        assert_near(waiting(after, Average, "momenta")[name], expected, magnitudes[name])
    for name, tensor in averaged.items():
        assert all(torch.equal(one["averaged_momenta"][name], tensor) for one in after)


def test_as_many_ranks_resume_from_one_file_to_the_bit() -> None:
    def first(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, plain(model), compression="adtopk")
        train(model, optimizer, rank, range(10))
        whole = agmerge.gather_state(optimizer)
        start = digest(model)
        saved = copy.deepcopy(model.state_dict())
        return through_a_file(whole), saved, start, train(model, optimizer, rank, range(10, 15))

    found = on_ranks(3, MODEL, first)

    def second(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, plain(model), compression="adtopk")
        model.load_state_dict(found[0][1])
        optimizer.load_state_dict(copy.deepcopy(found[0][0]))
        return train(model, optimizer, rank, range(10, 15))

    assert agreed(on_ranks(3, MODEL, second)) == found[0][3]


def test_a_plain_optimizer_loads_it_and_large_states_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agmerge.checkpoint.dcp.LARGEST", 1000)
    whole, sections = gathered(2, compression="topk")
    for saved, section in zip(whole["agmerge"]["ranks"], sections, strict=True):
        assert all(torch.equal(saved["residuals"][name], one) for name, one in section["residuals"].items())
    plain(copy.deepcopy(MODEL)).load_state_dict({key: one for key, one in whole.items() if key != "agmerge"})


def test_gradients_of_an_unfinished_accumulation_are_dropped_with_a_warning() -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, compression="topk", backward_passes_per_step=2)
        loss_of(model, rank, 0).backward()
        return agmerge.gather_state(optimizer)

    whole = through_a_file(on_ranks(2, MODEL, body)[0])
    model = copy.deepcopy(MODEL)

    def load(rank: int) -> None:
        optimizer = wrap(model, compression="topk", backward_passes_per_step=2)
        with pytest.warns(UserWarning, match="AGM402: .* 2 ranks between two backward passes of one step"):
            optimizer.load_state_dict(whole)
        assert all(p.grad is None for p in model.parameters())

    testing.run(1, load)


def test_shards_of_another_number_of_ranks_are_dropped_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGMERGE_LOCAL_SIZE", "2")
    whole, _ = gathered(4, compression="topk", exchange="two-level")

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, plain(model), compression="topk", exchange="two-level")
        optimizer.load_state_dict(copy.deepcopy(whole))
        return train(model, optimizer, rank, range(2))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agreed(on_ranks(2, MODEL, body))
    assert len([one for one in caught if "AGM402" in str(one.message)]) == 2


def test_each_process_set_gathers_its_own() -> None:
    def body(rank: int, model: nn.Module) -> tuple[Any, dict[str, Any], list[str]]:
        mine = [rank % 2, rank % 2 + 2]
        optimizer = wrap(model, plain(model), process_set=mine)
        train(model, optimizer, rank, range(3))
        whole = agmerge.gather_state(optimizer)
        own = optimizer.state_dict()["agmerge"]
        return whole, own, train(model, optimizer, rank, range(3, 5))

    found = on_ranks(4, MODEL, body)
    assert [whole is None for whole, *_ in found] == [False, False, True, True]
    for rank, (_, own, _) in enumerate(found):
        part = found[rank % 2][0]["agmerge"]["ranks"][rank // 2]
        assert part["residuals"].keys() == own["residuals"].keys() != set()
        assert all(torch.equal(part["residuals"][name], own["residuals"][name]) for name in own["residuals"])
    assert found[0][2] == found[2][2] != found[1][2]


def test_ranks_outside_of_a_process_set_gather_nothing() -> None:
    def body(rank: int, model: nn.Module) -> bool:
        optimizer = wrap(model, process_set=[0, 1])
        train(model, optimizer, rank, range(2))
        assert rank < 2 or agmerge.ResidualState(optimizer).state_dict() == {}
        return agmerge.gather_state(optimizer) is None

    assert on_ranks(3, MODEL, body) == [False, True, True]


# -- for frameworks that save on rank 0 alone -----------------------------------------------------------------------


def test_a_consolidated_state_is_that_of_all_ranks_once() -> None:
    def body(rank: int, model: nn.Module) -> tuple[list[bool], list[str]]:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(3))
        optimizer.consolidate_state_dict()
        state = optimizer.state_dict()
        seen = ["ranks" in state["agmerge"], "ranks" in optimizer.state_dict()["agmerge"]]
        went_on = copy.deepcopy(model)
        whole = agmerge.broadcast_object(state if rank == 0 else None)
        other = wrap(went_on)
        other.load_state_dict(copy.deepcopy(whole))
        optimizer.consolidate_state_dict()
        ends = [train(model, optimizer, rank, range(3, 5)), train(went_on, other, rank, range(3, 5))]
        assert ends[0] == ends[1]
        seen.append("ranks" in optimizer.state_dict()["agmerge"])  # of an earlier step
        return seen, ends[0]

    found = on_ranks(2, MODEL, body)
    assert [seen for seen, _ in found] == [[True, False, False], [False, False, False]]
    assert found[0][1] == found[1][1]


def test_only_rank_0_consolidates() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match=r"consolidate_state_dict\(to=1\) .*only rank 0.*Remove to="):
            wrap(model).consolidate_state_dict(to=1)

    on_ranks(2, MODEL, body)


# -- the group changes while the optimizer lives ------------------------------------------------------------------


@pytest.mark.values
@pytest.mark.parametrize("compression", ["topk", "eden", "powersgd", "acpsgd"])
@pytest.mark.parametrize("told", [False, True], ids=["noticed", "told"])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 3), (3, 3)])
def test_survivors_go_on_with_what_they_kept(sizes: tuple[int, int], told: bool, compression: str) -> None:
    before, now = sizes
    models = [copy.deepcopy(MODEL) for _ in range(max(sizes))]
    made: list[Any] = [None] * max(sizes)

    def first(rank: int) -> None:
        made[rank] = wrap(models[rank], plain(models[rank]), compression=compression, density=0.05)
        train(models[rank], made[rank], rank, range(4))

    testing.run(before, first)
    for model in models[before:]:
        model.load_state_dict(models[0].state_dict())
    kept = [residuals(one) if one is not None else None for one in made[:now]]

    def second(rank: int) -> Any:
        model, optimizer = models[rank], made[rank]
        if optimizer is None:  # a newcomer; its handshake is the survivors' too
            optimizer = wrap(model, plain(model), compression=compression, density=0.05)
        elif told:
            optimizer.reset()
            assert optimizer.state_dict()["agmerge"]["size"] == before
        optimizer.zero_grad()
        (0.0 * sum(p.sum() for p in model.parameters())).backward()
        optimizer.step()
        updates = {name: p.grad.clone().double() for name, p in model.named_parameters()}
        left = residuals(optimizer)
        train(model, optimizer, rank, range(4, 6))
        return updates, left, digest(model), optimizer.state_dict()["agmerge"]["steps"]

    found = testing.run(now, second)
    agreed([seen for *_, seen, _ in found])
    assert agreed([steps for *_, steps in found]) == 7
    for name in kept[0]:
        mass = sum(one[name].double() for one in kept if one is not None) / before
        magnitude = sum(one[name].double().abs() for one in kept if one is not None) / before
        left = sum(one[name].double() for _, one, *_ in found) / now
        if mass.numel() >= SMALL or compression != "topk":
            assert mass.any() and found[0][0][name].any()
        if compression != "topk":  # an element of a product is rounded as the largest ones are
            magnitude = magnitude.clamp_min(magnitude.max())
        assert_near(found[0][0][name] + left, mass, magnitude)


def test_scaling_is_the_stated_rule() -> None:
    assert weight_factor(Average, 4, 2) == 0.5 and weight_factor(Average, 2, 3) == 1.5
    assert weight_factor(Sum, 4, 2) == 1.0
    kinds = (("residual", "a"), ("momentum", "a"), ("averaged_momentum", "b"))
    state = {key: torch.ones(2) for key in kinds}
    found = rescaled(state, 2.0)
    assert [float(tensor[0]) for tensor in found.values()] == [2.0, 2.0, 1.0]
