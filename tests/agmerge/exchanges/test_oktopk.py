# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce against a dense reference: which elements are kept, their bits, and what is taken off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exchanges import (
    CPU,
    SUM_INPUTS,
    Offers,
    Quiet,
    Seen,
    SumInput,
    apart,
    control_of,
    draw_offer,
    draw_work,
    draws,
    exchange,
    oktopk,
    same,
    segments_of,
    sparse,
)

from agmerge import testing
from agmerge.exchanges import SegmentBuffers
from agmerge.exchanges.oktopk import regions
from agmerge.ops import Average, Sum
from agmerge.tensors.layout import Segment, TensorClass
from sparsifiers import Kind, Selection

LIGHT = settings(deadline=None)
FP32 = TensorClass(CPU, torch.float32, Kind.SPARSE)


def bins(values: torch.Tensor) -> list[tuple[int, int]]:
    """Exponent and eighth of an octave of each magnitude; zero is below all others."""
    found = []
    for value in values.abs().tolist():
        mantissa, exponent = np.frexp(np.float32(value))
        found.append((int(exponent), int((mantissa - 0.5) * 16)) if value else (-1000, 0))
    return found


def chosen(before: torch.Tensor, selection: Selection, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return before[selection.trimmed()].clamp(-limit, limit).to(dtype)


def check(seen: Sequence[Seen], segments: Sequence[Segment], offer: Offers, scale: float) -> int:
    """Everything that the docstring of the exchange promises; how many elements are kept."""
    dtype, storage = segments[0].tensor_class.dtype, segments[0].tensor_class.storage
    budget = sum(offer(0, index).indices.numel() for index in range(len(segments)))
    totals, touched = [], []
    for index, segment in enumerate(segments):
        total, touch = torch.zeros(segment.length, dtype=storage), torch.zeros(segment.length, dtype=torch.bool)
        for rank, one in enumerate(seen):
            selection = offer(rank, index)
            total[selection.trimmed()] += chosen(one.before[index], selection, dtype).to(storage) * scale
            touch[selection.trimmed()] = True
        totals.append(total)
        touched.append(touch)
    whole, candidates = torch.cat(totals), torch.cat(touched).nonzero().view(-1)
    of = bins(whole[candidates])
    # The largest bins, and of one bin the lowest indices.
    order = sorted(range(len(of)), key=lambda i: ((-of[i][0], -of[i][1]), i))[:budget]
    kept = torch.zeros(len(whole), dtype=torch.bool)
    kept[candidates[order]] = True
    expected = torch.where(kept, whole, torch.zeros(())).to(dtype)
    parts = [segment.length for segment in segments]
    for index, (update, here) in enumerate(zip(expected.split(parts), kept.split(parts), strict=True)):
        assert same(seen[0].update[index], update)
        for rank, one in enumerate(seen):
            selection, sent = offer(rank, index), one.sent[index]
            assert sent is not None and sent[0] is not None
            mine = selection.trimmed()
            both = here[mine]
            assert torch.equal(sent[0].long(), mine[both])
            assert same(sent[1], chosen(one.before[index], selection, dtype)[both])
            # Conservation: to the bit, and nothing but what was kept changes at all.
            taken = torch.zeros(parts[index], dtype=torch.float64)
            taken.index_add_(0, sent[0], sent[1].double())
            if dtype == storage:
                assert torch.equal(one.rest[index] + taken.to(storage), one.before[index])
            assert torch.equal(one.rest[index].double() + taken, one.before[index].double())
            untouched = torch.ones(parts[index], dtype=torch.bool)
            untouched[mine[both]] = False
            assert same(one.rest[index][untouched], one.before[index][untouched])
    return int(kept.sum())


@LIGHT
@given(handed=SUM_INPUTS, magnitude=st.sampled_from([1e-6, 1.0, 1e6]))
def test_oktopk(handed: SumInput, magnitude: float) -> None:
    segments = handed.segments()
    if handed.dtype == torch.float16:
        magnitude = min(magnitude, 1e3)  # the sum of what saturates is infinite, as anywhere
    work, offer = handed.draws(segments, magnitude)
    seen = exchange(handed.size, oktopk(handed.op), segments, work, offer)
    check(seen, segments, offer, handed.op.scale(handed.size))


@pytest.mark.parametrize("skewed", [False, True])
def test_sixteen_ranks(skewed: bool) -> None:
    (segment,) = segments_of([(4096, FP32)])

    def work(rank: int, index: int) -> torch.Tensor:
        scales = torch.logspace(3, -3, 4096) if skewed else torch.ones(4096)
        return draw_work(segment, rank, 1.0) * scales

    def offer(rank: int, index: int) -> Selection:
        largest = work(rank, index).abs().topk(200).indices
        return Selection(largest.sort().values.to(torch.int32), 200)

    seen = exchange(16, oktopk(), [segment], work, offer)
    assert check(seen, [segment], offer, 1 / 16) == 200


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_element_from_one_rank(size: int) -> None:
    """W * k == n: of the ranks' parts, side by side, the k largest."""
    (segment,) = segments_of([(32 * size, FP32)])

    def offer(rank: int, index: int) -> Selection:
        return Selection(torch.arange(32 * rank, 32 * rank + 32, dtype=torch.int32), 32)

    seen = exchange(size, oktopk(Sum), [segment], lambda r, i: draw_work(segment, r, 1.0), offer)
    assert check(seen, [segment], offer, 1.0) == 32


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_density_1_is_sparse_to_the_bit_and_leaves_nothing(size: int) -> None:
    (segment,) = segments_of([(100, FP32)])

    def work(rank: int, index: int) -> torch.Tensor:
        values = draw_work(segment, rank, 10.0**rank)
        values[7] = (-1.0) ** rank  # cancels
        return values

    def offer(rank: int, index: int) -> Selection:
        return Selection(torch.arange(segment.length, dtype=torch.int32), segment.length)

    seen = exchange(size, oktopk(), [segment], work, offer)
    assert same(seen[0].update[0], exchange(size, sparse(Average), [segment], work, offer)[0].update[0])
    assert all(one.rest[0].count_nonzero() == 0 for one in seen)


@pytest.mark.parametrize("size", [1, 3])
def test_what_fits_is_kept_whole_zeros_too(size: int) -> None:
    """Cancelled elements are kept while there is room, so they leave the residuals."""
    (segment,) = segments_of([(64, FP32)])

    def work(rank: int, index: int) -> torch.Tensor:
        return torch.ones(64) * (-1.0 if rank == 1 else 1.0 if rank == 0 else 0.0)

    def offer(rank: int, index: int) -> Selection:
        return Selection(torch.arange(8, dtype=torch.int32), 8)

    for one in exchange(size, oktopk(), [segment], work, offer):
        assert one.rest[0][:8].count_nonzero() == 0


@pytest.mark.parametrize("offering", [[], [0], [2], [0, 2]])
def test_ranks_without_an_offer(offering: list[int]) -> None:
    (segment,) = segments_of([(200, FP32)])

    def offer(rank: int, index: int) -> Selection:
        indices = torch.arange(50, 70, dtype=torch.int32)
        return Selection(indices, 20 if rank in offering else 0)

    seen = exchange(3, oktopk(), [segment], lambda r, i: draw_work(segment, r, 1.0), offer)
    assert check(seen, [segment], offer, 1 / 3) == (20 if offering else 0)


def test_nothing_on_offer_is_one_call() -> None:
    (segment,) = segments_of([(64, FP32)])

    def body(rank: int) -> list[str]:
        here = oktopk()(Quiet())
        load = SegmentBuffers(segment, torch.ones(64), torch.full((64,), torch.nan))
        pending = here.start("buffer 3", [load], [draw_offer(64, 0, rank, False)], control_of(rank, [segment]))
        here.wait(pending)
        here.finish(pending)
        assert load.update.count_nonzero() == 0
        return [name for _, name, _ in testing.calls()]

    assert testing.run(3, body) == [["buffer 3"]] * 3


def test_not_a_number_and_infinity_come_first() -> None:
    (segment,) = segments_of([(64, FP32)])

    def work(rank: int, index: int) -> torch.Tensor:
        values = torch.ones(64) * 3e38
        values[40], values[41] = torch.nan, -torch.inf
        return values

    def offer(rank: int, index: int) -> Selection:
        return Selection(torch.tensor([3, 4, 40 + rank], dtype=torch.int32), 3)

    update = exchange(2, oktopk(), [segment], work, offer)[0].update[0]
    assert update[40].isnan() and update[41] == -torch.inf and int((update != 0).sum()) == 3


def test_16_bits_are_added_up_in_32() -> None:
    """256 + 1 and 1 in bfloat16 would be 256: one rounding, of the sum."""
    (segment,) = segments_of([(32, TensorClass(CPU, torch.bfloat16, Kind.SPARSE))])

    def offer(rank: int, index: int) -> Selection:
        return Selection(torch.tensor([5], dtype=torch.int32), 1)

    def work(rank: int, index: int) -> torch.Tensor:
        return torch.ones(32) * (256.0 if rank == 0 else 1.0)

    seen = exchange(3, oktopk(Sum), [segment], work, offer)
    assert seen[0].update[0][5] == 258.0


@pytest.mark.parametrize("cut", ["even", "first", "last"])
def test_the_result_does_not_depend_on_the_regions(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = apart(segments_of([(500, FP32)]) + segments_of([(300, FP32)]))
    work, offer = draws(segments, 0.2, 3, False, 1.0)
    expected = exchange(4, oktopk(), segments, work, offer)

    def other(points: object, counts: Sequence[int], length: int) -> list[int]:
        inner = {"even": [length // 4, length // 2, 3 * length // 4], "first": [length] * 3, "last": [0] * 3}[cut]
        return [0, *inner, length]

    monkeypatch.setattr(regions, "bounds", other)
    seen = exchange(4, oktopk(), segments, work, offer)
    for one, two in zip(seen, expected, strict=True):
        assert all(same(a, b) for a, b in zip(one.update + one.rest, two.update + two.rest, strict=True))


def test_a_class_of_another_kind_is_refused() -> None:
    classes = [FP32, TensorClass(CPU, torch.float32, Kind.DENSE), TensorClass(CPU, torch.bfloat16, Kind.SPARSE)]
    (first,), *others = (segments_of([(64, tensor_class)]) for tensor_class in classes)

    def body(rank: int) -> None:
        for (other,), offer in zip(others, (None, draw_offer(64, 3, 1, False)), strict=True):
            loads = [
                SegmentBuffers(part, torch.ones(64), torch.ones(64, dtype=part.tensor_class.dtype))
                for part in (first, other)
            ]
            with pytest.raises(ValueError, match="buffer 3: exchange='oktopk' requires tensors of one class, got"):
                oktopk()(Quiet()).start(
                    "buffer 3", loads, [draw_offer(64, 3, 1, False), offer], control_of(rank, [first, other])
                )

        with pytest.raises(ValueError, match="requires tensors of one class, got"):
            load = SegmentBuffers(first, torch.ones(64), torch.ones(64))
            oktopk()(Quiet()).start("buffer 3", [load], [None], control_of(rank, [first]))

    testing.run(1, body)
