# SPDX-License-Identifier: Apache-2.0
"""K2 and K3 in Triton's interpreter: the bits of torch's operations, and exactly what `topk` selects."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.triton_inputs import CPU, KINDS, assert_same, bits, both, for_interpreter, vector
from torch import Tensor

import sparsifiers
from agmerge.exchanges.message.indices import Blocks, smallest
from agmerge.exchanges.message.scaled import VALUES
from sparsifiers.gpu import IndexLayout, IndexSection, Scratch, Slots, count_digits, find_edge, select_largest
from sparsifiers.gpu.scratch import DIGITS, MASK
from sparsifiers.gpu.selection import saturated

SIZES = [1, 31, 4096, 10007]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of numpy, in the interpreter


def budgets(n: int) -> list[int]:
    return sorted({1, max(1, n // 100), max(1, n // 3), n})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_exact_selection_is_topk(kind: str, n: int) -> None:
    original = vector(kind, n)
    for k in budgets(n):

        def call(k: int = k) -> tuple[Tensor, ...]:
            work, slots, scratch = original.clone(), Slots.of(k, CPU), Scratch(n, CPU)
            select_largest(work, k, scratch, slots, exact=True, commit=True)
            return slots.indices, slots.values, slots.count, work, scratch.histogram

        indices, values, count, work, histogram = assert_same(call)
        wanted = sparsifiers.get("topk").select(original, k=k)
        assert int(count) == k and torch.equal(indices, wanted.indices)
        assert bits(values) == bits(original[wanted.trimmed()])
        left = original.index_add(0, wanted.trimmed(), values, alpha=-1)
        assert bits(work.nan_to_num()) == bits(left.nan_to_num())
        assert not histogram.any()  # for the next selection


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_one_digit_takes_k_and_all_that_are_clearly_larger(kind: str, n: int) -> None:
    original = vector(kind, n, 5)
    keys = original.view(torch.int32).numpy() & MASK
    for k in budgets(n):

        def call(k: int = k) -> tuple[Tensor, ...]:
            work, slots = original.clone(), Slots.of(k + 3, CPU)
            slots.indices.fill_(99)
            slots.values.fill_(9.0)
            select_largest(work, k, Scratch(n, CPU), slots, exact=False, commit=True)
            return slots.indices, slots.values, slots.count, work

        indices, values, count, work = assert_same(call)
        chosen = indices[: int(count)].numpy()
        assert len(chosen) == k
        assert (np.diff(chosen) > 0).all()
        assert not indices[int(count) :].any() and not values[int(count) :].any()
        if len(chosen):
            kth = np.sort(keys)[::-1][len(chosen) - 1]
            surely = np.flatnonzero(keys >> DIGITS[0].shift > kth >> DIGITS[0].shift)
            assert np.isin(surely, chosen).all()
            in_bin = np.flatnonzero(keys >> DIGITS[0].shift == kth >> DIGITS[0].shift)
            assert np.setdiff1d(chosen, surely).tolist() == in_bin[: len(chosen) - len(surely)].tolist()
        whole = work.index_copy(0, indices[: int(count)].long(), values[: int(count)])
        assert bits(whole) == bits(original)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["normal", "cauchy", "specials", "subnormal"])
def test_what_is_rounded_stays(wire: str, kind: str) -> None:
    n, k = 9001, 700
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[wire]
    original = for_interpreter(vector(kind, n) * (1e5 if kind == "cauchy" else 1.0), dtype)

    def call() -> tuple[Tensor, ...]:
        work, slots = original.clone(), Slots.of(k, CPU, dtype)
        select_largest(work, k, Scratch(n, CPU), slots, exact=True, commit=True)
        return slots.indices, slots.values, work

    indices, values, work = assert_same(call)
    chosen = original[indices.long()]
    codec = VALUES[wire]
    wanted = codec.encode(chosen, torch.zeros(codec.size(k), dtype=torch.uint8))
    assert bits(values.nan_to_num()) == bits(wanted.nan_to_num())
    finite = chosen.isfinite()
    left = work[indices.long()]
    assert torch.equal(left[finite], (chosen - values.float())[finite])
    assert finite.all() or left[~finite].isnan().all()


def test_saturation_is_the_codecs() -> None:
    values = torch.tensor([1e6, -1e6, 3.39e38, 1.0, -0.0, float("inf"), float("nan")])
    assert saturated(values, torch.float16).tolist()[:2] == [65504.0, -65504.0]
    assert saturated(values, torch.bfloat16)[5:].isnan().all()
    assert saturated(values, torch.float32) is values


def test_momentum_is_cleared_where_something_was_sent() -> None:
    n, k = 5000, 60
    original, before = vector("few", n), vector("normal", n, 3)

    def call() -> tuple[Tensor, ...]:
        momentum, slots = before.clone(), Slots.of(k, CPU)
        select_largest(original.clone(), k, Scratch(n, CPU), slots, exact=True, commit=True, momentum=momentum)
        return (momentum,)

    (momentum,) = assert_same(call)
    assert torch.equal(momentum != 0, original == 0)


def test_what_is_not_taken_off_stays() -> None:
    """For a codec that rounds more than a cast, and for a memory that keeps nothing."""
    n, k = 5000, 50
    original = vector("laplace", n)

    def call() -> tuple[Tensor, ...]:
        work, slots = original.clone(), Slots.of(k, CPU)
        select_largest(work, k, Scratch(n, CPU), slots, exact=True, commit=False)
        return work, slots.indices

    work, indices = assert_same(call)
    assert torch.equal(work, original)
    assert torch.equal(indices, sparsifiers.get("topk").select(original, k=k).indices)


def test_a_histogram_that_nobody_has_read_is_not_taken_for_the_next() -> None:
    n, k = 5000, 50
    first, second = vector("normal", n, 1) * 1e6, vector("normal", n, 2)

    def call() -> tuple[Tensor, ...]:
        scratch, slots = Scratch(n, CPU), Slots.of(k, CPU)
        count_digits(first, scratch)
        scratch.forget()
        select_largest(second.clone(), k, scratch, slots, exact=True, commit=True)
        return (slots.indices,)

    (indices,) = assert_same(call)
    assert torch.equal(indices, sparsifiers.get("topk").select(second, k=k).indices)


def test_a_section_is_written_on_the_way_and_buffers_serve_again() -> None:
    n, k = 12345, 77
    codec = smallest(n, k)
    assert isinstance(codec, Blocks)
    layout = IndexLayout(n, k, codec.low)

    def call() -> tuple[Tensor, ...]:
        slots, scratch, words = Slots.of(k, CPU), Scratch(n, CPU), torch.full((layout.words,), -1, dtype=torch.int32)
        found = []
        for turn, exact in enumerate([True, False, True]):
            work = vector("normal", n, turn)
            select_largest(work, k, scratch, slots, IndexSection(layout, words), exact=exact, commit=True)
            found.append(words.clone())
            data = words.view(torch.uint8)[: codec.size]
            indices, good = codec.decode(data, k)
            assert good and torch.equal(indices, slots.indices)
        return tuple(found)

    found = assert_same(call)
    assert len({tuple(one.tolist()) for one in found}) == 3


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_edge_lies_in_the_bin_of_the_kth(level: int) -> None:
    """The digit, and how many of its bin are wanted: from all of them to one."""
    bins, counts = torch.tensor([3, 200, 511]), torch.tensor([5, 7, 4], dtype=torch.int32)
    for k, digit, room in [(1, 511, 1), (4, 511, 4), (5, 200, 1), (11, 200, 7), (12, 3, 1), (16, 3, 5), (20, 0, 4)]:

        def call(k: int = k) -> tuple[Tensor, ...]:
            scratch = Scratch(1, CPU)
            scratch.histogram[bins] = counts
            scratch.edge.copy_(torch.tensor([6, k, 5]))  # of the digit before
            find_edge(k, level, scratch)
            return scratch.edge, scratch.histogram

        edge, histogram = assert_same(call)
        before = 6 << DIGITS[level].bits if level else 0
        assert edge.tolist() == [before | digit, room, 5 if level else digit] and not histogram.any()


def test_more_than_the_slots_is_never_written() -> None:
    """A histogram of something else: what it says must not let a kernel write behind the slots."""
    n, k = 9000, 40
    (indices, count, guard), _ = both(lambda: _too_many(n, k))
    assert int(count) == k and not guard.any()
    assert (indices[1:] > indices[:-1]).all()


def _too_many(n: int, k: int) -> tuple[Tensor, ...]:
    scratch, store = Scratch(n, CPU), torch.zeros(2 * k, dtype=torch.int32)
    slots = Slots(store[:k], torch.zeros(k), torch.zeros((), dtype=torch.int32))
    scratch.histogram[3] = n
    scratch.count()
    select_largest(vector("normal", n), k, scratch, slots, exact=False, commit=True)
    return slots.indices, slots.count, store[k:]
