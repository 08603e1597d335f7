# SPDX-License-Identifier: Apache-2.0
"""Sums in codecs, of ``oktopk`` and ``masked``: what is rounded off is kept by somebody, of sums by who wrote them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exchanges import (
    CPU,
    DTYPES,
    SUM_INPUTS,
    Make,
    Quiet,
    Seen,
    SumInput,
    control_of,
    draw_offer,
    draw_work,
    draws,
    exchange,
    masked,
    oktopk,
    same,
    segments_of,
)

from agmerge import testing
from agmerge.backends.local import Call
from agmerge.errors import MessageError
from agmerge.exchanges import SegmentBuffers
from agmerge.exchanges.message import VALUES, value_codec
from agmerge.exchanges.message.format import Flag
from agmerge.exchanges.oktopk import regions
from agmerge.ops import Average, ReduceOp, Sum
from agmerge.tensors.layout import Segment, TensorClass
from sparsifiers import Kind, Selection

WIRES = list(VALUES)
WITH_ZERO = [wire for wire in WIRES if VALUES[wire].has_zero]
LIGHT = settings(deadline=None)
FP32 = TensorClass(CPU, torch.float32, Kind.SPARSE)
# What rounding adds to the largest number of a block; of 2bit and sign, what is sent in the place of any number of it.
STEP = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7, "int8": 1 / 254, "int4": 1 / 14, "2bit": 1.0, "sign": 1.0}


def assert_kept(seen: Sequence[Seen], segments: Sequence[Segment], op: ReduceOp, largest: float) -> None:
    """Conservation: of each rank to the bit, of all ranks together to the rounding of the residual."""
    for index, segment in enumerate(segments):
        given = torch.zeros(segment.length, dtype=torch.float64)
        for one in seen:
            before, sent = one.before[index], one.sent[index]
            rest = before.clone()
            if sent is not None:
                assert sent[0] is not None
                rest.index_add_(0, sent[0], sent[1].to(rest.dtype), alpha=-1)
            for indices, values in one.kept[index]:
                assert indices is not None
                rest.index_add_(0, indices, values.to(rest.dtype))
            assert same(rest, one.rest[index])
            given += (before.double() - rest.double()) * op.scale(len(seen))
        update = seen[0].update[index].double()
        narrow = torch.finfo(
            segment.tensor_class.dtype
        ).eps  # what a 16-bit update cannot say is lost, as with every exchange
        slack = max(
            8 * torch.finfo(segment.tensor_class.storage).eps,
            0 if segment.tensor_class.dtype == segment.tensor_class.storage else narrow,
        )
        assert ((update - given).abs() <= slack * largest * len(seen) + 1e-7).all()


@LIGHT
@given(handed=SUM_INPUTS, wire=st.sampled_from(WIRES))
def test_oktopk(handed: SumInput, wire: str) -> None:
    segments = handed.segments()
    work, offer = handed.draws(segments)
    seen = exchange(handed.size, oktopk(handed.op, wire), segments, work, offer)
    largest = max(float(one.abs().max()) for rank in seen for one in rank.before)
    assert_kept(seen, segments, handed.op, largest)
    touched = 0
    for index, segment in enumerate(segments):
        offered = torch.zeros(segment.length, dtype=torch.bool)
        for rank, one in enumerate(seen):
            mine = offer(rank, index).trimmed()
            if not VALUES[wire].has_zero:
                mine = mine[one.before[index][mine] != 0]
            offered[mine] = True
            sent = one.sent[index]
            assert sent is not None and sent[0] is not None and set(sent[0].tolist()) <= set(mine.tolist())
            off = (sent[1].double() - one.before[index][sent[0]].double()).abs()
            assert (off <= STEP[wire] * largest).all()
            # Nothing else of the rank's changes but where it has written sums.
            others = torch.ones(segment.length, dtype=torch.bool)
            others[sent[0]] = False
            for indices, _ in one.kept[index]:
                assert indices is not None
                others[indices] = False
            assert same(one.rest[index][others], one.before[index][others])
        assert not seen[0].update[index][~offered].any()
        touched += int(seen[0].update[index].count_nonzero())
    assert touched <= sum(offer(0, index).indices.numel() for index in range(len(segments)))


@LIGHT
@given(
    size=st.integers(1, 5),
    op=st.sampled_from([Average, Sum]),
    tensors=st.lists(st.tuples(st.integers(1, 60), st.sampled_from(DTYPES)), min_size=1, max_size=6),
    wire=st.sampled_from(WITH_ZERO),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 1000),
    drawn=st.booleans(),
)
def test_masked_against_a_sum_in_plain_code(
    size: int, op: ReduceOp, tensors: list[tuple[int, torch.dtype]], wire: str, density: float, seed: int, drawn: bool
) -> None:
    """Bit by bit: every rank's values and every share of the sums go once through the codec."""
    segments = segments_of([(numel, TensorClass(CPU, dtype, Kind.SPARSE)) for numel, dtype in tensors])

    def work(rank: int, index: int) -> torch.Tensor:
        return draw_work(segments[index], 100 * seed + 10 * index + rank, 1.0)

    def offer(rank: int, index: int) -> Selection:
        length = segments[index].length
        return draw_offer(length, round(density * length), 3 * (seed + index if drawn else 10 * seed + rank), False)

    seen = exchange(size, masked(op, drawn=drawn, wire=wire), segments, work, offer)
    largest = max(float(one.abs().max()) for rank in seen for one in rank.before)
    assert_kept(seen, segments, op, largest)
    for storage in dict.fromkeys(segment.tensor_class.storage for segment in segments):
        members = [i for i, segment in enumerate(segments) if segment.tensor_class.storage == storage]
        masks = [torch.empty(0, dtype=torch.int64) if seen[0].sent[i] is None else seen[0].sent[i][0] for i in members]
        for i, mask in zip(members, masks, strict=True):
            k = offer(0, i).indices.numel()
            assert len(mask) == segments[i].length if k >= segments[i].numel else 0.8 * k <= len(mask) <= k
        values = [torch.cat([one.before[i][mask] for i, mask in zip(members, masks, strict=True)]) for one in seen]
        update = summed(values, wire, storage) * op.scale(size)
        edges = [0, *accumulate(len(mask) for mask in masks)]
        for i, mask, start, stop in zip(members, masks, edges, edges[1:], strict=False):
            expected = torch.zeros(segments[i].length, dtype=segments[i].tensor_class.dtype)
            expected[mask.long()] = update[start:stop].to(expected.dtype)
            assert same(seen[0].update[i], expected)


