# SPDX-License-Identifier: Apache-2.0
"""Updates in few bits: what workers share is equal, what is not sent is kept, and a training can be resumed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import agmerge
from agmerge import testing

RATE = 0.05
SPECS: dict[str, dict[str, Any]] = {
    "the default": {"exchange": "sparse"},
    "in time": {"compression": "eden-4"},
    "one bit": {"compression": "eden-1", "every": 3, "fragments": 3},
    "two bits, in time": {"compression": "eden-2", "every": 2, "fragments": 2, "overlap": 0},
    "rarely": {"compression": "int8", "every": 4, "fragments": 2},
    "biased": {"compression": "onebit"},
    "an outer step": {"compression": "eden-2", "outer": agmerge.Nesterov()},
    "held": {"compression": "eden-2", "carry": "hold", "every": 2, "fragments": 2},
}
EACH = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
WORKERS = pytest.mark.parametrize("workers", [2, 3])


class Net(nn.Module):
    """Two layers, and one whose weight is not in C order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(48, 96), nn.Linear(96, 64), nn.Linear(64, 7)
        source = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=source))
        self.second.weight = nn.Parameter(self.second.weight.detach().t().contiguous().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Run:
    """A training of one worker: its model, its optimizer, and the sum of its own steps."""

    def __init__(self, rank: int, spec: dict[str, Any], make: Any = None) -> None:
        self.model, self.source = Net(), torch.Generator().manual_seed(100 + rank)
        inner = torch.optim.SGD(self.model.parameters(), lr=RATE) if make is None else make(self.model.parameters())
        self.optimizer = agmerge.DistributedOptimizer(
            inner, self.model.named_parameters(), sync="updates", check_every=1, **spec
        )
        self.moved = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.model.named_parameters()}
        self.start = copy.deepcopy(self.values())

    def values(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def step(self) -> None:
        x = torch.randn(8, 48, generator=self.source)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), x[:, :7].argmax(1)).backward()
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            self.moved[name] -= RATE * p.grad.double()
        self.optimizer.step()


@EACH
@WORKERS
def test_the_mean_moves_by_the_workers_steps_alone(workers: int, spec: dict[str, Any]) -> None:
    """Whatever was sent: once all is given out, the shared parameters are where the mean of all own steps leads."""

    def train(rank: int) -> Any:
        run = Run(rank, spec)
        for _ in range(13):
            run.step()
        run.optimizer.consolidate()
        return run.start, run.moved, run.values()

    found = testing.run(workers, train)
    start, _, shared = found[0]
    for _, _, other in found:
        assert all(torch.equal(other[name], shared[name]) for name in shared)
    if "outer" in spec:
        return
    for name in shared:
        wanted = start[name] + sum(moved[name] for _, moved, _ in found) / workers
        torch.testing.assert_close(shared[name].double(), wanted, rtol=0, atol=2e-6)


@EACH
def test_something_is_learned(spec: dict[str, Any]) -> None:
    """Few bits follow the uncompressed training: before, what had been sent was sent again, and it diverged."""

    def moved(rank: int, options: dict[str, Any]) -> torch.Tensor:
        run = Run(rank, options)
        for _ in range(30):
            run.step()
        run.optimizer.consolidate()
        return torch.cat([(now - run.start[name]).flatten() for name, now in run.values().items()])

    few, whole = (testing.run(2, lambda rank, o=o: moved(rank, o))[0] for o in (spec, {**spec, "compression": "none"}))
    if "outer" not in spec:
        assert (few - whole).norm() < 0.2 * whole.norm()
    assert few.norm() < 2 * whole.norm()


@EACH
@WORKERS
def test_resumed_between_any_two_steps_it_goes_on_to_the_bit(workers: int, spec: dict[str, Any]) -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    def train(rank: int) -> Any:
        run, saved, ends = Run(rank, spec, adam), [], []
        for _ in range(9):
            saved.append(copy.deepcopy((run.optimizer.state_dict(), run.model.state_dict(), run.source.get_state())))
            run.step()
        with run.optimizer.shared():
            ends.append(run.values())
        own = run.values()
        run.optimizer.close()
        for optimizer_state, model_state, source in (saved[3], saved[6]):
            again = Run(rank, spec, adam)
            again.model.load_state_dict(model_state)
            again.optimizer.load_state_dict(optimizer_state)
            again.source.set_state(source)
            for _ in range(3 if source is saved[6][2] else 6):
                again.step()
            with again.optimizer.shared():
                ends.append(again.values())
            assert all(torch.equal(own[name], value) for name, value in again.values().items())
            again.optimizer.close()
        return ends

    for ends in testing.run(workers, train):
        for name in ends[0]:
            assert torch.equal(ends[0][name], ends[1][name]) and torch.equal(ends[0][name], ends[2][name])
