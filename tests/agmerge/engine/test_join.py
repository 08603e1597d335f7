# SPDX-License-Identifier: Apache-2.0
"""``join()``: ranks with fewer batches go on taking part; nothing is lost, and replicas stay equal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import agreed, assert_near, digest, loss_of, mlp, on_ranks, residuals, seeded, sgd, train, wrap
from torch import nn

import agmerge
import merging
from agmerge import testing

MODEL = seeded(mlp)
WAYS: dict[str, dict[str, Any]] = {
    "sparse": {"compression": "topk"},
    "adtopk": {"compression": "adtopk"},
    "dense": {"compression": "none"},
    "fp16": {"compression": "fp16"},
    "ordered": {"compression": "none", "dense_sum": "ordered"},
    "oktopk": {"compression": "topk", "exchange": "oktopk"},
    "masked": {"compression": "topk", "exchange": "masked"},
    "oktopk int4": {"compression": "topk", "exchange": "oktopk", "wire": "int4"},
    "masked int8": {"compression": "topk", "exchange": "masked", "wire": "int8"},
    "drawn": {"compression": "randomk", "exchange": "masked"},
    "two-level": {"compression": "topk", "exchange": "two-level"},
    "importance": {"compression": "topk", "density": "importance"},
    "ahead": {"compression": "topk", "sparsify": "ahead", "merging": "layerwise"},
    "powersgd": {"compression": "powersgd"},
    "acpsgd": {"compression": "acpsgd"},
    "hybrid": {"compression": {"0.weight": "topk", ".*": "acpsgd"}},
}
SMALL = {"merging": merging.get("threshold", bytes=4096)}


class Totals:
    """What a rank's gradients and the updates add up to, in float64, by name. Updates are seen by a step hook."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.names = {p: name for name, p in model.named_parameters()}
        self.gradients = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
        self.updates, self.magnitudes = copy.deepcopy(self.gradients), copy.deepcopy(self.gradients)
        optimizer.register_step_pre_hook(self.see)

    def see(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p, name in self.names.items():
            if p.grad is not None:
                self.updates[name] += p.grad.double()

    def step(self, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        for p, name in self.names.items():
            self.gradients[name] += p.grad.double()
            self.magnitudes[name] += p.grad.double().abs()
        optimizer.step()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_replicas_are_equal_and_nothing_is_lost(way: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "two-level":
        size *= 2
        monkeypatch.setenv("AGMERGE_LOCAL_SIZE", "2")
    batches = [7 + 3 * (rank % 2) for rank in range(size)]

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, sgd(model, lr=0.05, weight_decay=0.1), **{**SMALL, **WAYS[way]})
        totals = Totals(model, optimizer)
        for step in range(batches[rank]):
            totals.step(model, optimizer, rank, step)
        last = optimizer.join()
        assert all(p.grad is None for p in model.parameters())
        assert optimizer.state_dict()["agmerge"]["steps"] == 10
        return last, digest(model), totals, residuals(optimizer)

    found = on_ranks(size, MODEL, body, inject=testing.jitter(1, 2e-4))
    assert agreed([last for last, *_ in found]) == max(rank for rank in range(size) if batches[rank] == 10)
    agreed([seen for _, seen, *_ in found])
    updates = found[0][2].updates
    for name, _ in MODEL.named_parameters():
        gradients = sum(totals.gradients[name] for _, _, totals, _ in found)
        kept = [one[name].double() for *_, one in found if name in one]
        if way == "two-level" and kept:  # ranks hold shards of their node's sum
            assert len(kept) == size
            continue
        expected = (gradients - sum(kept)) / size
        magnitude = sum(totals.magnitudes[name] for _, _, totals, _ in found) / size
        if way == "fp16":
            assert torch.allclose(updates[name], expected, rtol=0, atol=2e-3), name
        else:
            assert_near(updates[name], expected, magnitude)


def test_steps_of_joined_ranks_count_in_the_average() -> None:
    """The divisor is the number of all ranks, as Horovod's: a step of one of two ranks has half its gradient."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, sgd(model, lr=0.0), compression="none")
        seen: list[dict[str, torch.Tensor]] = []
        optimizer.register_step_pre_hook(
            lambda *_: seen.append({n: p.grad.clone() for n, p in model.named_parameters()})
        )
        if rank == 1:
            loss_of(model, 1, 0).backward()
            optimizer.step()
        assert optimizer.join() == 1
        assert len(seen) == 1
        return seen[0]

    for found in on_ranks(2, MODEL, body):
        alone = copy.deepcopy(MODEL)
        loss_of(alone, 1, 0).backward()
        for name, p in alone.named_parameters():
            assert torch.equal(found[name], p.grad / 2)


def test_training_goes_on_after_it_and_a_second_epoch_joins_too() -> None:
    def body(rank: int, model: nn.Module) -> list[Any]:
        optimizer = wrap(model, compression="topk", check_every=1)
        seen: list[Any] = []
        for epoch in range(3):
            train(model, optimizer, rank, range(10 * epoch, 10 * epoch + 4 + (rank + epoch) % 3))
            seen += [optimizer.join(), digest(model)]
        return [*seen, *train(model, optimizer, rank, range(50, 53))]

    found = agreed(on_ranks(3, MODEL, body))
    assert found[:6:2] == [2, 1, 0]


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


@pytest.mark.parametrize("inner", ["clip", "scheduler", "adamw"])
def test_what_only_ranks_with_batches_do_reaches_the_others_in_the_end(inner: str) -> None:
    """Clipping and schedules in the training loop: a joined rank steps otherwise, and is given the last one's state."""

    def body(rank: int, model: nn.Module) -> Any:
        plain = torch.optim.AdamW(model.parameters(), lr=0.01) if inner == "adamw" else sgd(model, weight_decay=0.1)
        optimizer = wrap(model, plain, compression="topk", check_every=1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            if inner == "clip":
                clip(model)
            with optimizer.skip_synchronize():
                optimizer.step()
            if inner != "clip":
                schedule.step()
        assert optimizer.join() == 1
        buffers = [value for p in model.parameters() for value in optimizer.state[p].values() if torch.is_tensor(value)]
        return digest(model), digest(buffers), optimizer.param_groups[0]["lr"]

    found = agreed(on_ranks(2, MODEL, body))
    if inner != "clip":
        assert found[2] == (0.01 if inner == "adamw" else 0.1) * 0.5**5


def test_a_hook_of_the_step_runs_on_ranks_that_have_joined() -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, compression="topk")
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: clip(model))
        optimizer.register_step_post_hook(lambda *_: seen.append(digest(model)))
        train(model, optimizer, rank, range(2 + 3 * rank))
        optimizer.join()
        return seen

    assert len(agreed(on_ranks(2, MODEL, body))) == 5


def test_parameters_that_change_meanwhile_are_agreed_on() -> None:
    """A layer is unfrozen on every rank; on the one that has joined before it joined."""

    def body(rank: int, model: nn.Sequential) -> Any:
        model[0].requires_grad_(False)
        optimizer = wrap(model, compression="topk")
        train(model, optimizer, rank, range(2))
        if rank == 1:
            train(model, optimizer, rank, range(2, 4))
        model[0].requires_grad_(True)
        if rank == 1:
            train(model, optimizer, rank, range(4, 6))
        return optimizer.join(), digest(model)

    # The rank that joins with an unfrozen layer asks for an agreement that the other one cannot give yet.
    with pytest.raises(agmerge.RankMismatchError, match=r"0\.weight"):
        on_ranks(2, MODEL, body)


@pytest.mark.parametrize("batches", [(0, 0), (0, 2), (3, 0)])
def test_a_rank_without_any_batch(batches: tuple[int, int]) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, compression="topk")
        train(model, optimizer, rank, range(batches[rank]))
        return optimizer.join(), digest(model)

    last, seen = agreed(on_ranks(2, MODEL, body))
    assert last == (0 if batches[0] > batches[1] else 1)
    assert (seen == digest(MODEL)) == (batches == (0, 0))


