# SPDX-License-Identifier: Apache-2.0
"""What the marks of a step say, with clocks that follow a script, alone and in the exchange."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from support import Parts, batch, mlp, on_ranks, seeded, sgd, train, wrap
from torch import Tensor, nn
from torch.nn import functional as F

import agmerge
import merging
import sparsifiers
from agmerge import testing
from agmerge.backends import local
from agmerge.metrics.step_times import Clock, Event, Seconds, StepRecorder, StepTimes
from sparsifiers.base import Request

MODEL = seeded(mlp)


class Script(Clock):
    """Marks at given times."""

    def __init__(self, times: Iterable[float]) -> None:
        self.left = list(times)

    def mark(self) -> float:
        return self.left.pop(0)

    def since(self, origin: float, marks: Sequence[float]) -> Seconds:
        return np.array(marks, dtype=np.float64) - origin


class Virtual(Clock):
    """Stands still, but for what ``advance`` adds. ``log``: every mark."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.marks = 0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def mark(self) -> float:
        self.marks += 1
        return self.now

    def since(self, origin: float, marks: Sequence[float]) -> Seconds:
        return np.array(marks, dtype=np.float64) - origin


def note(recorder: StepRecorder, event: Event, number: int) -> None:
    """Record an event now."""
    recorder.note((event, number, recorder.now()))


def recorded(slots: Sequence[int], counts: Sequence[int], times: Iterable[float]) -> StepTimes:
    """A step in which tensors come in the order ``slots``, sent as soon as a merge buffer is complete."""
    clock = Script(times)
    recorder = StepRecorder(clock, len(slots), len(counts))
    owner = [buffer for buffer, count in enumerate(counts) for _ in range(count)]
    missing, sent = list(counts), 0
    for slot in slots:
        recorder.begin()
        note(recorder, Event.READY, slot)
        missing[owner[slot]] -= 1
        while sent < len(counts) and missing[sent] == 0:
            note(recorder, Event.REACHED, sent)
            note(recorder, Event.REACHED, sent)
            sent += 1
        note(recorder, Event.RESUMED, slot)
    for buffer in range(len(counts)):
        for _ in ("waiting", "received", "written"):
            note(recorder, Event.REACHED, buffer)
    found = recorder.times()
    assert clock.left == []  # every mark was taken, none twice
    return found


def test_every_field_is_what_it_says() -> None:
    found = recorded(
        [1, 0, 2],
        [2, 1],
        # begin; ready and resumed of slot 1; ready, complete, handed and resumed of 0 and of 2; three marks a buffer
        [100, 102, 103, 107, 108, 109, 110, 115, 116, 118, 119, 120, 125, 126, 127, 130, 131],
    )
    assert found.since.tolist() == [7, 2, 15]
    assert found.ready.tolist() == [6, 2, 11]  # by slot; 102 to 103 and 107 to 110 were the hooks' own
    assert found.complete.tolist() == [8, 16] and found.handed.tolist() == [9, 18]
    assert found.waiting.tolist() == [20, 27]
    assert found.received.tolist() == [25, 30]
    assert found.written.tolist() == [26, 31]
    assert found.finish == 30
    assert found.exposed.tolist() == [5, 3]
    assert found.travel.tolist() == [25 - 9, 30 - 25]  # the second could not begin before the first had ended


def times_of(handed: Sequence[float], arrived: Sequence[float]) -> StepTimes:
    """Of exchanges that nothing else is known about."""
    zero, begun, ended = (np.array(column, dtype=np.float64) for column in ([0.0] * len(handed), handed, arrived))
    return StepTimes(zero, zero, begun, begun, ended, ended, ended, ended)


def test_an_exchange_begins_when_it_is_handed_over_and_the_channel_is_free() -> None:
    assert times_of([2.0, 51.0], [10.0, 60.0]).travel.tolist() == [8.0, 9.0]
    assert times_of([2.0, 3.0, 4.0], [10.0, 15.0, 21.0]).travel.tolist() == [8.0, 5.0, 6.0]


def test_what_backward_hides_is_known_from_the_hook_that_sees_it() -> None:
    """Two merge buffers; the first was seen to have arrived at the last hook, the second is waited for."""
    clock = Script([0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 14, 15, 16, 17, 26, 27])
    recorder = StepRecorder(clock, 2, 2)
    recorder.begin()  # 0
    for slot in (0, 1):
        note(recorder, Event.READY, slot)  # 1, 7
        note(recorder, Event.REACHED, slot)  # 2, 8
        note(recorder, Event.REACHED, slot)  # 3, 9
        if slot == 1:
            note(recorder, Event.ARRIVED, 0)  # 12
        note(recorder, Event.RESUMED, slot)  # 4, 13
    for buffer in (0, 1):
        for _ in ("waiting", "received", "written"):
            note(recorder, Event.REACHED, buffer)  # 14, 15, 16; 17, 26, 27
    found = recorder.times()
    assert clock.left == []
    assert found.handed.tolist() == [3, 9]
    assert found.waiting.tolist() == [14, 17] and found.received.tolist() == [15, 26]
    assert found.arrived.tolist() == [12, 26]
    assert found.travel.tolist() == [12 - 3, 26 - 12] and found.exposed.tolist() == [1, 9]
    assert found.finish == 26


