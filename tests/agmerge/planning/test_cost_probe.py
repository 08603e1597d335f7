# SPDX-License-Identifier: Apache-2.0
"""Probes cost the same calls on every rank, tell every rank the same, and leave nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import WIDTH, agreed, digest, gradients, mlp, on_ranks, same_bits, seeded, sgd, train, wrap
from torch import Tensor, nn

import agmerge
from agmerge import testing
from agmerge.planning import choice, cost_probe
from agmerge.planning.cost_probe import (
    FLOOR,
    GROWTH,
    RUNS,
    SECONDS,
    STEPS,
    VISITS,
    Budget,
    MeasuredCosts,
    MessageTimer,
    Times,
    probe,
    sizes,
)
from agmerge.planning.replanner import FIRST
from agmerge.runtime import workers
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Layout, TensorClass
from merging.pieces import go_on, run_to_end
from sparsifiers import Kind

MODEL = seeded(mlp)
CPU = torch.device("cpu")
Calls = list[tuple[str, str, int]]

CASES: dict[str, dict[str, Any]] = {
    "residual": {"compression": "topk", "memory": "residual"},
    "none": {"compression": "topk", "memory": "none"},
    "dgc": {"compression": "dgc", "memory": "dgc", "density": 0.1},
    "stateful": {"compression": "redsync", "density": 0.1},
    "adtopk": {"compression": "adtopk"},
    "dense": {"compression": "none"},
    "fp16": {"compression": "fp16"},
    "ordered": {"compression": "fp16", "dense_sum": "ordered"},
    "all exempt": {"compression": "topk", "dense": [".*"]},
}
EVERY: dict[str, dict[str, Any]] = {
    **CASES,
    "quantised": {"compression": "int8"},
    "low rank": {"compression": "powersgd"},
}


def tall() -> nn.Sequential:
    """Sparse tensors of 1024, 3072 and 9216 elements."""
    widths = [WIDTH, WIDTH, 96, 96, 10]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))


TALL = seeded(tall)


def wrapped(model: nn.Module, **options: Any) -> agmerge.DistributedOptimizer:
    inner = sgd(model, momentum=0.0 if options.get("memory") == "dgc" else 0.9)
    return wrap(model, inner, merging="layerwise", **options)


def session_of(optimizer: agmerge.DistributedOptimizer) -> MergeBuffers:
    assert optimizer._reducer.exchange.agreed.buffers is not None
    return optimizer._reducer.exchange.agreed.buffers


@pytest.fixture(autouse=True)
def probes_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the one for all tests: here it counts how often what is timed, in a single visit."""
    monkeypatch.setattr(cost_probe, "VISITS", 1)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Almost as in all other tests."""
    monkeypatch.setattr(cost_probe, "RUNS", 2)


def costs_at_once(buffers: MergeBuffers, step: int) -> MeasuredCosts:
    """Probe as much as there is, after one step."""
    return run_to_end(probe(buffers, step, 0.01, Budget(0.01, 4 * buffers.layout.numel, at_once=True)))


class Ticking:
    """``time`` for probes: a rank's clock goes on by its own tick at every look, and by nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tick: Callable[[int], float]) -> None:
        self._tick, self._here = tick, threading.local()
        monkeypatch.setattr(cost_probe, "time", SimpleNamespace(perf_counter=self._now, monotonic=time.monotonic))

    def _now(self) -> float:
        self._here.now = getattr(self._here, "now", 0.0) + self._tick(workers.world().rank)
        return float(self._here.now)


def probed(size: int, model: nn.Module, seconds: float = 0.01, **options: Any) -> list[tuple[MeasuredCosts, Calls]]:
    """What a probe after two steps of so many seconds finds, and what it calls, rank by rank."""

    def body(rank: int, here: nn.Module) -> tuple[MeasuredCosts, Calls]:
        optimizer = wrapped(here, **options)
        train(here, optimizer, rank, range(2))
        before = len(testing.calls())
        budget = Budget(seconds, 1 << 30, at_once=True)
        found = run_to_end(probe(session_of(optimizer), 2, 0.01, budget))
        return found, testing.calls()[before:]

    return on_ranks(size, model, body)


# -- sizes ------------------------------------------------------------------------------------------------------

