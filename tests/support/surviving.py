# SPDX-License-Identifier: Apache-2.0
"""Train in an elastic group of threads, of which one dies in a call of its own, and compare those that go on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import agmerge
import merging
from agmerge.backends.local import Call
from agmerge.step.gradient_exchange import GradientExchange
from tests.support import elastic

STEPS, SIZES = 6, (12, 16, 12)
PLAN = merging.Plan([1, 1, 2])
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"compression": "none"},
    "ordered": {"compression": "none", "dense_sum": "ordered"},
    "sparse": {"compression": "topk", "density": 0.1, "exchange": "sparse"},
    "dgc": {"compression": "dgc", "density": 0.1},
    "quantised": {"compression": "eden"},
    "feedback": {"compression": "int4", "memory": "residual"},
    "auto": {},
    "updates": {"sync": "updates", "density": 0.1},
    "hold": {"sync": "updates", "density": 0.1, "carry": "hold", "wire": "fp32"},
    "local": {"sync": "updates", "density": 0.1, "every": 2},
    "late": {"sync": "updates", "density": 0.1, "overlap": 1},
    "few bits": {
        "sync": "updates",
        "compression": "eden-2",
        "every": 2,
        "fragments": 2,
        "overlap": 1,
        "moments": "own",
    },
}


class Training:
    """One training of an elastic group, of which ``victim`` dies in its call number ``dies_at`` (None: nobody).

    In step 1 the gradients of ``sick`` are not finite; None: nobody's.
    """

    def __init__(
        self, options: Mapping[str, Any], size: int, victim: int, dies_at: int | None, sick: int | None = None
    ) -> None:
        self.options, self.size, self.victim, self.dies_at, self.sick = options, size, victim, dies_at, sick
        self.calls: list[str] = []  # of the victim, in the first generation
        self.model = torch.nn.Sequential(torch.nn.Linear(*SIZES[:2]), torch.nn.Tanh(), torch.nn.Linear(*SIZES[1:]))

    def run(self, luck: elastic.BadLuck | None = None) -> list[Any]:
        """Return, by worker, the workers and the shared parameters after each step, and whether it was refused.

        For one that has died it is an error.
        """
        return elastic.run(self.size, self.train, self.kill, luck)

    def kill(self, worker: int, generation: int, call: Call) -> None:
        if worker == self.victim and generation == 0:
            self.calls.append(call.name)
            if self.dies_at is not None and len(self.calls) > self.dies_at:
                raise elastic.Killed

    def placed(self, model: torch.nn.Sequential, place: str) -> torch.nn.Module:
        """Return ``model`` with its parameters at ``place``."""
        return model.to(place)

    def train(self, worker: int, place: str = "cpu") -> list[tuple[int, torch.Tensor]]:
        """Train on one rank, with tensors at ``place``."""
        model = self.placed(copy.deepcopy(self.model), place)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = agmerge.DistributedOptimizer(
            inner, model.named_parameters(), timeout=20.0, check_every=1, merging=PLAN, **self.options
        )
        source, trace = torch.Generator().manual_seed(worker), []
        for step in range(STEPS):
            inputs, refused = torch.randn(4, SIZES[0], generator=source).to(place), 0.0
            optimizer.zero_grad()
            loss = (model(inputs) - inputs).square().mean()
            (loss * torch.nan if (worker, step) == (self.sick, 1) else loss).backward()
            try:
                optimizer.step()
            except agmerge.NonFiniteError:
                refused = 1.0
            reducer = optimizer._reducer
            shared = model.parameters() if reducer.combines_gradients else reducer.replica.shared.base.values()
            after = [one.detach().cpu().flatten() for one in shared]
            trace.append((agmerge.size(), torch.cat([*after, torch.tensor([refused])])))
        return trace


def check(results: list[Any], victim: int, size: int) -> None:
    """All but the victim have made all steps, equal to the bit, the last ones without it."""
    assert isinstance(results[victim], elastic.Killed)
    survivors = [result for worker, result in enumerate(results) if worker != victim]
    for result in survivors:
        if isinstance(result, BaseException):
            raise result
    for step in range(STEPS):
        for result in survivors[1:]:
            assert torch.equal(result[step][1], survivors[0][step][1]), f"parameters differ after step {step}"
    assert [workers for workers, _ in survivors[0]][-1] == size - 1


def note_outcomes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set that fills with what survivors still get of broken rounds: "all", "part" or "nothing"."""
    found: set[str] = set()
    catch_up = GradientExchange.catch_up

    def watched(self: GradientExchange, survivors: Any) -> Any:
        combined = catch_up(self, survivors)
        found.add("nothing" if combined is None else "part" if combined.is_part else "all")
        return combined

    monkeypatch.setattr(GradientExchange, "catch_up", watched)
    return found


def first_call_of_step(calls: list[str], step: int) -> int:
    """Return the number of the call that begins step ``step``, of those whose messages are merge buffers."""
    return [number for number, name in enumerate(calls) if name == "buffer 0"][step]