def test_a_clock_that_steps_back_does_not_take_readiness_with_it() -> None:
    """Events of a device have a resolution; a difference of two may be a little below zero."""
    found = recorded([0, 1], [2], [0.0, 3.0, 4.0, 3.5, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert found.ready.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("seed", range(20))
def test_arrival_order_and_hooks_do_not_change_what_backward_took(seed: int) -> None:
    source = np.random.default_rng(seed)
    n = int(source.integers(1, 8))
    counts = list(merging.Plan((1,) * n).counts) if seed % 2 else [n]
    slots = [int(slot) for slot in source.permutation(n)]
    clock = Virtual()
    recorder = StepRecorder(clock, n, len(counts))
    backward = source.integers(0, 9, n).astype(float)
    for slot, seconds in zip(slots, backward, strict=True):
        recorder.begin()
        clock.advance(seconds)
        note(recorder, Event.READY, slot)
        clock.advance(float(source.integers(0, 1000)))  # selecting, sending
        note(recorder, Event.RESUMED, slot)
    for buffer in range(len(counts)):
        for _ in range(5):
            note(recorder, Event.REACHED, buffer)
    found = recorder.times()
    assert found.ready[slots].tolist() == np.cumsum(backward).tolist()
    assert (found.since >= found.ready).all() and found.ready.shape == found.since.shape == (n,)


# -- in the exchange --------------------------------------------------------------------------------------------


class Slow(sparsifiers.Sparsifier):
    """The largest, in 100 virtual seconds."""

    name = "slow"

    def __init__(self, clock: Virtual) -> None:
        super().__init__(0.1)
        self._clock = clock

    def _select(self, vector: Tensor, request: Request) -> sparsifiers.Selection:
        self._clock.advance(100.0)
        found = vector.abs().topk(request.k).indices.sort().values.to(torch.int32)
        return sparsifiers.Selection(found, request.k)


def observed(optimizer: agmerge.DistributedOptimizer) -> list[StepTimes]:
    averages = optimizer._reducer.exchange.agreed.times
    averages.settle()
    return averages.steps


@pytest.mark.parametrize("sparsify", ["behind", "ahead"])
def test_selecting_and_sending_in_hooks_is_not_counted_as_backward(
    sparsify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Virtual()
    monkeypatch.setattr("agmerge.step.merge_buffers.clock_for", lambda devices: clock)

    def body(rank: int, model: nn.Module) -> list[StepTimes]:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: clock.advance(1.0))
        plan = merging.Plan((2, 2, 2))
        optimizer = wrap(model, compression=Slow(clock), merging=plan, sparsify=sparsify)
        train(model, optimizer, rank, range(3))
        return observed(optimizer)

    (steps,) = on_ranks(1, MODEL, body, inject=lambda call: clock.advance(10_000.0))
    for times in steps[1:]:  # in the first step nothing starts before synchronize()
        assert times.ready.tolist() == [0, 1, 2, 3, 4, 5]
        # Two of the six tensors are selected from, the weights of the two layers that come last.
        assert times.since[-1] > 5 and (np.diff(times.since) >= np.diff(times.ready)).all()
        taken = times.handed - times.complete
        selecting = [0, 100, 100] if sparsify == "behind" else [0, 0, 0]
        assert taken.tolist() == [10_000.0 + seconds for seconds in selecting]


def test_a_tensor_without_gradient_is_ready_when_the_step_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Virtual()
    monkeypatch.setattr("agmerge.step.merge_buffers.clock_for", lambda devices: clock)

    def body(rank: int, model: Parts) -> None:
        optimizer = wrap(model, compression="none", merging="layerwise")
        for step in range(3):
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            optimizer.step()
        optimizer.zero_grad()
        model.loss(rank, 3, "a").backward()
        clock.advance(7.0)
        optimizer.step()
        times = observed(optimizer)[-1]
        names = list(testing.inspect(optimizer).classes)
        late = {name for name, at in zip(names, times.since.tolist(), strict=True) if at == 7.0}
        assert late == {"b.weight", "b.bias"}
        for name in StepTimes.__dataclass_fields__:
            assert np.isfinite(getattr(times, name)).all()

    on_ranks(1, seeded(Parts), body)


@pytest.mark.parametrize("counts", [(6,), (1, 1, 1, 1, 1, 1), (2, 4), (5, 1)], ids=str)
def test_a_step_takes_the_same_marks_whatever_it_meets(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Virtual()
    monkeypatch.setattr("agmerge.step.merge_buffers.clock_for", lambda devices: clock)

    def body(rank: int, model: nn.Module) -> list[int]:
        optimizer, seen = wrap(model, compression="topk", merging=merging.Plan(counts)), [0]
        for step in range(4):
            optimizer.zero_grad()
            if step != 2:  # a step in which no tensor has a gradient
                x, y = batch(rank, step)
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen.append(clock.marks)
        return np.diff(seen).tolist()

    (marks,) = on_ranks(1, MODEL, body)
    assert marks == [1 + 2 * 6 + 6 * len(counts)] * 4  # alone, every message is seen to arrive


def test_waiting_for_a_slow_rank_is_exposed_and_counts_as_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs while this rank waits: here by what the backend adds when it is waited for."""
    clock = Virtual()
    monkeypatch.setattr("agmerge.step.merge_buffers.clock_for", lambda devices: clock)
    original = local.LocalHandle.wait

    def wait(handle: local.LocalHandle, timeout: float) -> None:
        if handle._name == "buffer 1":
            clock.advance(3.0)
        original(handle, timeout)

    monkeypatch.setattr(local.LocalHandle, "wait", wait)
    monkeypatch.setattr(local.LocalHandle, "done", lambda handle: handle._name != "buffer 1")

    def body(rank: int, model: nn.Module) -> tuple[list[StepTimes], float]:
        optimizer = wrap(model, sgd(model), compression="none", merging=merging.Plan((2, 2, 2)))
        train(model, optimizer, rank, range(3))
        return observed(optimizer), optimizer.stats()["exposed_seconds"]

    ((steps, exposed),) = on_ranks(1, MODEL, body)
    for times in steps:
        assert times.exposed.tolist() == times.travel.tolist() == [0, 3, 0]
    assert exposed == 9.0


def second_step(clock: Virtual, sent: dict[str, float]) -> StepTimes:
    """A step of one rank in which backward takes 1 a tensor. ``sent``: takes the time of each message, by name."""

    def body(rank: int, model: nn.Module) -> StepTimes:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: clock.advance(1.0))
        optimizer = wrap(model, compression="none", merging="layerwise")
        train(model, optimizer, rank, range(2))
        return observed(optimizer)[-1]

    (times,) = on_ranks(1, MODEL, body, inject=lambda call: sent.update({call.name: clock.now}))
    return times


def test_a_hidden_exchange_takes_until_the_first_hook_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward takes 1 a tensor and an exchange 2.5: all but the last three are over before anybody waits."""
    clock, sent = Virtual(), dict[str, float]()
    monkeypatch.setattr("agmerge.step.merge_buffers.clock_for", lambda devices: clock)
    monkeypatch.setattr(local.LocalHandle, "done", lambda handle: clock.now >= sent[handle._name] + 2.5)

    times = second_step(clock, sent)
    assert times.handed.tolist() == [0, 1, 2, 3, 4, 5]
    assert times.arrived.tolist() == [3, 4, 5, 5, 5, 5]
    assert times.exposed.tolist() == [0] * 6 and times.travel.tolist() == [3, 1, 1, 0, 0, 0]


def test_messages_that_have_arrived_by_one_hook_are_all_seen_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes 4.5 and holds up the others; every wait takes 1, for messages that are there too."""
    clock, sent = Virtual(), dict[str, float]()
    monkeypatch.setattr("agmerge.step.merge_buffers.clock_for", lambda devices: clock)
    monkeypatch.setattr(
        local.LocalHandle, "done", lambda one: clock.now >= sent[one._name] + (4.5 if one._name == "buffer 0" else 0.5)
    )
    original = local.LocalHandle.wait

    def wait(handle: local.LocalHandle, timeout: float) -> None:
        clock.advance(1.0)
        original(handle, timeout)

    monkeypatch.setattr(local.LocalHandle, "wait", wait)

    times = second_step(clock, sent)
    assert times.arrived.tolist() == [5, 5, 5, 5, 5, 6]
    assert times.received.tolist() == [6, 7, 8, 9, 10, 11]
    assert times.travel.tolist() == [5, 0, 0, 0, 0, 1]


def test_no_mark_of_a_step_is_waited_for_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Virtual):
        """Knows in which step a mark was made."""

        step = 0

        def mark(self) -> float:
            super().mark()
            return float(self.step)

        def since(self, origin: float, marks: Sequence[float]) -> Seconds:
            assert all(mark < self.step for mark in [origin, *marks])
            asked.update(marks)
            return np.zeros(len(marks))

    clock, asked = Late(), set[float]()
    monkeypatch.setattr("agmerge.step.merge_buffers.clock_for", lambda devices: clock)

    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, merging="layerwise")
        for clock.step in range(5):
            train(model, optimizer, rank, [clock.step])
            assert asked == set(range(clock.step))

    on_ranks(1, MODEL, body)


def test_ranks_of_a_group_have_clocks_of_their_own() -> None:
    def body(rank: int, model: nn.Module) -> int:
        optimizer = wrap(model, merging="layerwise")
        train(model, optimizer, rank, range(3))
        assert len(testing.calls()) > 0
        return id(optimizer._reducer.exchange.agreed.buffers.clock)  # type: ignore[union-attr]

    assert len(set(on_ranks(3, MODEL, body))) == 3