CLASSES = [
    TensorClass(CPU, torch.float32, Kind.SPARSE),
    TensorClass(CPU, torch.float32, Kind.DENSE),
    TensorClass(CPU, torch.bfloat16, Kind.SPARSE),
]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.sampled_from(CLASSES)), min_size=1, max_size=12))
def test_sizes_double_up_to_the_whole_of_the_largest_class(drawn: list[tuple[int, TensorClass]]) -> None:
    layout = Layout([(f"t{i}", (numel,), tensor_class) for i, (numel, tensor_class) in enumerate(drawn)])
    chosen = sizes(layout)
    (tensor_class,) = {segment.tensor_class for segment in chosen}
    assert tensor_class.sparse or not any(other.sparse for other in layout.lengths)
    assert layout.lengths[tensor_class] == max(
        n for other, n in layout.lengths.items() if other.sparse == tensor_class.sparse
    )
    here = [slot for slot in layout.slots if slot.tensor_class == tensor_class]
    assert list(chosen[-1].slots) == here
    numels = [segment.numel for segment in chosen]
    assert numels[0] == min(slot.numel for slot in here)
    steps = list(zip(numels, numels[1:], strict=False))
    assert all(GROWTH * a <= b for a, b in steps[:-1])
    assert all(GROWTH * a * a <= b * b for a, b in steps[-1:])
    # None is left out: what lies more than twice as far apart has nothing that fits in between.
    firsts = [sum(slot.numel for slot in here[:i]) for i in range(2, len(here))]
    for a, b in steps:
        between = [n for n in [*firsts, *(slot.numel for slot in here)] if GROWTH * a <= n < b]
        assert not [n for n in between if GROWTH * n * n <= numels[-1] ** 2]
    for segment in chosen:  # one slice of the tensor class
        first = here.index(segment.slots[0])
        assert list(segment.slots) == here[first : first + len(segment.slots)]


# -- what ranks find --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_find_and_call_the_same_though_their_clocks_differ(
    size: int, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ticking(monkeypatch, lambda rank: 1e-3 * (1 + rank))
    (sparsify, exchange, _, message), calls = agreed(probed(size, TALL, **CASES[case]))
    slowest = 1e-3 * size
    assert message is not None
    if sparsify is None:
        assert CASES[case]["compression"] in ("none", "fp16") or "dense" in CASES[case]
        assert exchange.seconds == pytest.approx([2 * slowest] * len(exchange.seconds))  # with packing
        assert message.seconds == pytest.approx([slowest])  # to write
    else:
        assert exchange.seconds == pytest.approx([slowest] * len(exchange.seconds))
        assert sparsify(0) == 0.0 and sparsify.seconds[1:] == pytest.approx([slowest] * (len(sparsify.seconds) - 1))
        assert message.seconds == pytest.approx([2 * slowest] * len(message.seconds))  # to pack and to write
    assert {name for _, name, _ in calls} <= {"probe", "probe/sum", "probe/seconds"}
    messages = [size for _, name, size in calls if name == "probe"]
    assert messages == sorted(messages) and len(set(messages)) >= 2  # several sizes


def test_what_is_found_is_the_maximum_over_ranks_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 selects slowly, rank 1 sends slowly."""
    monkeypatch.setattr(cost_probe, "SECONDS", 100.0)  # so that all sizes are timed
    send = MessageTimer.send

    def timed(self: MessageTimer) -> Times:
        send(self)
        rank, numel = workers.world().rank, self._segment.numel
        selecting, travel = (3e-6, 1e-6)[rank] * numel, (1e-6, 5e-6)[rank] * numel
        return Times(selecting, 1e-6 * numel, travel, 2e-3 * (1 + rank))

    monkeypatch.setattr(MessageTimer, "send", timed)
    (sparsify, exchange, _, message), _ = agreed(probed(2, TALL, compression="topk", density=0.125))
    assert sparsify is not None and message is not None
    numels = [1024, 3072, 1024 + 3072 + 96 * 96]
    assert [sparsify(numel) for numel in numels] == pytest.approx([3e-6 * numel for numel in numels])
    assert [exchange(numel // 8) for numel in numels] == pytest.approx([5e-6 * numel for numel in numels])
    assert [message(numel // 8) for numel in numels] == pytest.approx([4e-3 + 1e-6 * numel for numel in numels])


def test_a_size_that_is_too_dear_is_the_end_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the next size is thought to take three times as long at first, and must be had twice."""
    looks = {}
    for cost in (1e-6, SECONDS / 100, SECONDS):
        # Only rank 1 is that slow.
        Ticking(monkeypatch, lambda rank, cost=cost: cost * rank)  # type: ignore[misc]
        (_, exchange, _, _), calls = agreed(probed(2, TALL, compression="topk", exchange="sparse"))
        looks[cost] = (len(exchange.elements), sum(name == "probe" for _, name, _ in calls))
    assert looks[1e-6] == (4, 1 + 4 * RUNS)  # one message to begin with
    assert 1 < looks[SECONDS / 100][0] and looks[SECONDS / 100][1] < looks[1e-6][1]
    assert looks[SECONDS] == (1, 1)