def test_planning_by_times_goes_on_meanwhile() -> None:
    """The first plan, and the one after it, are made while a rank has joined."""

    def body(rank: int, model: nn.Module) -> Any:
        options = {"merging": merging.get("agmerge", check_every=3), "exchange": "auto"}
        optimizer = wrap(model, compression="topk", **options)
        train(model, optimizer, rank, range(8 + 20 * rank))
        return optimizer.join(), digest(model), optimizer.plan.digest()

    agreed(on_ranks(2, MODEL, body))


def test_gradients_that_were_not_stepped_with_are_an_error() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, backward_passes_per_step=2)
        loss_of(model, rank, 0).backward()
        with pytest.raises(agmerge.AGMergeError, match=r"join\(\) was called between backward\(\) and step\(\)"):
            optimizer.join()
        optimizer.step()
        optimizer.join()

    on_ranks(2, MODEL, body)


def test_alone_and_outside_a_process_set_it_returns_at_once() -> None:
    def body(rank: int, model: nn.Module) -> tuple[int, str]:
        optimizer = wrap(model, process_set=[1, 2] if rank else [0])
        train(model, optimizer, rank, range(3 + rank))
        return optimizer.join(), digest(model)

    alone, *others = on_ranks(3, MODEL, body)
    assert alone[0] == 0 and agreed(others)[0] == 2


def test_dear_is_refused() -> None:
    def body(rank: int, model: nn.Module) -> None:
        options = {"compression": "none", "merging": "dear", "model": model}
        optimizer = agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
        with pytest.raises(ValueError, match="Use the same number of batches on every rank"):
            optimizer.join()

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize("way", ["sparse", "dense"])
def test_a_rank_that_has_joined_steps_through_the_scaler_as_the_others_do(way: str) -> None:
    def body(rank: int, model: nn.Module, scale: float | None) -> str:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
        optimizer = wrap(model, sgd(model), scaler=scaler, **{**SMALL, **WAYS[way]})
        for step in range(3 + 4 * rank):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.join() == 1
        assert scale is None or scaler.get_scale() == scale * 2**3  # seven steps, on both
        return digest(model)

    plain = agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, None)))
    assert agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, 1024.0))) == plain
