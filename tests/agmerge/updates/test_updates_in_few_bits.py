# SPDX-License-Identifier: Apache-2.0
"""Updates in few bits: what workers share is equal, what is not sent is kept, and a training can be resumed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support import on_ranks, seeded
from support.updates import assert_kept, reducer_of, updating, watched
from torch import nn

import agmerge
import sparsifiers
from agmerge import testing
from agmerge.exchanges.quantised.exchange import contraction
from agmerge.options import defaults
from sparsifiers.quantising.draws import Draws

RATE = 0.05
SPECS: dict[str, dict[str, Any]] = {
    "the default": {"exchange": "sparse"},
    "late from the first step": {"exchange": "sparse", "overlap": 1},
    "in time": {"compression": "eden-4", "overlap": 0},
    "one bit": {"compression": "eden-1", "every": 3, "fragments": 3},
    "two bits, in time": {"compression": "eden-2", "every": 2, "fragments": 2, "overlap": 0},
    "rarely": {"compression": "int8", "every": 4, "fragments": 2},
    "biased": {"compression": "onebit"},
    "an outer step": {"compression": "eden-2", "outer": agmerge.Nesterov()},
    "held": {"compression": "eden-2", "carry": "hold", "every": 2, "fragments": 2},
}
EACH = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.fixture(autouse=True)
def soon_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """After four steps messages travel under the next step, not after forty."""
    monkeypatch.setattr(defaults, "IN_TIME", 4)


WORKERS = pytest.mark.parametrize("workers", [3, 2])  # three first: owners owe


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


@pytest.mark.parametrize("overlap, first", [(None, 14), (0, 10)])
def test_bits_are_chosen_once_steps_no_longer_wait(overlap: int | None, first: int) -> None:
    """A step that waits for its message would be a reason for fewer bits; four steps do, with a message that is late.

    Times are measured after ten steps that do not.
    """

    def train(rank: int) -> list[str]:
        run = Run(rank, {"overlap": overlap}, torch.optim.AdamW)
        found = []
        for _ in range(first + 1):
            run.optimizer.zero_grad()
            run.model(torch.randn(8, 48, generator=run.source)).square().mean().backward()
            run.optimizer.step()
            found.append(run.optimizer.stats()["planning"])
        return found

    for found in testing.run(2, train):
        assert found[: first - 1] == ["timing"] * (first - 1) and found[first] != "timing"


@pytest.mark.parametrize(
    "dtype, options",
    [(torch.bfloat16, {}), (torch.float32, {"compression": "eden-2", "carry": "hold", "every": 2, "fragments": 2})],
    ids=str,
)
@pytest.mark.parametrize("workers", [2, 3])
def test_a_tensor_that_is_in_one_fragment_alone_waits_for_its_turn(
    workers: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """It is small; so is the measurement of moments, of which nothing else is known."""
    sizes = ((64, 256), (256, 256), (256, 10))
    start = seeded(lambda: nn.Sequential(*(nn.Linear(*size) for size in sizes))).to(dtype)

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, exchange="sparse", check_every=1, **{"compression": "auto", **options})

        def learn(model: Any, rank: int, step: int) -> None:
            source = torch.Generator().manual_seed(100 * step + rank)
            model(torch.randn(8, 64, generator=source).to(dtype)).square().mean().backward()

        seen = watched(rank, model, optimizer, range(8), learn)
        exchange = reducer_of(optimizer).exchange
        rounded = {name for name, _ in model.named_parameters() if exchange.agreed.residual_of(name) is None}
        return seen, dict.fromkeys(rounded, torch.finfo(dtype).eps)

    runs = on_ranks(workers, start, body)
    assert_kept([seen for seen, _ in runs], roundings=4.0, rounded=runs[0][1])


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


@pytest.mark.parametrize("name", sparsifiers.quantisers())
def test_error_feedback_forgets_least_with_the_factor_of_a_quantizer(name: str) -> None:
    """Of normal blocks; a factor a tenth off either way leaves more."""
    quantizer = sparsifiers.quantiser(name)
    values = torch.randn(512 * 256, generator=torch.Generator().manual_seed(7))
    out, read = torch.zeros(512 * quantizer.record_bytes(256), dtype=torch.uint8), torch.zeros_like(values)
    quantizer.encode(values, 256, Draws(3), out)

    def left(factor: float) -> float:
        quantizer.decode_sum([out], [Draws(3)], 256, factor, read)
        return float((values - read).square().sum() / values.square().sum())

    best = contraction(quantizer)
    assert left(best) < 1 and (left(best) < min(left(0.9 * best), left(1.1 * best)) or not quantizer.unbiased)
    if quantizer.unbiased:
        assert abs(left(best) - quantizer.noise / (1 + quantizer.noise)) < 0.02


def test_more_than_two_workers_send_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice (W - 1) / W of a message leaves a worker, and not W - 1 of it: owners add up, and owe what they round."""

    def train(rank: int) -> Any:
        run = Run(rank, {"exchange": "sparse"})
        for _ in range(6):
            run.step()
        owed = run.optimizer._reducer.saved()["owed"]
        return run.optimizer.stats()["link_bytes"], sum(float(tensor.square().sum()) for tensor in owed.values())

    two, four = testing.run(2, train), testing.run(4, train)
    assert max(sent for sent, _ in four) < 2.2 * max(sent for sent, _ in two)
    assert all(owed == 0 for _, owed in two) and all(owed > 0 for _, owed in four)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"moments": "mean", "compression": "topk"}, "requires a quantizer"),
        ({"moments": "mean", "carry": "hold", "compression": "eden-2"}, "requires carry='apply'"),
        ({"moments": "mine"}, "moments"),
        ({"moments": "mean", "sync": "gradients"}, "requires sync='updates'"),
        ({"compression": "eden-2", "fragments": 3, "every": 2}, "must not exceed"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], why: str) -> None:
    net = Net()
    with pytest.raises(ValueError, match=why):
        agmerge.DistributedOptimizer(
            torch.optim.AdamW(net.parameters()), net.named_parameters(), **{"sync": "updates", **options}
        )