def test_what_training_has_sent_needs_no_large_probe_but_a_dense_exchange_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message seems to take as long, as on a busy machine: two small ones would make a dense exchange free."""
    Ticking(monkeypatch, lambda rank: 1e-2)

    def body(rank: int, here: nn.Module, bounded: bool) -> tuple[int, int]:
        optimizer = wrapped(here, compression="topk", exchange="auto")
        train(here, optimizer, rank, range(2))
        buffers = session_of(optimizer)
        costs = run_to_end(probe(buffers, 2, 0.01, Budget(0.1, 4 * buffers.layout.numel), bounded=bounded))
        assert costs.dense is not None
        return len(costs.exchange.elements), len(costs.dense.elements)

    (compressed, dense) = agreed(on_ranks(2, TALL, lambda rank, here: body(rank, here, True)))
    assert compressed == 1 and dense == 4
    assert agreed(on_ranks(2, TALL, lambda rank, here: body(rank, here, False))) == (4, 4)


# -- what they cost ---------------------------------------------------------------------------------------------


def spread(step_seconds: float, case: str, **options: Any) -> list[tuple[MeasuredCosts, list[float], int, list[str]]]:
    """Probe between steps of so many seconds, a part at a time, on two ranks.

    Returns, by rank, the costs, the seconds probed after each step, the bytes that left, and the parameters' bits.
    """

    def body(rank: int, here: nn.Module) -> tuple[MeasuredCosts, list[float], int, list[str]]:
        optimizer = wrapped(here, **{**CASES[case], **options})
        seen = train(here, optimizer, rank, range(2))
        buffers = session_of(optimizer)
        budget = Budget(step_seconds, 4 * buffers.layout.numel)
        parts, took, sent = probe(buffers, 2, 0.01, budget), [], 0
        for step in range(2, 400):
            before, calls = budget.seconds, len(testing.calls())
            costs = go_on(parts, -1.0)
            took.append(budget.seconds - before)
            probes = testing.calls()[calls:]
            assert {name.partition("/")[0].partition(" ")[0] for _, name, _ in probes} == {"probe"}
            sent += sum(size for _, _, size in probes)
            if costs is not None:
                return costs, took, sent, seen
            seen += train(here, optimizer, rank, [step])
        raise AssertionError("probes do not end")

    return on_ranks(2, TALL, body)


@pytest.mark.parametrize("case", ["residual", "stateful", "dense", "ordered"])
@pytest.mark.parametrize("exchange", ["auto", "sparse"])
def test_probes_are_spread_over_steps_and_bounded_in_seconds(
    case: str, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the clock takes half a millisecond, a step 0.1 s, and so 15 ms longer with probes."""
    monkeypatch.setattr(cost_probe, "VISITS", VISITS)
    Ticking(monkeypatch, lambda rank: 5e-4)
    _, took, _, seen = agreed([(costs, took, 0, seen) for costs, took, _, seen in spread(0.1, case, exchange=exchange)])
    assert max(took) <= 15e-3 + 1e-9 and len(took) > 2
    assert sum(took) <= max(SECONDS, STEPS * 0.1)
    assert len(set(seen)) == len(seen)  # training goes on in between


