# SPDX-License-Identifier: Apache-2.0
"""The masked exchange: one index set for all ranks, what it costs, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exchanges import (
    CPU,
    Quiet,
    control_of,
    dense,
    draw_offer,
    draw_work,
    exchange,
    masked,
    same,
    segments_of,
)

import sparsifiers
from agmerge import testing
from agmerge.errors import MessageError
from agmerge.exchanges.base import SegmentBuffers
from agmerge.exchanges.dense import largest_summand
from agmerge.exchanges.masked import checksum
from agmerge.exchanges.message.format import Flag
from agmerge.ops import Average, ReduceOp, Sum
from agmerge.tensors.layout import TensorClass
from sparsifiers import Kind, Selection

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LIGHT = settings(deadline=None)
FP32 = TensorClass(CPU, torch.float32, Kind.SPARSE)


# -- sums ---------------------------------------------------------------------------------------------------


@LIGHT
@given(
    size=st.integers(1, 5),
    op=st.sampled_from([Average, Sum]),
    tensors=st.lists(st.tuples(st.integers(1, 60), st.sampled_from(DTYPES)), min_size=1, max_size=6),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    magnitude=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 1000),
    how=st.sampled_from(["vote", "vote on a device", "drawn"]),
    ordered=st.booleans(),
)
def test_masked(
    size: int,
    op: ReduceOp,
    tensors: list[tuple[int, torch.dtype]],
    density: float,
    magnitude: float,
    seed: int,
    how: str,
    ordered: bool,
) -> None:
    segments = segments_of([(numel, TensorClass(CPU, dtype, Kind.SPARSE)) for numel, dtype in tensors])
    drawn = how == "drawn"

    def work(rank: int, index: int) -> torch.Tensor:
        return draw_work(segments[index], 100 * seed + 10 * index + rank, magnitude)

    def offer(rank: int, index: int) -> Selection:
        length = segments[index].length
        if drawn:
            source = torch.Generator().manual_seed(seed + index)
            chosen = torch.randperm(length, generator=source)[: round(density * length)].sort().values
            return Selection(chosen.to(torch.int32), chosen.numel())
        chosen_by = 100 * seed + 10 * index + rank
        return draw_offer(length, round(density * length), chosen_by, how == "vote on a device")

    seen = exchange(size, masked(op, drawn=drawn, ordered=ordered), segments, work, offer)
    for index, segment in enumerate(segments):
        length, dtype = segment.length, segment.tensor_class.dtype
        k = offer(0, index).indices.numel()
        first = seen[0].sent[index]
        if first is None and k == 0:
            assert same(seen[0].update[index], torch.zeros(length, dtype=dtype))
            continue
        assert first is not None and first[0] is not None
        mask = first[0].long()
        assert len(mask.unique()) == len(mask) and (mask == mask.sort().values).all()
        if k >= segment.numel:
            assert len(mask) == length
        else:
            assert 0.8 * k <= len(mask) <= k
            assert not drawn or torch.equal(mask, offer(0, index).indices.long())
        total = torch.zeros(len(mask), dtype=segment.tensor_class.storage if ordered else dtype)
        for rank, one in enumerate(seen):
            sent = one.sent[index]
            assert sent is not None and sent[0] is not None and torch.equal(sent[0].long(), mask)
            limit = torch.finfo(dtype).max if dtype == segment.tensor_class.storage else largest_summand(dtype, size)
            assert same(sent[1], one.before[index][mask].clamp(-limit, limit).to(dtype))
            # Conservation, to the bit: what was sent was taken off, everything else is as it was.
            rest = one.before[index].clone()
            rest[mask] -= sent[1].to(rest.dtype)
            assert same(one.rest[index], rest)
            total = sent[1].to(total.dtype) if rank == 0 else total + sent[1]
        expected = torch.zeros(length, dtype=dtype)
        expected[mask] = total.to(dtype) * op.scale(size)
        assert same(seen[0].update[index], expected)
        assert seen[0].update[index].isfinite().all()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_everything_is_the_dense_exchange_to_the_bit(size: int, dtype: torch.dtype, ordered: bool) -> None:
    (segment,) = segments_of([(70, TensorClass(CPU, dtype, Kind.SPARSE)), (5, TensorClass(CPU, dtype, Kind.SPARSE))])
    (twin,) = segments_of([(70, TensorClass(CPU, dtype, Kind.DENSE)), (5, TensorClass(CPU, dtype, Kind.DENSE))])

    def work(rank: int, index: int) -> torch.Tensor:
        return draw_work(twin, rank, 10.0**rank)  # it fits the gradient's dtype

    everything = torch.arange(segment.length, dtype=torch.int32)
    for drawn in (False, True):
        make = masked(drawn=drawn, ordered=ordered)
        seen = exchange(size, make, [segment], work, lambda *_: Selection(everything, len(everything)))
        assert same(seen[0].update[0], exchange(size, dense(Average, ordered=ordered), [twin], work)[0].update[0])
        assert not any(one.rest[0].any() for one in seen)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sixteen_bits_saturate_so_that_the_sum_does_not_overflow(size: int) -> None:
    (segment,) = segments_of([(64, TensorClass(CPU, torch.float16, Kind.SPARSE))])
    work = torch.tensor([1e9, -1e9, 6e4, 1.0] * 16)
    seen = exchange(size, masked(Sum), [segment], lambda *_: work.clone(), lambda *_: draw_offer(64, 63, 0, False))
    assert seen[0].update[0].isfinite().all() and seen[0].update[0].abs().max() > 6e4


# -- what it costs ------------------------------------------------------------------------------------------


def bytes_of(size: int, drawn: bool) -> tuple[int, int]:
    """(votes, values) that a rank hands to collectives, of 1000 elements in 64 * 1024."""
    (segment,) = segments_of([(64 * 1024, FP32)])
    offers = [Selection(torch.arange(rank % 2, 2000, 2, dtype=torch.int32), 1000) for rank in range(size)]

    def body(rank: int) -> tuple[int, int]:
        load = SegmentBuffers(segment, torch.randn(segment.length), torch.zeros(segment.length))
        here = masked(drawn=drawn)(Quiet())
        pending = here.start("b", [load], [offers[0 if drawn else rank]], control_of(rank, [segment]))
        here.wait(pending)
        here.finish(pending)
        votes = sum(length for kind, _, length in testing.calls() if kind == "all_gather")
        return votes, sum(length for _, _, length in testing.calls()) - votes

    return testing.run(size, body)[0]


def test_bytes_do_not_grow_with_the_number_of_workers() -> None:
    headers = 64
    for size in (2, 4, 8):
        votes, values = bytes_of(size, drawn=False)
        assert votes * size <= 1.3 * 1000 + size * (headers + 12)  # 1.5 % of the elements: 9 or 10 bits an index
        assert 0.8 * 4000 <= values <= 4000 + 4 * size
        assert bytes_of(size, drawn=True)[0] == 0
    tails = {bytes_of(size, drawn=True)[1] for size in (2, 4, 8)}
    assert max(tails) <= 4 * 1000 + 4 * 80 and len(tails) == 1


def test_what_it_leaves_behind_beside_an_own_choice() -> None:
    """Ranks that agree lose next to nothing by voting; ranks that do not, less than a choice by lot would."""
    n, k, size = 4096, 64, 4
    (segment,) = segments_of([(n, FP32)])
    source = torch.Generator().manual_seed(3)
    common = torch.randn(n, generator=source) * torch.randn(n, generator=source).exp()
    own = [torch.randn(n, generator=source) * torch.randn(n, generator=source).exp() for _ in range(size)]
    for alike, bound in ((1.0, 1.1), (0.0, 2.0)):
        works = [alike * common + (1 - alike) * one for one in own]
        top = [sparsifiers.get("topk", k / n).select(one) for one in works]
        seen = exchange(
            size, masked(), [segment], lambda rank, _, w=works: w[rank].clone(), lambda rank, _, t=top: t[rank]
        )
        taken = sum(float(one.before[0].square().sum() - one.rest[0].square().sum()) for one in seen)
        best = sum(float(one[offer.trimmed()].square().sum()) for one, offer in zip(works, top, strict=True))
        lot = k / n * sum(float(one.square().sum()) for one in works)
        assert taken > best / bound / (1 if alike else size / 2) and taken > 4 * lot


# -- several messages, faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_several_messages_under_way_make_the_same_calls_on_every_rank(size: int, drawn: bool) -> None:
    parts = [segments_of([(numel, FP32)])[0] for numel in (40, 70, 33)]

    def body(rank: int) -> tuple[list[tuple[str, str, int]], list[torch.Tensor]]:
        here, pending, updates = masked(drawn=drawn)(Quiet()), [], []
        for step in range(3):
            for number, part in enumerate(parts):
                load = SegmentBuffers(part, draw_work(part, 9 * step + rank, 1.0), torch.zeros(part.length))
                offer = draw_offer(part.length, 2 + number, 3 * (0 if drawn else rank), False)
                control = replace(control_of(rank, [part], step), buffer=number)
                pending.append(here.start(f"buffer {number}", [load], [offer], control))
                updates.append(load.update)
            for one in pending:
                here.wait(one)
                here.finish(one)
                # What waits for the first lets the values of all of them leave.
                assert len(testing.calls()) == (step + 1) * len(parts) * (1 if drawn else 2)
            pending = []
        return testing.calls(), updates

    seen = testing.run(size, body, inject=testing.jitter(size))
    assert all(calls == seen[0][0] for calls, _ in seen)
    assert len(seen[0][0]) == 3 * 3 * (1 if drawn else 2)
    for _, updates in seen:
        assert all(same(a, b) for a, b in zip(updates, seen[0][1], strict=True))
    if not drawn:
        kinds = [kind for kind, _, _ in seen[0][0][:6]]
        assert kinds == ["all_gather"] * 3 + ["all_reduce"] * 3


@pytest.mark.parametrize("drawn", [False, True])
def test_a_round_that_will_be_repeated_writes_nothing_and_sends_no_values(drawn: bool) -> None:
    (segment,) = segments_of([(64, FP32)])

    def body(rank: int) -> tuple[int, int, bool]:
        load = SegmentBuffers(segment, torch.ones(64), torch.full((64,), torch.nan))
        here = masked(drawn=drawn)(Quiet())
        empty = Selection(torch.zeros(9, dtype=torch.int32), 0)
        control = replace(control_of(rank, [segment]), flags=Flag.REPLAN if rank == 1 else 0)
        flags = here.wait(here.start("b", [load], [empty if rank == 1 else draw_offer(64, 9, 0, False)], control)).flags
        # The exchange is as good as new.
        again = here.start("b", [load], [draw_offer(64, 9, 0, False)], control_of(0, [segment], 8))
        here.wait(again)
        nothing = bool(load.update.isnan().all())
        here.finish(again)
        return flags, len(testing.calls()), nothing and bool(load.update.isfinite().all())

    assert testing.run(3, body) == [(Flag.REPLAN, 2 if drawn else 3, True)] * 3


@pytest.mark.parametrize("what", ["step", "plan", "buffer", "draw"])
@pytest.mark.parametrize("drawn", [False, True])
def test_ranks_at_different_places_are_told_so(drawn: bool, what: str) -> None:
    (segment,) = segments_of([(64, FP32)])
    if what == "draw" and not drawn:
        pytest.skip("ranks that vote choose as they like")

    def body(rank: int) -> None:
        load = SegmentBuffers(segment, torch.ones(64), torch.full((64,), torch.nan))
        control, seed = control_of(0, [segment]), 0
        if rank == 1:
            control = control if what == "draw" else replace(control, **{what: getattr(control, what) - 1})
            seed = 3 if what == "draw" else 0
        here = masked(drawn=drawn)(Quiet())
        here.wait(here.start("b", [load], [draw_offer(64, 9, seed, False)], control))

    errors = testing.run(3, body, return_errors=True)
    assert [type(error) for error in errors] == [MessageError] * 3 and len({str(error) for error in errors}) == 1
    assert ("AGM504" if what == "draw" else "AGM502") in str(errors[0])


def test_a_checksum_tells_draws_apart() -> None:
    one = torch.tensor([3, 5, 9], dtype=torch.int32)
    different: list[Callable[[], list[torch.Tensor]]] = [
        lambda: [one + 1],
        lambda: [one[:2]],
        lambda: [torch.tensor([3, 6, 9])],
        lambda: [one, one],
        lambda: [torch.tensor([0, 3, 5, 9])],
    ]
    assert torch.equal(checksum([one]), checksum([one.long()])) and int(checksum([one]).sum()) == 4
    assert all(not torch.equal(checksum([one]), checksum(make())) for make in different)


def test_a_segment_without_a_selection_has_no_place() -> None:
    (segment,) = segments_of([(64, FP32)])
    load = SegmentBuffers(segment, torch.ones(64), torch.zeros(64))
    here = testing.run(1, lambda rank: masked()(Quiet()))[0]
    with pytest.raises(ValueError, match="without a selection"):
        here.start("b", [load], [None], control_of(0, [segment]))
