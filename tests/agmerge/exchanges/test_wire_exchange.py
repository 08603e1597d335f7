# SPDX-License-Identifier: Apache-2.0
"""Sparse messages in every value codec, over groups of 1 to 5: the sum, conservation and replicas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exchanges import CPU, Make, Quiet, context, draw_offer, draw_work, exchange, same, segments_of

from agmerge import testing
from agmerge.exchanges import SegmentBuffers, SparseExchange
from agmerge.exchanges.message import Everything, value_codec
from agmerge.exchanges.message.format import Format, section_codecs, slot_bytes
from agmerge.exchanges.sparse import spread, spread_on_device, without_zeros
from agmerge.ops import Average, ReduceOp, Sum
from agmerge.tensors.layout import TensorClass
from sparsifiers import Kind, Selection

SCALED = ["int8", "int4", "2bit", "sign"]
WIRES = ["auto", "fp32", "fp16", "bf16", *SCALED]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def coded(op: ReduceOp, wire: str) -> Make:
    return lambda store: SparseExchange(context(store, op, wire=wire))


def arrives(wire: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What becomes of these values under way, in their own dtype. Kept apart from the exchange.

    Where the codec has no code for 0, what is 0 does not travel.
    """
    codec = value_codec(wire, dtype)
    chosen = torch.ones_like(values, dtype=torch.bool) if codec.has_zero else values != 0
    count, slots = int(chosen.sum()), torch.zeros_like(values)
    slots[:count] = values[chosen]
    out = torch.zeros(codec.size(len(values)), dtype=torch.uint8)
    codec.encode(slots, out, count)
    read = torch.zeros_like(values)
    read[chosen] = codec.decode(out, count, values.dtype)
    return read


def arrives_of(wire: str, length: int, offer: Selection, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What becomes of the values of an offer, 0 behind the count: of a message of all, where all are fewer bytes."""
    if not isinstance(section_codecs(length, offer.indices.numel(), dtype, wire)[0], Everything):
        return arrives(wire, values, dtype)
    whole, count = torch.zeros(length, dtype=values.dtype), int(offer.count)
    whole[offer.trimmed()] = values[:count]
    read = torch.zeros_like(values)
    read[:count] = arrives(wire, whole, dtype)[offer.trimmed()]
    return read


def scattered(length: int, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values at their places, of which padding may name one again with 0."""
    return torch.zeros(length, dtype=values.dtype).index_add_(0, indices, values)


@settings(deadline=None)
@given(
    size=st.integers(1, 5),
    op=st.sampled_from([Average, Sum]),
    wire=st.sampled_from(WIRES),
    tensors=st.lists(st.tuples(st.integers(1, 700), st.sampled_from(DTYPES)), min_size=1, max_size=4),
    density=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    magnitude=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 1000),
    on_device=st.booleans(),
)
def test_the_sum_is_that_of_what_was_sent_and_the_rest_is_kept(
    size: int,
    op: ReduceOp,
    wire: str,
    tensors: list[tuple[int, torch.dtype]],
    density: float,
    magnitude: float,
    seed: int,
    on_device: bool,
) -> None:
    segments = segments_of([(numel, TensorClass(CPU, dtype, Kind.SPARSE)) for numel, dtype in tensors])

    def offer(rank: int, index: int) -> Selection:
        length = segments[index].length
        return draw_offer(length, math.ceil(density * length), 100 * seed + 10 * index + rank, on_device)

    seen = exchange(
        size,
        coded(op, wire),
        segments,
        lambda rank, index: draw_work(segments[index], 100 * seed + 10 * index + rank, magnitude),
        offer,
    )
    for index, segment in enumerate(segments):
        total = torch.zeros(segment.length, dtype=segment.tensor_class.storage)
        for rank, one in enumerate(seen):
            before, selection, sent = one.before[index], offer(rank, index), one.sent[index]
            assert sent is not None and sent[0] is not None
            values = before[selection.indices.long()]
            values[int(selection.count) :] = 0.0
            values = arrives_of(wire, segment.length, selection, values, segment.tensor_class.dtype)
            whole = scattered(segment.length, selection.indices, values)
            if value_codec(wire, segment.tensor_class.dtype).has_zero:
                assert same(sent[1].to(values.dtype), values) and torch.equal(sent[0], selection.indices)
            assert same(scattered(segment.length, sent[0], sent[1].to(values.dtype)), whole)
            assert torch.equal(one.rest[index], before - whole)  # what receivers did not get, to the bit
            exact = before.abs() >= whole.abs() / 2 if wire in ("2bit", "sign") else torch.ones_like(before) > 0
            both = one.rest[index].double() + whole.double()
            assert torch.equal(both[exact], before.double()[exact])  # conservation, exactly
            kept = torch.ones(segment.length, dtype=torch.bool)
            kept[selection.trimmed()] = False
            assert same(one.rest[index][kept], before[kept])
            total[selection.trimmed()] += values[: int(selection.count)] * op.scale(size)
        assert same(seen[0].update[index], total.to(segment.tensor_class.dtype))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_element_from_one_rank(size: int, wire: str) -> None:
    """W * k == n: side by side, every rank's part, and nothing is left but what its codec rounds off."""
    tensor_class = TensorClass(CPU, torch.float32, Kind.SPARSE)
    (segment,) = segments_of([(320 * size, tensor_class)])

    def offer(rank: int, index: int) -> Selection:
        return Selection(torch.arange(320 * rank, 320 * rank + 320, dtype=torch.int32), 320)

    seen = exchange(size, coded(Sum, wire), [segment], lambda r, i: draw_work(segment, r, 1.0), offer)
    parts = [one.before[0][320 * rank : 320 * rank + 320] for rank, one in enumerate(seen)]
    assert torch.equal(seen[0].update[0], torch.cat([arrives(wire, part, torch.float32) for part in parts]))
    most = {"int8": 0.02, "bf16": 0.02, "int4": 0.4, "2bit": 3.0, "sign": 3.5}.get(wire, 0.002)
    assert (seen[0].update[0] - torch.cat(parts)).abs().max() <= most