def test_an_optimizer_that_cannot_be_reached_is_named_once() -> None:
    def train(rank: int) -> list[str]:
        run = Run(rank, {"exchange": "sparse"}, torch.optim.Adamax)
        for _ in range(4):
            run.step()
        names: list[str] = run.optimizer.stats()["moments"]["unreachable"]
        return names

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert testing.run(2, train) == [["Adamax"], ["Adamax"]]
    assert sum("AGM714: The moments of Adamax" in str(one.message) for one in said) == 1


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("clips", [True, False])
def test_gradients_are_measured_whether_they_are_clipped_or_not(clips: bool, overlap: int) -> None:
    """Four workers with gradients of noise: their mean has about a quarter of the energy."""

    def train(rank: int) -> tuple[float, float]:
        run = Run(rank, {"compression": "eden-2", "every": 2, "fragments": 2, "overlap": overlap}, torch.optim.AdamW)
        for step in range(8):
            for number, parameter in enumerate(run.model.parameters()):
                source = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
                parameter.grad = torch.randn(parameter.shape, generator=source)
            norm = float(run.optimizer.clip_grad_norm_(1e9)) if clips else 0.0
            run.optimizer.step()
        return run.optimizer.stats()["moments"]["energy_ratio"], norm

    elements = sum(parameter.numel() for parameter in Net().parameters())
    for ratio, norm in testing.run(4, train):
        assert 0.25 <= ratio < 0.35
        assert not clips or abs(norm - (ratio * elements) ** 0.5) < 0.1 * norm


@pytest.mark.parametrize("fragments", [3, 2, 1])
def test_every_fragment_has_its_turn(fragments: int) -> None:
    """As many exchanges as there are fragments move every element that workers share; one less leaves some."""

    def train(rank: int) -> list[float]:
        options = {"compression": "eden-2", "every": fragments, "fragments": fragments, "overlap": 0}
        run, moved = Run(rank, options, torch.optim.AdamW), []
        for _ in range(fragments):
            run.step()
            with run.optimizer.shared():
                pairs = [(value, run.start[name]) for name, value in run.values().items() if value.dim() > 1]
            changed = sum(int((value != start).sum()) for value, start in pairs)
            moved.append(changed / sum(value.numel() for value, _ in pairs))
        return moved

    for shares in testing.run(2, train):
        assert shares == sorted(shares) and shares[-1] > 0.99
        assert all(abs(share - (number + 1) / fragments) < 0.2 for number, share in enumerate(shares))
