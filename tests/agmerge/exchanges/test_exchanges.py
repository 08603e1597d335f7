# SPDX-License-Identifier: Apache-2.0
"""Dense and sparse exchanges against references: the sum, its bits, and what each rank has sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exchanges import (
    CPU,
    DTYPES,
    Make,
    Quiet,
    control_of,
    dense,
    draw_offer,
    draw_work,
    exchange,
    oktopk,
    same,
    segments_of,
    sparse,
)

from agmerge import testing
from agmerge.exchanges import Exchange, SegmentBuffers, Store
from agmerge.ops import Average, ReduceOp, Sum
from agmerge.tensors.layout import Segment, TensorClass
from sparsifiers import Kind, Selection

CASTS = [None, torch.float16, torch.bfloat16]
LIGHT = settings(deadline=None)


# -- dense --------------------------------------------------------------------------------------------------


@LIGHT
@given(
    size=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    cast=st.sampled_from(CASTS),
    ordered=st.booleans(),
    predivide=st.sampled_from([1.0, 2.0, 3.0, 0.5, 16.0]),
    numels=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    magnitude=st.sampled_from([1e-6, 1.0, 1e3, 1e6]),
    seed=st.integers(0, 1000),
)
def test_dense(
    size: int,
    dtype: torch.dtype,
    cast: torch.dtype | None,
    ordered: bool,
    predivide: float,
    numels: list[int],
    magnitude: float,
    seed: int,
) -> None:
    if dtype == torch.float16:
        magnitude = min(magnitude, 1e3)  # beyond that 16-bit gradients overflow by themselves, as anywhere
    # A residual lies under a cast, so work need not fit the dtype.
    tensor_class = TensorClass(CPU, dtype, Kind.DENSE if cast is None else Kind.SPARSE)
    (segment,) = segments_of([(numel, tensor_class) for numel in numels])
    seen = exchange(
        size,
        dense(Average, cast, predivide, ordered),
        [segment],
        lambda rank, index: draw_work(segment, 10 * seed + rank, magnitude),
    )
    wire = cast or dtype
    total, size_of = (torch.zeros(segment.length, dtype=torch.float64) for _ in range(2))
    tiny = sum(torch.finfo(one).smallest_normal * torch.finfo(one).eps for one in (wire, dtype))
    for one in seen:
        if cast is None:
            assert one.sent == [None] and same(one.rest[0], one.before[0])  # all of it goes; nothing to take off
            part = one.before[0].double()
        else:
            assert one.sent[0] is not None and one.sent[0][0] is None
            part = one.sent[0][1].double()
            assert part.isfinite().all()
            assert torch.equal(one.rest[0].double() + part, one.before[0].double())
        total += part / size
        size_of += part.abs() / size
    eps = torch.finfo(wire).eps + torch.finfo(dtype).eps
    bound = (size + 4) * eps * size_of + (size + 1) * tiny * max(predivide, 1.0)
    assert (seen[0].update[0].double() - total).abs().le(bound).all()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("op", [Average, Sum])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_dense_adds_in_rank_order_to_the_bit(size: int, op: ReduceOp, ordered: bool) -> None:
    (segment,) = segments_of([(100, TensorClass(CPU, torch.float32, Kind.DENSE))])
    seen = exchange(
        size,
        dense(op, ordered=ordered),
        [segment],
        lambda rank, index: draw_work(segment, rank, 10.0**rank),
    )
    total = seen[0].before[0].clone()
    for one in seen[1:]:
        total += one.before[0]
    assert same(seen[0].update[0], total * op.scale(size) if op.scale(size) != 1.0 else total)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
def test_a_cast_saturates_so_that_the_sum_does_not_overflow(size: int, cast: torch.dtype, ordered: bool) -> None:
    (segment,) = segments_of([(64, TensorClass(CPU, torch.float32, Kind.DENSE))])
    for predivide, huge in ((1.0, 3.4e38), (16.0, 1e6)):
        values = torch.tensor([huge, -huge, torch.finfo(cast).max / size, 1.0] * 16)
        make = dense(Sum if predivide == 1.0 else Average, cast, predivide, ordered)
        seen = exchange(size, make, [segment], lambda rank, index, values=values: values.clone())
        assert seen[0].update[0].isfinite().all()
        assert same(seen[0].update[0][0::4], -seen[0].update[0][1::4])
        for one in seen:
            assert one.rest[0].isfinite().all() and one.sent[0] is not None
            assert torch.equal(one.rest[0] + one.sent[0][1], one.before[0])


@pytest.mark.parametrize("predivide", [1.0, 3.0, 0.7])
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16], ids=str)
def test_what_a_cast_commits_is_what_arrives(cast: torch.dtype, predivide: float) -> None:
    (segment,) = segments_of([(100, TensorClass(CPU, torch.float32, Kind.DENSE))])
    (seen,) = exchange(1, dense(Average, cast, predivide), [segment], lambda r, i: draw_work(segment, 0, 1.0))
    assert seen.sent[0] is not None and same(seen.sent[0][1].float(), seen.update[0])


def test_ordered_sums_do_not_depend_on_the_place_in_the_buffer() -> None:
    tensor_class = TensorClass(CPU, torch.float32, Kind.DENSE)
    (alone,), (among,) = (
        segments_of([(50, tensor_class)]),
        segments_of([(77, tensor_class), (50, tensor_class), (3, tensor_class)]),
    )
    offset = among.slots[1].offset

    def values(rank: int, index: int) -> torch.Tensor:
        return draw_work(alone, rank, 10.0**rank)

    def surrounded(rank: int, index: int) -> torch.Tensor:
        work = draw_work(among, 100 + rank, 1e3)
        work[offset : offset + alone.length] = values(rank, 0)
        return work

    make = dense(Average, ordered=True)
    first = exchange(3, make, [alone], values)[0].update[0]
    second = exchange(3, make, [among], surrounded)[0].update[0]
    assert same(first, second[offset : offset + alone.length])


# -- sparse -------------------------------------------------------------------------------------------------


def expected_sent(before: torch.Tensor, offer: Selection, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    values = before[offer.indices.long()].clamp(-limit, limit).to(dtype)
    values[int(offer.count) :] = 0.0
    return values


@LIGHT
@given(
    size=st.integers(1, 5),
    op=st.sampled_from([Average, Sum]),
    tensors=st.lists(st.tuples(st.integers(1, 60), st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=8),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    magnitude=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 1000),
    on_device=st.booleans(),
)
def test_sparse(
    size: int,
    op: ReduceOp,
    tensors: list[tuple[int, torch.dtype, bool]],
    density: float,
    magnitude: float,
    seed: int,
    on_device: bool,
) -> None:
    segments = segments_of([(numel, TensorClass(CPU, dtype, kind)) for numel, dtype, kind in tensors])

    def work(rank: int, index: int) -> torch.Tensor:
        tensor_class = segments[index].tensor_class
        limit = 100.0 if tensor_class.dtype == torch.float16 and not tensor_class.sparse else magnitude
        return draw_work(segments[index], 100 * seed + 10 * index + rank, min(magnitude, limit))

    def offer(rank: int, index: int) -> Selection | None:
        if not segments[index].tensor_class.sparse:
            return None
        length = segments[index].length
        return draw_offer(length, round(density * length), 100 * seed + 10 * index + rank, on_device)

    seen = exchange(size, sparse(op), segments, work, offer)
    scale = op.scale(size)
    for index, segment in enumerate(segments):
        total = torch.zeros(segment.length, dtype=segment.tensor_class.storage)
        for rank, one in enumerate(seen):
            before, selection, sent = one.before[index], offer(rank, index), one.sent[index]
            if selection is None:
                assert sent is None
                total = before * scale if rank == 0 else total + before * scale
                continue
            assert sent is not None and sent[0] is not None
            values = expected_sent(before, selection, segment.tensor_class.dtype)
            assert torch.equal(sent[0], selection.indices) and same(sent[1], values)
            # Conservation: a slot behind the count takes off nothing, and no other element changes at all.
            whole = torch.zeros(segment.length, dtype=torch.float64)
            whole.index_add_(0, selection.indices, values.double())
            assert torch.equal(one.rest[index].double() + whole, before.double())
            kept = torch.ones(segment.length, dtype=torch.bool)
            kept[selection.trimmed()] = False
            assert same(one.rest[index][kept], before[kept])
            total[selection.trimmed()] += values[: int(selection.count)].to(total.dtype) * scale
        assert same(seen[0].update[index], total.to(segment.tensor_class.dtype))


@pytest.mark.parametrize("make", [sparse(Average), oktopk()], ids=["sparse", "oktopk"])
@pytest.mark.parametrize("dtype, huge", [(torch.float16, 1e6), (torch.bfloat16, 3.4e38)], ids=str)
def test_a_residual_beyond_16_bits_saturates_and_the_rest_is_kept(dtype: torch.dtype, huge: float, make: Make) -> None:
    (segment,) = segments_of([(32, TensorClass(CPU, dtype, Kind.SPARSE))])
    work = torch.tensor([huge, -huge, 1.0, 0.0] * 8)
    largest = torch.finfo(dtype).max

    def offer(rank: int, index: int) -> Selection:
        return Selection(torch.tensor([0, 1, 2, 3], dtype=torch.int32), 3)

    for one in exchange(2, make, [segment], lambda rank, index: work.clone(), offer):
        assert one.update[0][:4].tolist() == [largest, -largest, 1.0, 0.0]
        assert one.rest[0][:4].tolist() == [work[0].item() - largest, work[1].item() + largest, 0.0, 0.0]


@pytest.mark.parametrize("dtype, huge", [(torch.float16, 1e6), (torch.bfloat16, 3.4e38)], ids=str)
def test_a_whole_tensor_beyond_16_bits_saturates_and_the_rest_is_kept(dtype: torch.dtype, huge: float) -> None:
    """Tensors of a merge buffer that goes dense: with their residual they may be beyond the dtype of the gradients."""
    (segment,) = segments_of([(32, TensorClass(CPU, dtype, Kind.SPARSE))])
    work = torch.tensor([huge, -huge, 1.0, 0.0] * 8)
    largest = torch.finfo(dtype).max

    def kept(store: Store) -> Exchange:
        store.has_residual = True
        return sparse(Average)(store)

    for one in exchange(2, kept, [segment], lambda rank, index: work.clone()):
        assert one.update[0][:4].tolist() == [largest, -largest, 1.0, 0.0]
        assert one.rest[0][:4].tolist() == [work[0].item() - largest, work[1].item() + largest, 0.0, 0.0]


def test_a_message_counts_elements_of_tensors_and_no_padding() -> None:
    """A codec of all elements has as many entries as the segment is long, which is more than the tensor has."""
    tensor_class = TensorClass(CPU, torch.float32, Kind.SPARSE)
    (segment,) = segments_of([(33, tensor_class)])
    everything = Selection(torch.arange(segment.length, dtype=torch.int32), segment.length)

    def body(rank: int) -> int:
        here = sparse(Average)(Quiet())
        work = torch.zeros(segment.length)
        pending = here.start(
            "buffer 0", [SegmentBuffers(segment, work, work.clone())], [everything], control_of(rank, [segment])
        )
        here.wait(pending)
        return pending.elements

    assert segment.length > 33 and testing.run(2, body) == [33, 33]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_element_from_one_rank(size: int) -> None:
    """W * k == n: the update is every rank's part, side by side."""
    tensor_class = TensorClass(CPU, torch.float32, Kind.SPARSE)
    (segment,) = segments_of([(32 * size, tensor_class)])

    def offer(rank: int, index: int) -> Selection:
        return Selection(torch.arange(32 * rank, 32 * rank + 32, dtype=torch.int32), 32)

    seen = exchange(size, sparse(Sum), [segment], lambda r, i: draw_work(segment, r, 1.0), offer)
    parts = [one.before[0][32 * rank : 32 * rank + 32] for rank, one in enumerate(seen)]
    assert torch.equal(seen[0].update[0], torch.cat(parts))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_density_1_is_dense_to_the_bit_for_powers_of_two(size: int) -> None:
    (segment,) = segments_of([(100, TensorClass(CPU, torch.float32, Kind.SPARSE))])

    def work(rank: int, index: int) -> torch.Tensor:
        return draw_work(segment, rank, 10.0**rank)

    def offer(rank: int, index: int) -> Selection:
        return Selection(torch.arange(segment.length, dtype=torch.int32), segment.length)

    through_sparse = exchange(size, sparse(Average), [segment], work, offer)
    through_dense = exchange(size, dense(Average, ordered=True), [segment], work)
    assert torch.equal(through_sparse[0].update[0], through_dense[0].update[0])
    assert all(one.rest[0].count_nonzero() == 0 for one in through_sparse)


def test_a_sparse_update_does_not_depend_on_its_neighbours() -> None:
    """The same two segments in a message of their own, and in one with three more (and 3 ranks)."""
    classes = [
        TensorClass(CPU, dtype, kind) for dtype in (torch.float32, torch.bfloat16) for kind in (Kind.SPARSE, Kind.DENSE)
    ]
    few = segments_of([(50, classes[0]), (50, classes[1])])
    many = segments_of([(50, classes[2]), (50, classes[0]), (9, classes[3]), (50, classes[1])])

    def work_of(segments: list[Segment]) -> Callable[[int, int], torch.Tensor]:
        return lambda rank, index: draw_work(segments[index], rank, 10.0**rank)

    def offer_of(segments: list[Segment]) -> Callable[[int, int], Selection | None]:
        return lambda rank, index: draw_offer(64, 20, rank, False) if segments[index].tensor_class.sparse else None

    first = exchange(3, sparse(Average), few, work_of(few), offer_of(few))[0].update
    second = exchange(3, sparse(Average), many, work_of(many), offer_of(many))[0].update
    by_class = {segment.tensor_class: update for segment, update in zip(many, second, strict=True)}
    for segment, update in zip(few, first, strict=True):
        assert same(update, by_class[segment.tensor_class])