EVERYTHING = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1.016, "int4": 0.516, "2bit": 0.406, "sign": 0.266}


@pytest.mark.parametrize("wire", EVERYTHING)
def test_bytes_of_an_element_at_density_1(wire: str) -> None:
    n = 2**20
    (section,) = Format(segments_of([(n, TensorClass(CPU, torch.float32, Kind.SPARSE))]), [n], wire).sections
    assert section.name == ("bitmap/" if wire in ("2bit", "sign") else "all/") + wire
    assert section.values.stop - section.indices.start == pytest.approx(n * EVERYTHING[wire], rel=0.002)


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("wire", EVERYTHING)
@pytest.mark.parametrize("counts", [(992, 992), (992, 0), (0, 0), (1, 991), (700, 992)], ids=str)
def test_at_density_1_any_number_may_be_offered(counts: tuple[int, int], wire: str, as_tensor: bool) -> None:
    """Nothing, as of a round that is discarded, or less than there are slots: what is not offered stays."""
    (segment,) = segments_of([(992, TensorClass(CPU, torch.float32, Kind.SPARSE))])

    def offer(rank: int, index: int) -> Selection:
        chosen = torch.randperm(992, generator=torch.Generator().manual_seed(rank))[: counts[rank]].sort().values
        indices = torch.full((992,), 5, dtype=torch.int32)
        indices[: counts[rank]] = chosen
        return Selection(indices, torch.tensor(counts[rank], dtype=torch.int32) if as_tensor else counts[rank])

    total = torch.zeros(992)
    seen = exchange(2, coded(Sum, wire), [segment], lambda rank, index: draw_work(segment, rank, 1.0), offer)
    for rank, one in enumerate(seen):
        before, chosen = one.before[0], offer(rank, 0).trimmed()
        gone = before - one.rest[0]
        kept = torch.ones(992, dtype=torch.bool)
        kept[chosen] = False
        assert same(one.rest[0][kept], before[kept])
        exact = before.abs() >= gone.abs() / 2 if wire in ("2bit", "sign") else torch.ones_like(kept)
        assert torch.equal((one.rest[0] + gone)[exact], before[exact])
        if wire == "fp32":
            assert not one.rest[0][chosen].any()
        assert one.sent[0] is not None and one.sent[0][0] is not None
        total += scattered(992, one.sent[0][0], one.sent[0][1].float())
    assert torch.equal(seen[0].update[0], total)


