# SPDX-License-Identifier: Apache-2.0
"""Whole trainings over process groups that behave as NCCL's: no rank waits for ever, whatever order hosts run in.

A deadlock ends a test at once (:class:`pretend.hosts.Stuck`). Calls must be the same ones, in the same order over all
communicators, on all ranks; inside of steps no communicator is made or destroyed.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from pretend.process_groups import DESTROYED, MADE, NEW, Call, Dist
from pretend.tensors import PLACE
from pretend.training import on_process_groups
from support.device_training import SHAPES, Given, gradient, host, wrapped
from torch import Tensor, nn

import agmerge
import merging
from agmerge.backends import topology
from agmerge.planning.replanner import FIRST
from agmerge.runtime import workers

RANKS, LOCAL, STEPS = 4, 2, 4
STEP, STEPPED = Call("", "a step begins"), Call("", "a step has ended")
EACH = merging.Plan((1,) * len(SHAPES))  # a merge buffer for each tensor
QUANTISED = {"compression": "eden", "density": None}
EXCHANGES: dict[str, dict[str, Any]] = {
    "two-level": {"compression": "topk", "exchange": "two-level", "merging": EACH},
    "two-level, quantised": {"exchange": "two-level", "merging": EACH, **QUANTISED},
    "two phases": {"merging": EACH, **QUANTISED},
    "sparse": {"compression": "topk", "exchange": "sparse", "merging": EACH},
    "dgc": {"compression": "dgc", "exchange": "sparse", "merging": EACH},
    "masked": {"compression": "topk", "exchange": "masked", "merging": EACH},
    "oktopk": {"compression": "topk", "exchange": "oktopk", "merging": EACH},
    "dense": {"compression": "none", "merging": EACH},
}
SEVERAL = {name: EXCHANGES[name] for name in ("sparse", "two phases", "two-level")}
Trained = tuple[list[Tensor], list[Call]]


@pytest.fixture(autouse=True)
def two_ranks_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two-level."""
    monkeypatch.setenv(topology.VARIABLE, str(LOCAL))


def backward(dist: Dist, model: Given, number: int, order: list[int]) -> None:
    """Make the gradients of these tensors ready, in this order."""
    losses = [(model.given[n] * gradient(dist.rank, number, n).to(PLACE)).sum() for n in order]
    torch.stack(losses).sum().backward()


def step(dist: Dist, optimizer: Any, model: Given, number: int, *, alike: bool = False) -> None:
    """Make one step, with gradients in another readiness order on each rank; ``alike``: in the same one."""
    dist.calls.append(STEP)
    optimizer.zero_grad()
    drawn = random.Random(f"{0 if alike else dist.rank} {number}")
    backward(dist, model, number, drawn.sample(range(len(SHAPES)), len(SHAPES)))
    optimizer.step()
    dist.calls.append(STEPPED)


def trained(dist: Dist, model: Given) -> Trained:
    """Leave the world, and return what a rank has, and what it asked for until then."""
    calls = list(dist.calls)
    workers.world().close()
    return [host(p) for p in model.parameters()], calls


def check(found: list[Trained]) -> None:
    """Replicas are equal, and so are all calls; in steps, communicators are those that there were before."""
    parameters, calls = found[0]
    for others, asked in found:
        assert asked == calls
        assert all(torch.equal(p, q) for p, q in zip(others, parameters, strict=True))
    steps = calls[calls.index(STEP) :]
    assert len(steps) > STEPS * (len(SHAPES) + 2) and not {MADE, NEW, DESTROYED} & {call.what for call in steps}


@pytest.mark.parametrize("options", EXCHANGES.values(), ids=EXCHANGES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_all_ranks_make_all_calls_in_one_order(seed: int, options: dict[str, Any]) -> None:
    def body(dist: Dist) -> Trained:
        model = Given(PLACE)
        optimizer = wrapped(model, **options)
        for number in range(STEPS):
            step(dist, optimizer, model, number)
        return trained(dist, model)

    check(on_process_groups(RANKS, body, local_size=LOCAL, seed=seed))


@pytest.mark.long
def test_probes_and_plans_in_turns_keep_that_order() -> None:
    """The default as it is: what each rank measures is of another moment, and rank 0 decides."""

    def body(dist: Dist) -> Trained:
        model = Given(PLACE)
        optimizer = wrapped(model, density=None, merging="agmerge", compression="auto")
        for number in range(FIRST + STEPS):
            step(dist, optimizer, model, number)
        assert optimizer.stats()["planning"] not in ("fixed", "timing")
        return trained(dist, model)

    check(on_process_groups(RANKS, body, local_size=LOCAL))


@pytest.mark.parametrize("options", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_two_optimizers_of_one_model_take_turns_alike(seed: int, options: dict[str, Any]) -> None:
    class Both:
        """Both optimizers, stepped together."""

        def __init__(self, model: nn.Module) -> None:
            named, half = list(model.named_parameters()), merging.Plan((1, 1))
            self.parts = [
                agmerge.DistributedOptimizer(
                    torch.optim.SGD([p for _, p in part], lr=1.0, foreach=False),
                    part,
                    **{"density": 0.05, **options, "merging": half},
                )
                for part in (named[::2], named[1::2])
            ]

        def zero_grad(self) -> None:
            for part in self.parts:
                part.zero_grad()

        def step(self) -> None:
            for part in self.parts:
                part.step()

    def body(dist: Dist) -> Trained:
        model = Given(PLACE)
        both = Both(model)
        for number in range(STEPS):
            step(dist, both, model, number, alike=True)
        return trained(dist, model)

    check(on_process_groups(RANKS, body, local_size=LOCAL, seed=seed))


@pytest.mark.long
@pytest.mark.parametrize("options", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_each_rank_leaves_an_optimizer_when_it_likes(how: str, options: dict[str, Any]) -> None:
    """What is destroyed by one rank alone waits for the others, and they for its next message."""

    def body(dist: Dist) -> Trained:
        first, second = Given(PLACE), Given(PLACE)
        left, kept = wrapped(first, **options), wrapped(second, **options)
        step(dist, left, first, 0)
        for number in range(STEPS):
            if number == dist.rank:
                if how == "closed":
                    left.close()
                del left
                gc.collect()
            step(dist, kept, second, number)
        return trained(dist, second)

    check(on_process_groups(RANKS, body, local_size=LOCAL))


@pytest.mark.parametrize("options", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_is_lost_leaves_nothing_on_the_devices_of_the_others(seed: int, options: dict[str, Any]) -> None:
    """A kernel that waits for the lost one would be in front of all that the script still does: of a checkpoint."""

    def body(dist: Dist) -> str:
        model = Given(PLACE)
        optimizer = wrapped(model, **options)
        for _ in range(3):  # alike: then a hook needs no memory that the device does not have
            step(dist, optimizer, model, 0, alike=True)
        if dist.rank == RANKS - 1:
            backward(dist, model, 0, [3, 2])
            raise ValueError("lost")
        with pytest.raises(agmerge.NoAnswer) as ended:
            step(dist, optimizer, model, 0, alike=True)
        assert not model.given[0].cpu().isnan().any()
        torch.accelerator.synchronize()
        optimizer.close()
        return type(ended.value).__name__

    *others, lost = on_process_groups(RANKS, body, local_size=LOCAL, seed=seed, return_errors=True)
    assert others == ["CollectiveTimeout"] * (RANKS - 1) and isinstance(lost, ValueError)