def through(values: torch.Tensor, wire: str) -> torch.Tensor:
    """Return what is read of values that went through a codec."""
    codec = value_codec(wire, values.dtype)
    return codec.encode(values, torch.zeros(codec.size(len(values)), dtype=torch.uint8)).to(values.dtype)


def summed(values: list[torch.Tensor], wire: str, dtype: torch.dtype) -> torch.Tensor:
    """The sum over ranks of values that each rank sends share by share, and that are handed round."""
    parts = []
    for share in zip(*(one.split(regions.shares(len(one), len(values))) for one in values), strict=True):
        total = through(share[0], wire)
        for one in share[1:]:
            total = total + through(one, wire)
        parts.append(through(total, wire))
    return torch.cat(parts).to(dtype)


@pytest.mark.parametrize("make", [oktopk, masked])
def test_a_codec_that_loses_nothing_changes_no_bit(make: Callable[..., Make]) -> None:
    (segment,) = segments_of([(3000, FP32)])
    work, offer = draws([segment], 0.1, 3, False, 1.0)
    plain = exchange(3, make(Average), [segment], work, offer)
    coded = exchange(3, make(Average, wire="fp32"), [segment], work, offer)
    assert not any(any(values.numel() for _, values in one.kept[0]) for one in coded)
    if make is oktopk:  # what is added up in three's all-reduce has an order of its own
        assert same(plain[0].update[0], coded[0].update[0])
        assert all(same(a.rest[0], b.rest[0]) for a, b in zip(plain, coded, strict=True))
    assert all(bool(one.kept[0]) for one in exchange(3, make(Average, wire="int8"), [segment], work, offer))