@pytest.mark.parametrize("indices", [[1, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_at_density_1_too_a_selection_out_of_order_is_refused(indices: list[int], as_tensor: bool) -> None:
    (segment,) = segments_of([(320, TensorClass(CPU, torch.float32, Kind.SPARSE))])

    def offer(rank: int, index: int) -> Selection:
        odd = torch.cat([torch.tensor(indices), torch.arange(2, 320)]).to(torch.int32)
        return Selection(odd, torch.tensor(320, dtype=torch.int32) if as_tensor else 320)

    with pytest.raises(Exception, match="not ascending within 0 to 319"):
        exchange(2, coded(Sum, "int4"), [segment], lambda rank, index: draw_work(segment, rank, 1.0), offer)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_values_are_spread_without_waiting_for_a_device(as_tensor: bool) -> None:
    count = torch.empty((), dtype=torch.int32, device="meta") if as_tensor else 10
    indices, values = torch.empty(10, dtype=torch.int32, device="meta"), torch.empty(10, device="meta")
    whole, announced = spread(Selection(indices, count), values, 12)
    assert whole.shape == (12,) and isinstance(announced, torch.Tensor)


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("length", [40, 41, 70])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("odd", [False, True])
def test_a_device_spreads_the_same_values(length: int, seed: int, as_tensor: bool, odd: bool) -> None:
    offer, values = draw_offer(length, 40, seed, as_tensor), torch.randn(40)
    count = int(offer.count)
    values[count:] = 0.0
    values[:1] = -0.0 * count
    if odd:
        offer.indices[:2] = offer.indices[:2].flip(0)
    here, there = spread(offer, values, length), spread_on_device(offer, values, length)
    assert same(here[0], there[0]) and int(here[1]) == int(there[1]) == length * (not odd or count < 2)
    assert same(here[0][offer.trimmed()], values[:count]) and here[0].count_nonzero() == values.count_nonzero()


@pytest.mark.parametrize("wire", WIRES)
def test_auto_and_the_plain_codec_are_the_same_bits(wire: str) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(wire, torch.float32)
    (segment,) = segments_of([(5000, TensorClass(CPU, dtype, Kind.SPARSE))])

    def update(wire: str) -> torch.Tensor:
        return exchange(
            3,
            coded(Average, wire),
            [segment],
            lambda rank, index: draw_work(segment, rank, 1.0),
            lambda rank, index: draw_offer(segment.length, 100, rank, False),
        )[0].update[0]

    assert same(update("auto"), update(wire)) is (wire not in SCALED)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_every_rank(wire: str, bad: float) -> None:
    (segment,) = segments_of([(64, TensorClass(CPU, torch.float32, Kind.SPARSE))])

    def work(rank: int, index: int) -> torch.Tensor:
        values = torch.ones(64)
        values[5] = bad if rank == 1 else 1.0
        return values

    def offer(rank: int, index: int) -> Selection:
        return Selection(torch.tensor([5, 7, 5], dtype=torch.int32), 2)

    for one in exchange(3, coded(Average, wire), [segment], work, offer):
        assert not one.update[0][5].isfinite()
        assert one.update[0][8:].isfinite().all() and one.update[0][0] == 0  # nor by the padding


LIMITS = {
    0.01: {"fp32": 5.5, "fp16": 3.5, "bf16": 3.5, "int8": 2.5, "int4": 2.0, "2bit": 1.75, "sign": 1.65},
    0.001: {"fp32": 5.6, "fp16": 3.6, "bf16": 3.6, "int8": 2.7, "int4": 2.2, "2bit": 1.95, "sign": 1.85},
}


@pytest.mark.parametrize("n", [10**6, 2**20, 2**24, 10**8])
@pytest.mark.parametrize("density", LIMITS)
@pytest.mark.parametrize("wire", WIRES[1:])
def test_bytes_of_a_slot_with_its_header(wire: str, density: float, n: int) -> None:
    k = math.ceil(density * n)
    layout = Format(segments_of([(n, TensorClass(CPU, torch.float32, Kind.SPARSE))]), [k], wire)
    assert layout.size / k <= LIMITS[density][wire]
    assert 0 < layout.size - k * slot_bytes(n, k, torch.float32, wire) < 100  # the header


BYTES = {  # a selected element of 2**20, index and value
    0.1: {"sign": 0.83, "2bit": 0.97, "int4": 1.20, "int8": 1.70, "fp32": 4.69},
    0.05: {"sign": 0.93, "2bit": 1.06, "int4": 1.30, "int8": 1.80, "fp32": 4.79},
    0.01: {"sign": 1.21, "2bit": 1.34, "int4": 1.58, "int8": 2.09, "fp32": 5.08},
}


@pytest.mark.parametrize("density", BYTES)
def test_bytes_of_an_element_are_those_of_the_table(density: float) -> None:
    n = 2**20
    k = math.ceil(density * n)
    for wire, expected in BYTES[density].items():
        layout = Format(segments_of([(n, TensorClass(CPU, torch.float32, Kind.SPARSE))]), [k], wire)
        assert layout.size / k == pytest.approx(expected, rel=0.015), wire


def test_a_format_is_made_once_for_the_same_segments_and_capacities() -> None:
    segments = segments_of(
        [(100, TensorClass(CPU, torch.float32, Kind.SPARSE)), (9, TensorClass(CPU, torch.float32, Kind.DENSE))]
    )
    loads = [SegmentBuffers(part, torch.zeros(part.length), torch.zeros(part.length)) for part in segments]
    here = testing.run(1, lambda rank: SparseExchange(context(Quiet(), wire="fp16")))[0]
    first = here.format_of("buffer 0", loads, [4, None], "fp16")
    assert here.format_of("buffer 0", list(loads), [4, None], "fp16") is first
    assert here.format_of("buffer 1", loads, [4, None], "fp16") is not first
    assert here.format_of("buffer 0", loads, [5, None], "fp16").capacities == [5, None]  # k changes in a warm-up
    assert here.format_of("buffer 0", loads[:1], [5], "fp16").segments == segments[:1]


@pytest.mark.parametrize("as_tensor", [True, False])
def test_what_is_zero_is_left_out_in_order(as_tensor: bool) -> None:
    indices = torch.tensor([2, 3, 5, 7, 11, 2], dtype=torch.int32)
    values = torch.tensor([0.0, 1.0, -0.0, math.nan, 1e-45, 0.0])
    offer, moved = without_zeros(Selection(indices, torch.tensor(5, dtype=torch.int32) if as_tensor else 5), values)
    assert offer.trimmed().tolist() == [3, 7, 11] and offer.indices.numel() == 6
    assert moved.nan_to_num(nan=9.0).tolist() == [1.0, 9.0, values[4].item(), 0.0, 0.0, 0.0]
    again, same_values = without_zeros(offer, moved)
    assert again is offer and same_values is moved
    empty, nothing = without_zeros(Selection(indices[:0], 0), values[:0])
    assert empty.indices.numel() == nothing.numel() == 0


@pytest.mark.parametrize("as_tensor", [True, False])
def test_what_is_zero_is_found_without_waiting_for_a_device(as_tensor: bool) -> None:
    count = torch.empty((), dtype=torch.int32, device="meta") if as_tensor else 9
    indices, values = torch.empty(10, dtype=torch.int32, device="meta"), torch.empty(10, device="meta")
    offer, moved = without_zeros(Selection(indices, count), values)
    assert isinstance(offer.count, torch.Tensor) and moved.shape == offer.indices.shape == (10,)
