# SPDX-License-Identifier: Apache-2.0
"""Messages of the sparse all-reduce: several steps, several under way, and errors that are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.exchanges import (
    CPU,
    Quiet,
    apart,
    control_of,
    draw_offer,
    draw_work,
    draws,
    exchange,
    oktopk,
    same,
    segments_of,
)

from agmerge import testing
from agmerge.backends.local import Call
from agmerge.errors import MessageError
from agmerge.exchanges import InFlight, SegmentBuffers
from agmerge.exchanges.message.format import FIXED, MAGIC, OF_SECTION
from agmerge.tensors.layout import TensorClass
from sparsifiers import Kind, Selection

FP32 = TensorClass(CPU, torch.float32, Kind.SPARSE)


# -- steps ------------------------------------------------------------------------------------------------------


def test_buffers_are_reused_and_leak_nothing() -> None:
    (segment,) = segments_of([(640, FP32)])
    capacities = [200, 5, 0, 3, 200, 60]

    def steps(rank: int, keep: bool) -> list[torch.Tensor]:
        updates, here = [], oktopk()(Quiet())
        for step, capacity in enumerate(capacities):
            here = here if keep else oktopk()(Quiet())
            work = draw_work(segment, 10 * step + rank, 10.0**-step)
            load = SegmentBuffers(segment, work, torch.full((segment.length,), torch.nan))
            offer = draw_offer(640, capacity, 10 * step + rank, False)
            pending = here.start("buffer 3", [load], [offer], control_of(rank, [segment], step))
            here.wait(pending)
            here.finish(pending)
            updates.append(load.update)
        return updates

    for kept, fresh in testing.run(3, lambda rank: (steps(rank, True), steps(rank, False))):
        assert all(same(a, b) for a, b in zip(kept, fresh, strict=True))


def test_messages_under_way_advance_together_in_the_same_order_everywhere() -> None:
    segments = apart([part for numel in (300, 40, 900) for part in segments_of([(numel, FP32)])])
    offers = [0.3, 0.0, 0.1]

    def body(rank: int) -> tuple[list[tuple[str, str]], list[torch.Tensor], int]:
        here = oktopk()(Quiet())
        loads = [
            SegmentBuffers(part, draw_work(part, rank, 1.0), torch.full((part.length,), torch.nan)) for part in segments
        ]
        abandoned = here.start(
            "buffer 2", [loads[2]], [draw_offer(928, 9, rank, False)], control_of(rank, [segments[2]], 6)
        )
        under_way = []
        for number, (load, density) in enumerate(zip(loads, offers, strict=True)):
            offer = draw_offer(load.segment.length, round(density * load.segment.length), rank, rank == 1)
            control = replace(control_of(rank, [load.segment]), buffer=number)
            under_way.append(here.start(f"buffer {number}", [load], [offer], control))
        assert not any(here.arrived(one) for one in (*under_way, abandoned)[:3])
        for one in under_way:
            here.wait(one)
            assert all(here.arrived(other) for other in under_way)
        assert all(load.update.isnan().all() for load in loads)
        for one in under_way:
            here.finish(one)
            here.wait(one)  # and once more: nothing happens
        calls = testing.calls()
        sent = abandoned.bytes + sum(one.bytes for one in under_way)
        assert sent == sum(size for _, _, size in calls)
        return [(kind, name) for kind, name, _ in calls], [load.update for load in loads], rank

    found = testing.run(4, body, inject=testing.jitter(1))
    calls = found[0][0]
    assert all(one[0] == calls for one in found)
    assert all(same(a, b) for one in found for a, b in zip(one[1], found[0][1], strict=True))
    phases = [name for _, name in calls[4:]]  # behind the headers
    assert phases[:2] == ["buffer 0/counts", "buffer 2/counts"]  # buffer 1 has nothing on offer
    assert phases[2:4] == ["buffer 0/pieces", "buffer 2/pieces"]


def test_after_an_error_nothing_of_it_goes_on() -> None:
    (segment,) = segments_of([(640, FP32)])

    def body(rank: int) -> list[str]:
        here = oktopk()(Quiet())

        def start(name: str) -> InFlight:
            load = SegmentBuffers(segment, draw_work(segment, rank, 1.0), torch.full((segment.length,), torch.nan))
            return here.start(name, [load], [draw_offer(640, 60, 3 * rank, False)], control_of(rank, [segment]))

        first, second = start("buffer 0"), start("buffer 1")
        for pending in (second, first):
            with pytest.raises((MessageError, AssertionError)):
                here.wait(pending)
        before = len(testing.calls())
        third = start("buffer 2")
        here.wait(third)
        here.finish(third)
        return [name for _, name, _ in testing.calls()[before:]]

    (names, *others) = testing.run(3, body, inject=damage(1, "buffer 0", 0, 0))
    assert all(name.startswith("buffer 2") for name in names) and all(other == names for other in others)


# -- errors -----------------------------------------------------------------------------------------------------


def errors_of(inject: Callable[[Call], None] | None = None, odd: int = -1, field: str = "step") -> list[BaseException]:
    (segment,) = segments_of([(4000, FP32)])

    def body(rank: int) -> None:
        control = control_of(rank, [segment])
        if rank == odd:
            control = replace(control, **{field: getattr(control, field) - 1})
        load = SegmentBuffers(segment, draw_work(segment, rank, 1.0), torch.full((segment.length,), torch.nan))
        here = oktopk()(Quiet())
        # With the seeds 0, 3, 6 an offer is as large as it may be.
        pending = here.start("buffer 3", [load], [draw_offer(segment.length, 400, 3 * rank, False)], control)
        try:
            here.wait(pending)
        finally:
            assert load.update.isnan().all()

    found = testing.run(3, body, return_errors=True, inject=inject)
    assert [type(error) for error in found] == [MessageError] * 3
    assert len({str(error) for error in found}) == 1
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("field", ["step", "plan", "buffer"])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_at_different_places_are_the_same_error_on_every_rank(field: str, odd: int) -> None:
    assert "buffer 3: messages of ranks do not match" in str(errors_of(odd=odd, field=field)[0])


def damage(odd: int, name: str, word: int, value: int) -> Callable[[Call], None]:
    def inject(call: Call) -> None:
        if call.rank == odd and call.name == name:
            call.tensor.view(torch.int32)[word] = value

    return inject


HEADER = len(FIXED) + len(OF_SECTION) + 1  # fixed words, those of one section, one of used bits


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    "name, word, value, said",
    [
        ("buffer 3", 0, MAGIC + 1, r"AGM503: buffer 3: .* ranks \[{odd}\]"),
        ("buffer 3", HEADER - 2, 401, r"AGM501: buffer 3: .* ranks \[{odd}\]"),
        ("buffer 3", HEADER, 401, r"AGM501: buffer 3: ranks sent \[.*401.*\] elements, expected at most 400"),
        ("buffer 3", HEADER, -1, r"AGM501: buffer 3: ranks sent \[.*-1.*\] elements, expected at most 400"),
        ("buffer 3/counts", 1, 7, r"AGM501: buffer 3: ranks sent \[400, 400, 400\] elements, but \[\["),
        ("buffer 3/pieces", 0, -1, "AGM501: buffer 3: the message of rank {odd} to rank 0 "),
        ("buffer 3/pieces", 1, 4000, "AGM501: buffer 3: the message of rank {odd} to rank 0 "),
        ("buffer 3/kept", 3, 4032, "AGM501: buffer 3: the result of rank {odd} "),
        ("buffer 3/kept", 3, -1, "AGM501: buffer 3: the result of rank {odd} "),
    ],
)
def test_a_damaged_message_is_the_same_error_on_every_rank(
    name: str, word: int, value: int, said: str, odd: int
) -> None:
    (first, *_) = errors_of(damage(odd, name, word, value))
    with pytest.raises(MessageError, match=said.format(odd=odd)):
        raise first


def test_counts_that_only_add_up_are_the_same_error_on_every_rank() -> None:
    def inject(call: Call) -> None:
        if call.rank == 1 and call.name == "buffer 3/counts":
            call.tensor.add_(torch.tensor([-500, 500, 0], dtype=torch.int32))

    assert "elements, but [[" in str(errors_of(inject)[0])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    what=st.sampled_from(["pieces", "surplus", "kept"]),
    odd=st.integers(0, 2),
    place=st.floats(0, 1),
    flips=st.integers(1, 255),
)
def test_whatever_byte_changes_on_its_way_is_the_same_error_on_every_rank(
    what: str, odd: int, place: float, flips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agmerge.exchanges.oktopk.exchange.SLACK", 0.0)  # surplus always

    def inject(call: Call) -> None:
        if call.rank == odd and call.name == f"buffer 3/{what}":
            # What is behind the shorter parcels of the last phase means nothing.
            length = call.tensor.numel() // (2 if what == "kept" else 1)
            call.tensor[round(place * (length - 1))] ^= flips

    (first, *_) = errors_of(inject)
    named = {"pieces": f"message of rank {odd} to rank", "surplus": "AGM501", "kept": f"of rank {odd} "}
    assert named[what] in str(first)


@pytest.mark.parametrize("wrong", [[5, 3, 9], [5, 5, 9], [3000, 5, 9], [5, 9, 4000]], ids=str)
@pytest.mark.parametrize("odd", [0, 2])
def test_what_a_sparsifier_may_not_select_is_the_same_error_on_every_rank(odd: int, wrong: list[int]) -> None:
    (segment,) = segments_of([(3968, FP32)])

    def body(rank: int) -> None:
        load = SegmentBuffers(segment, torch.ones(4096), torch.full((segment.length,), torch.nan))
        indices = torch.tensor(wrong if rank == odd else [1, 2, 3000], dtype=torch.int32)
        here = oktopk()(Quiet())
        here.wait(here.start("buffer 3", [load], [Selection(indices, 3)], control_of(rank, [segment])))

    found = testing.run(3, body, return_errors=True)
    assert [type(error) for error in found] == [MessageError] * 3 and len({str(error) for error in found}) == 1
    assert f"message of rank {odd} to rank" in str(found[0]) or "by region" in str(found[0])


def test_what_was_told_of_an_offer_is_only_about_speed() -> None:
    """Damaged points cut other regions, the same on every rank, and change nothing else."""
    (segment,) = segments_of([(4000, FP32)])
    work, offer = draws([segment], 0.1, 3, False, 1.0)
    expected = exchange(3, oktopk(), [segment], work, offer)[0].update[0]

    def inject(call: Call) -> None:
        if call.rank == 1 and call.name == "buffer 3":
            points = call.tensor.view(torch.int32)[HEADER + 1 :]
            points[:] = torch.arange(len(points), dtype=torch.int32) * -(2**22)

    def body(rank: int) -> torch.Tensor:
        load = SegmentBuffers(segment, work(rank, 0), torch.full((segment.length,), torch.nan))
        here = oktopk()(Quiet())
        pending = here.start("buffer 3", [load], [offer(rank, 0)], control_of(rank, [segment]))
        here.wait(pending)
        here.finish(pending)
        return load.update

    assert all(same(update, expected) for update in testing.run(3, body, inject=inject))