@pytest.mark.parametrize("wire", WIRES)
def test_surplus_is_kept_too(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes hands before it is handed round is written twice, by two ranks."""
    monkeypatch.setattr("agmerge.exchanges.oktopk.exchange.SLACK", 0.0)
    (segment,) = segments_of([(4000, FP32)])
    work, offer = draws([segment], 0.1, 1, False, 1.0)

    def skewed(rank: int, index: int) -> torch.Tensor:
        return work(rank, index) * torch.logspace(2, -2, segment.length)

    assert_kept(exchange(4, oktopk(wire=wire), [segment], skewed, offer), [segment], Average, 500.0)


@pytest.mark.parametrize("wire", ["2bit", "sign"])
def test_a_codec_without_a_zero_is_given_none(wire: str) -> None:
    """Zeros that are offered, and sums that cancel, stay where they are."""
    (segment,) = segments_of([(64, FP32)])

    def work(rank: int, index: int) -> torch.Tensor:
        values = torch.ones(64) * (1.0 if rank else -1.0)  # the first half cancels, to the bit
        values[32:] = torch.arange(32.0) % 3
        return values

    seen = exchange(
        2, oktopk(wire=wire), [segment], work, lambda *_: Selection(torch.arange(64, dtype=torch.int32), 64)
    )
    nothing = torch.cat([torch.ones(32, dtype=torch.bool), torch.arange(32) % 3 == 0])
    assert not seen[0].update[0][nothing].any() and seen[0].update[0][~nothing].all()
    assert all(same(one.rest[0][nothing], one.before[0][nothing]) for one in seen)


@pytest.mark.parametrize("make, part", [(oktopk, 0.45), (masked, 0.45)])
def test_few_bits_are_few_bytes(make: Callable[..., Make], part: float) -> None:
    (segment,) = segments_of([(200_000, FP32)])
    work, offer = draws([segment], 0.05, 3, False, 1.0)

    def size(wire: str) -> int:
        def body(rank: int) -> int:
            load = SegmentBuffers(segment, work(rank, 0), torch.zeros(segment.length))
            here = make(Average, wire=wire)(Quiet())
            pending = here.start("buffer 3", [load], [offer(3 * rank, 0)], control_of(rank, [segment]))
            here.wait(pending)
            return pending.bytes

        return max(testing.run(4, body))

    sizes = [size(wire) for wire in ("fp32", "fp16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < part * sizes[0]


# -- faults -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    wire=st.sampled_from(WITH_ZERO),
    what=st.sampled_from(["values 0", "values 0 added up"]),
    odd=st.integers(0, 2),
    place=st.floats(0, 1),
    flips=st.integers(1, 255),
    drawn=st.booleans(),
)
def test_whatever_byte_of_masked_changes_on_its_way_is_the_same_error_on_every_rank(
    wire: str, what: str, odd: int, place: float, flips: int, drawn: bool
) -> None:
    def inject(call: Call) -> None:
        if call.rank == odd and call.name == f"buffer 3/{what}":
            length = call.tensor.numel()
            if what.endswith("up"):
                length //= 2  # behind the shorter shares is what means nothing
            call.tensor[round(place * (length - 1))] ^= flips

    assert "the sums that rank" in str(error_of(masked(drawn=drawn, wire=wire), inject, drawn))


@settings(deadline=None)
@given(
    wire=st.sampled_from(WIRES),
    what=st.sampled_from(["pieces", "kept"]),
    odd=st.integers(0, 2),
    place=st.floats(0, 1),
    flips=st.integers(1, 255),
)
def test_whatever_byte_of_oktopk_changes_on_its_way_is_the_same_error_on_every_rank(
    wire: str, what: str, odd: int, place: float, flips: int
) -> None:
    def inject(call: Call) -> None:
        if call.rank == odd and call.name == f"buffer 3/{what}":
            length = call.tensor.numel() // (2 if what == "kept" else 1)
            call.tensor[round(place * (length - 1))] ^= flips

    assert f"rank {odd} " in str(error_of(oktopk(wire=wire), inject, False))


def error_of(make: Make, inject: Callable[[Call], None], drawn: bool) -> BaseException:
    (segment,) = segments_of([(4000, FP32)])

    def body(rank: int) -> None:
        load = SegmentBuffers(segment, draw_work(segment, rank, 1.0), torch.full((segment.length,), torch.nan))
        here = make(Quiet())
        offer = draw_offer(segment.length, 400, 0 if drawn else 3 * rank, False)
        try:
            here.wait(here.start("buffer 3", [load], [offer], control_of(rank, [segment])))
        finally:
            assert load.update.isnan().all()

    found = testing.run(3, body, return_errors=True, inject=inject)
    assert [type(error) for error in found] == [MessageError] * 3 and len({str(error) for error in found}) == 1
    return found[0]


@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_that_draw_apart_are_told_so(odd: int) -> None:
    (segment,) = segments_of([(4000, FP32)])

    def body(rank: int) -> None:
        load = SegmentBuffers(segment, torch.ones(segment.length), torch.zeros(segment.length))
        here = masked(drawn=True, wire="int8")(Quiet())
        here.wait(here.start("b", [load], [draw_offer(4000, 40, 3 * (rank == odd), False)], control_of(0, [segment])))

    found = testing.run(3, body, return_errors=True)
    assert len({str(error) for error in found}) == 1 and "AGM504" in str(found[0])


@pytest.mark.parametrize("make", [oktopk(wire="int4"), masked(wire="int4"), masked(drawn=True, wire="int4")])
def test_a_round_that_will_be_repeated_writes_nothing(make: Make) -> None:
    (segment,) = segments_of([(64, FP32)])

    def body(rank: int) -> tuple[int, bool]:
        load = SegmentBuffers(segment, torch.ones(64), torch.full((64,), torch.nan))
        here = make(Quiet())
        empty = Selection(torch.zeros(9, dtype=torch.int32), 0)
        control = control_of(rank, [segment])
        flagged = type(control)(**{**vars(control), "flags": Flag.REPLAN if rank == 1 else 0})
        flags = here.wait(here.start("b", [load], [empty if rank == 1 else draw_offer(64, 9, 0, False)], flagged)).flags
        again = here.start("b", [load], [draw_offer(64, 9, 0, False)], control_of(0, [segment], 8))
        here.wait(again)
        nothing = bool(load.update.isnan().all())
        here.finish(again)
        return flags, nothing and bool(load.update.isfinite().all())

    assert testing.run(3, body) == [(Flag.REPLAN, True)] * 3
