# SPDX-License-Identifier: Apache-2.0
"""Order of calls across communicators: NCCL's must see the same one on all ranks, whenever a rank sees what."""

from __future__ import annotations

import random

import pytest
import torch
from pretend.device import Device
from pretend.schedule import Call, Schedule
from pretend.tensors import PLACE
from pretend.training import on_devices
from support.device_training import SHAPES, Given, gradient, wrapped

import merging
from agmerge.backends import topology
from agmerge.backends.warm_up import NAME

RANKS, STEPS = 4, 3
BUILT = Call("", "the optimizer is there")
EACH = merging.Plan((1,) * len(SHAPES))  # a merge buffer for each tensor
QUANTISED = {"compression": "eden", "density": None}
EXCHANGES = {
    "two-level": {"compression": "topk", "exchange": "two-level", "merging": EACH},
    "two-level, quantised": {"exchange": "two-level", "merging": EACH, **QUANTISED},
    "two phases": {"merging": EACH, **QUANTISED},
    "masked": {"compression": "topk", "exchange": "masked", "merging": EACH},
    "oktopk": {"compression": "topk", "exchange": "oktopk", "merging": EACH},
    "sparse": {"compression": "topk", "exchange": "sparse", "merging": EACH},
    "dense": {"compression": "none", "merging": EACH},
}


def started(seed: int, **options: object) -> list[list[Call]]:
    """What each rank starts in some steps, where gradients come in another order on each, and ends are seen later."""
    schedules = [Schedule(100 * seed + rank) for rank in range(RANKS)]

    def body(rank: int, device: Device) -> None:
        model = Given(PLACE)
        optimizer = wrapped(model, **options)
        schedules[rank].calls.append(BUILT)
        for step in range(STEPS):
            optimizer.zero_grad()
            numbers = random.Random(f"{seed} {rank} {step}").sample(range(len(SHAPES)), len(SHAPES))  # readiness order
            losses = [(model.given[n] * gradient(rank, step, n).to(PLACE)).sum() for n in numbers]
            torch.stack(losses).sum().backward()
            optimizer.step()

    on_devices(RANKS, body, own_thread=True, watched=(), schedules=schedules)
    return [schedule.calls for schedule in schedules]


@pytest.mark.thin(1)
@pytest.mark.parametrize("options", EXCHANGES.values(), ids=EXCHANGES)
@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_make_all_calls_in_one_order(
    seed: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")
    first, *others = started(seed, **options)
    assert len(first) > STEPS * len(SHAPES)
    for calls in others:
        assert calls == first
    later = {call.communicator for call in first[first.index(BUILT) + 1 :]}
    assert later <= {call.communicator for call in first if call.name.startswith(NAME)}