@pytest.mark.parametrize("case", CASES)
def test_probes_are_bounded_by_a_multiple_of_the_gradient(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is no bound where nothing takes any; what is counted is what the group in memory has seen."""
    for often in ("VISITS", "RUNS"):
        monkeypatch.setattr(cost_probe, often, 10)
    monkeypatch.setattr(cost_probe, "GRADIENTS", 3.0)
    Ticking(monkeypatch, lambda rank: 1e-7)
    gradient = 4 * sum(p.numel() for p in tall().parameters())
    assert FLOOR < 3 * gradient
    for _, _, sent, _ in spread(0.1, case):
        assert 2 * gradient < sent <= 3 * gradient


# -- what they leave --------------------------------------------------------------------------------------------


def kept(model: nn.Module, optimizer: agmerge.DistributedOptimizer) -> dict[str, Tensor]:
    """All that a script, a checkpoint or the next step can see."""
    section = optimizer.state_dict()["agmerge"]
    found = {f"{kind} {name}": one for kind in ("residuals", "momenta") for name, one in section[kind].items()}
    found |= {
        f"update {tensor_class}": arena.update.clone()
        for tensor_class, arena in session_of(optimizer).flat.arenas.items()
    }
    found |= {f"gradient {name}": one for name, one in gradients(model).items() if one is not None}
    return found | {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("case", EVERY)
def test_a_probe_writes_nothing_that_anyone_can_see(case: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrapped(model, **EVERY[case])
        train(model, optimizer, rank, range(3))
        before, stats = kept(model, optimizer), optimizer.stats()
        sparsifier = optimizer._reducer.exchange.agreed.config.compression.compressor
        state = repr(sparsifier.state_dict()) if sparsifier else ""
        costs_at_once(session_of(optimizer), 3)
        after = kept(model, optimizer)
        assert after.keys() == before.keys()
        assert [name for name in before if not same_bits(before[name], after[name])] == []
        assert optimizer.stats() == stats  # probes are no traffic of gradients
        if sparsifier:
            assert repr(sparsifier.state_dict()) == state and "probe" not in state

    on_ranks(2, MODEL, body)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("sparsify", ["behind", "ahead"])
@pytest.mark.parametrize("case", EVERY)
def test_training_goes_on_as_if_there_had_been_no_probe(case: str, sparsify: str) -> None:
    def body(rank: int, model: nn.Module, probing_at: set[int]) -> tuple[list[str], str]:
        selects = {} if EVERY[case]["compression"] in ("none", "fp16", "int8", "powersgd") else {"sparsify": sparsify}
        optimizer, seen = wrapped(model, **selects, **EVERY[case]), []
        for step in range(6):
            seen += train(model, optimizer, rank, [step])
            if step in probing_at:
                costs_at_once(session_of(optimizer), step + 1)
        state = optimizer.state_dict()["agmerge"]["residuals"]
        return seen, digest(state[name] for name in sorted(state))

    without = on_ranks(2, MODEL, lambda r, m: body(r, m, set()))
    assert on_ranks(2, MODEL, lambda r, m: body(r, m, {1, 3, 4})) == without
    assert len(set(without[0][0])) == 6


def test_stats_say_when_it_probes_and_what_that_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "HOPELESS", 0.0)  # no trials
    Ticking(monkeypatch, lambda rank: 1e-2)

    def body(rank: int, model: nn.Module) -> list[tuple[str, int]]:
        optimizer = wrap(model, compression="topk", exchange="auto", merging="agmerge")
        seen = [(optimizer.stats()["planning"], optimizer.stats()["bytes_probed"])]
        while len(seen) < 400 and seen[-1][0] != "settled":
            train(model, optimizer, rank, [len(seen)])
            seen.append((optimizer.stats()["planning"], optimizer.stats()["bytes_probed"]))
        before = len(testing.calls())
        probes = sum(size for _, name, size in testing.calls()[:before] if name.startswith("probe"))
        assert seen[-1][1] <= probes <= seen[-1][1] + 100  # but for what ranks say to each other at the end
        return seen

    seen = agreed(on_ranks(2, TALL, body))
    states = [state for state, _ in seen]
    assert list(dict.fromkeys(states)) == ["fixed", "timing", "probing", "settled"]
    assert states.count("timing") == FIRST - 1 and states.count("probing") > 1
    sent = [sent for _, sent in seen]
    assert sent == sorted(sent) and sent[FIRST] == 0 < sent[FIRST + 1]
