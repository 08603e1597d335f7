# SPDX-License-Identifier: Apache-2.0
"""The only writer of residuals: what was sent and what is left are together exactly what there was."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsifiers
from agmerge.tensors.arena import Arena, Difference, subtract
from agmerge.tensors.layout import Layout, TensorClass
from sparsifiers import Kind, Memory, native
from sparsifiers.largest import Candidates, TensorNotes
from sparsifiers.memories import Alongside, DGCMemory, HandBack

CPU = torch.device("cpu")
INT = {torch.float32: torch.int32, torch.float64: torch.int64}
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0]

floats = st.floats(width=32, min_value=-(2.0**29), max_value=2.0**29)
doubles = st.floats(allow_nan=False, allow_infinity=False)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(INT[tensor.dtype]).tolist()


def exact(tensor: torch.Tensor) -> list[Fraction]:
    return [Fraction(value) for value in tensor.double().tolist()]


def arena_of(
    shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, memory: str | Memory = "residual"
) -> tuple[Arena, Layout]:
    tensor_class = TensorClass(CPU, dtype, Kind.SPARSE)
    layout = Layout([(f"t{i}", shape, tensor_class) for i, shape in enumerate(shapes)])
    return Arena(
        tensor_class,
        layout.lengths[tensor_class],
        layout.slots,
        memory if isinstance(memory, Memory) else sparsifiers.memory(memory),
    ), layout


# -- commit -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data(), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), st.booleans(), st.booleans())
def test_sent_and_rest_are_the_work(data: st.DataObject, wire: torch.dtype, everywhere: bool, wide: bool) -> None:
    values = torch.tensor(data.draw(st.lists(floats, min_size=1, max_size=20)))
    chosen = data.draw(st.lists(st.sampled_from(range(len(values))), unique=True))
    indices = torch.arange(len(values)) if everywhere else torch.tensor(sorted(chosen), dtype=torch.int64)
    limit = min(torch.finfo(wire).max, torch.finfo(torch.float32).max)
    sent = values[indices].clamp(-limit, limit).to(wire)
    work = values.clone()
    subtract(work, None if everywhere else indices.to(torch.int64 if wide else torch.int32), sent)
    total = exact(work)
    for index, value in zip(indices.tolist(), exact(sent), strict=True):
        total[index] += value
    assert total == exact(values)
    rest = torch.ones(len(values), dtype=torch.bool)
    rest[indices] = False
    assert bits(work[rest]) == bits(values[rest])


@settings(deadline=None)
@given(st.lists(doubles, min_size=1, max_size=20))
def test_of_float64_nothing_is_lost(values: list[float]) -> None:
    work = torch.tensor(values, dtype=torch.float64)
    subtract(work, torch.arange(0, len(values), 2, dtype=torch.int32), work[::2].clone())
    assert (work[::2] == 0).all()
    assert work[1::2].tolist() == values[1::2]


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_padding_with_zero_changes_no_bit(wire: torch.dtype) -> None:
    work = torch.tensor(SPECIAL)
    for indices in (torch.arange(len(SPECIAL)), torch.zeros(7), torch.full((7,), 4), torch.tensor([9, 0, 9, 1])):
        subtract(work, indices.to(torch.int32), torch.zeros(len(indices), dtype=wire))
    assert bits(work) == bits(torch.tensor(SPECIAL))


def test_padding_beside_what_was_sent() -> None:
    work = torch.tensor([1.0, -0.0, 3.0])
    subtract(work, torch.tensor([2, 0, 2, 2], dtype=torch.int32), torch.tensor([2.5, 1.0, 0.0, 0.0]))
    assert bits(work) == bits(torch.tensor([0.0, -0.0, 0.5]))


def test_nothing_sent() -> None:
    work = torch.tensor(SPECIAL)
    subtract(work, torch.empty(0, dtype=torch.int32), torch.empty(0))
    assert bits(work) == bits(torch.tensor(SPECIAL))


# -- the arena ----------------------------------------------------------------------------------------------

SHAPES: list[tuple[int, ...]] = [(3, 5), (), (32,), (0,), (2, 1, 7), (33,)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_cover_every_element_once_and_padding_never(dtype: torch.dtype) -> None:
    arena, layout = arena_of(SHAPES, dtype)
    assert arena.update.dtype == dtype and arena.work.dtype == layout.slots[0].tensor_class.storage
    for slot in layout.slots:
        residual = arena.state_of(slot).get("residual")
        assert residual is not None and arena.residual is not None
        assert residual.shape == arena.gradients[slot.index].shape == slot.shape
        assert residual.is_contiguous()
        residual += 1
        arena.gradients[slot.index].add_(1)
        arena.accumulate(slot, torch.ones(slot.shape, dtype=dtype))
    real = torch.zeros(len(arena.work), dtype=torch.bool)
    for slot in layout.slots:
        real[slot.offset : slot.offset + slot.numel] = True
    assert int(real.sum()) == layout.numel < len(real)
    assert arena.residual is not None
    for flat, value in ((arena.residual, 1), (arena.update, 1), (arena.work, 2)):
        assert (flat[real] == value).all() and (flat[~real] == 0).all()


def test_work_is_residual_plus_gradient_and_the_residual_stays() -> None:
    arena, layout = arena_of([(2, 3), (4,)])
    first, second = layout.slots
    residual = arena.state_of(first).get("residual")
    assert residual is not None
    residual.copy_(torch.tensor([[0.1, -0.0, 2.0], [3.0, 1e-45, 5.0]]))
    before = bits(arena.residual)  # type: ignore[arg-type]
    gradient = torch.tensor([[0.2, 1.0], [-0.0, 7.0], [8.0, 9.0]]).t()
    arena.accumulate(first, gradient)
    assert torch.equal(arena.work[:6].view(2, 3), residual + gradient)
    arena.accumulate(first, None)  # an attempt may be repeated, from the residual
    arena.accumulate(second, torch.ones(4))
    assert bits(arena.work[:6]) == before[:6]
    assert arena.work[32:36].tolist() == [1.0] * 4
    assert bits(arena.residual) == before  # type: ignore[arg-type]


def test_only_swap_makes_work_the_residual() -> None:
    arena, layout = arena_of([(4,)])
    (slot,) = layout.slots
    (segment,) = layout.segments(0, 1)
    for _ in range(3):  # attempts that never came to step()
        arena.accumulate(slot, torch.tensor([1.0, 2.0, 3.0, 4.0]))
        arena.subtract_sent(segment, torch.tensor([1], dtype=torch.int32), torch.tensor([2.0]))
        residual = arena.state_of(slot).get("residual")
        assert residual is not None and residual.tolist() == [0.0] * 4
    arena.swap()
    kept = arena.state_of(slot).get("residual")
    assert kept is not None and kept.tolist() == [1.0, 0.0, 3.0, 4.0]
    assert kept.data_ptr() == arena.residual.data_ptr() != arena.work.data_ptr()  # type: ignore[union-attr]
    arena.accumulate(slot, None)
    arena.subtract_sent(segment, None, arena.work.clone())
    arena.swap()
    assert arena.residual.count_nonzero() == 0  # type: ignore[union-attr]


def test_a_commit_stays_within_its_segment() -> None:
    arena, layout = arena_of([(4,), (4,), (4,)])
    for slot in layout.slots:
        arena.accumulate(slot, torch.full((4,), 5.0))
    (middle,) = layout.segments(1, 2)
    arena.subtract_sent(middle, torch.tensor([0, 3]), torch.tensor([5.0, 4.0]))
    seen = [arena.work[slot.offset : slot.offset + 4].tolist() for slot in layout.slots]
    assert seen == [[5.0] * 4, [0.0, 5.0, 5.0, 1.0], [5.0] * 4]
    arena.subtract_sent(middle, None, torch.full((middle.length,), 5.0))
    assert arena.work[:4].tolist() == arena.work[64:68].tolist() == [5.0] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_conservation_over_many_steps(dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(5, 7), (40,), ()]
    arena, layout = arena_of(shapes, dtype)
    (segment,) = layout.segments(0, 3)
    generator = torch.Generator().manual_seed(0)
    brought, sent = torch.zeros(segment.length), torch.zeros(segment.length)
    for step in range(30):
        for slot in layout.slots:  # whole numbers, so that float32 adds them up exactly
            gradient = torch.randint(-9, 10, slot.shape, generator=generator).to(dtype)
            brought[slot.offset : slot.offset + slot.numel] += gradient.float().reshape(-1)
            arena.accumulate(slot, None if step % 5 == slot.index else gradient)
            if step % 5 == slot.index:
                brought[slot.offset : slot.offset + slot.numel] -= gradient.float().reshape(-1)
        selection = sparsifiers.get("topk").select(arena.work, k=1 + step % 4, shapes=segment.shapes)
        values = arena.work[selection.trimmed()]
        sent[selection.trimmed()] += values.float()
        arena.subtract_sent(segment, selection.indices, values)
        arena.swap()
        assert arena.residual is not None
        assert torch.equal(sent + arena.residual, brought)
    assert sent.count_nonzero() > 10


def test_a_memory_that_keeps_nothing() -> None:
    arena, layout = arena_of([(4,)], memory="none")
    (slot,) = layout.slots
    (segment,) = layout.segments(0, 1)
    assert arena.residual is None and arena.state_of(slot).get("residual") is None
    slab = arena.work.data_ptr()
    arena.accumulate(slot, torch.arange(4.0))
    arena.subtract_sent(segment, None, arena.work.clone())
    assert arena.work[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    arena.swap()
    assert arena.work.data_ptr() == slab
    arena.accumulate(slot, None)
    assert arena.work.count_nonzero() == 0


# -- what is kept of sums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["residual", "dgc", "none"])
def test_what_is_kept_of_sums_is_added_and_ends_no_momentum(memory: str) -> None:
    arena, layout = arena_of([(8,)], memory=memory)
    (segment,), (slot,) = layout.segments(0, 1), layout.slots
    arena.accumulate(slot, torch.arange(1.0, 9.0))
    before = arena.work.clone()
    arena.add_unsent(segment, torch.tensor([1, 5], dtype=torch.int32), torch.tensor([0.5, -2.0]))
    expected = before.clone()
    if memory != "none":
        expected[1] += 0.5
        expected[5] -= 2.0
    assert bits(arena.work) == bits(expected)
    arena.swap()
    if memory == "dgc":
        assert arena.state_of(slot)["momentum"].all()


def test_momentum_of_values_that_travel_rounded_is_cleared() -> None:
    """DGC's momentum factor masking: also where what receivers read is not the value itself."""
    arena, layout = arena_of([(8,)], memory="dgc")
    (segment,), (slot,) = layout.segments(0, 1), layout.slots
    arena.accumulate(slot, torch.linspace(0.1, 0.8, 8))
    indices = torch.tensor([1, 5], dtype=torch.int32)
    sent = arena.work[indices.long()].half().float()
    assert not torch.equal(sent, arena.work[indices.long()])
    arena.subtract_sent(segment, indices, sent)
    arena.swap()
    momentum = arena.state_of(slot)["momentum"]
    assert not momentum[[1, 5]].any() and momentum[[0, 2, 3, 4, 6, 7]].all()


def test_a_gradient_that_lies_in_the_last_update_is_copied_before_the_sum_is_written_there() -> None:
    arena, layout = arena_of([(8,)], memory="none")
    (slot,) = layout.slots
    assert arena.in_place
    accumulated, elsewhere = arena.gradients[slot.index], torch.ones(8)
    kept = arena.move_to_update(slot, accumulated)
    assert kept.data_ptr() != accumulated.data_ptr() and torch.equal(kept, accumulated)
    assert arena.move_to_update(slot, elsewhere) is elsewhere


@pytest.mark.skipif(not native.available(), reason="the compiled loops were not built")
@pytest.mark.parametrize("memory", ["residual", "dgc"])
def test_one_pass_leaves_what_two_do(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "STREAMED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (one, layout), (two, _) = (arena_of([(7, 5), (64,)], memory=memory) for _ in range(2))
    source = torch.Generator().manual_seed(0)
    for step in range(3):
        for slot in layout.slots:
            gradient = torch.randn(slot.shape, generator=source)
            if step == 2:
                gradient.view(-1)[3] = torch.inf
            copy = one.update_for(slot, gradient)
            assert copy is one.gradients[slot.index]
            assert one.accumulate(slot, gradient, alongside=Alongside(copy)) is (step < 2)
            two.accumulate(slot, gradient)
            assert two.move_to_update(slot, gradient) is two.gradients[slot.index]
        for slot in layout.slots:
            assert torch.equal(one.gradients[slot.index], two.gradients[slot.index])
        assert bits(one.work) == bits(two.work)
        one.swap()
        two.swap()
        for kind, kept in one.state_of(layout.slots[0]).items():
            assert bits(kept.reshape(-1)) == bits(two.state_of(layout.slots[0])[kind].reshape(-1))


def test_what_no_pass_moves_has_no_place_to_move_to() -> None:
    arena, layout = arena_of([(4,)], dtype=torch.bfloat16)
    (slot,) = layout.slots
    assert arena.update_for(slot, torch.ones(4, dtype=torch.bfloat16)) is None  # work is float32
    alone, _ = arena_of([(4,)], memory="none")
    assert alone.update_for(slot, torch.ones(4)) is None  # nothing is kept, so nothing is added up
    arena, _ = arena_of([(4,)])
    assert arena.update_for(slot, torch.ones(4, dtype=torch.bfloat16)) is None
    assert arena.update_for(slot, arena.gradients[slot.index]) is None  # it is there
    assert arena.update_for(slot, torch.ones(4)) is arena.gradients[slot.index]


# -- what is written to a message and taken off in one pass ---------------------------------------------------


@pytest.mark.parametrize(
    "memory, commits, clears",
    [
        (sparsifiers.memory("residual"), True, False),
        (sparsifiers.memory("none"), False, False),
        (sparsifiers.memory("dgc"), True, True),
        (DGCMemory(masking=False), True, False),
    ],
    ids=str,
)
def test_whoever_takes_is_told_what_the_memory_does(memory: Memory, commits: bool, clears: bool) -> None:
    arena, layout = arena_of([(8,), (40,)], memory=memory)
    (segment,) = layout.segments(1, 2)
    for slot in layout.slots:
        arena.accumulate(slot, torch.arange(1.0, slot.numel + 1))

    def write(*, commit: bool, momentum: torch.Tensor | None) -> bool:
        assert commit is commits and (momentum is not None) is clears
        if momentum is not None:
            assert momentum.shape == (segment.length,)
            momentum[3] = 0.0
        return commit

    assert arena.write_and_subtract(segment, write) is commits
    if clears:
        arena.swap()
        momentum = arena.state_of(layout.slots[1])["momentum"]
        assert momentum[3] == 0 and momentum.count_nonzero() == 39


class OwnMask(DGCMemory):
    """A script's."""

    def mask(self, momentum: torch.Tensor, indices: torch.Tensor, sent: torch.Tensor) -> None:
        momentum.zero_()


@pytest.mark.parametrize("memory", [HandBack(), OwnMask()], ids=["hands back", "masks by itself"])
def test_nothing_is_taken_where_something_else_is_done_with_it(memory: Memory) -> None:
    arena, layout = arena_of([(8,)], memory=memory)
    assert not arena.write_and_subtract(*layout.segments(0, 1), lambda commit, momentum: True)


def test_a_difference_that_no_loop_writes_is_not_noted() -> None:
    out, notes = torch.empty(4), TensorNotes([(Candidates(4), 0, 4)])
    assert native.difference(out, torch.ones(4), torch.zeros(4)) is None  # of so few elements
    forgotten = []
    notes.forget = lambda: forgotten.append(True)  # type: ignore[method-assign]
    assert Difference(torch.ones(4), torch.zeros(4)).write(out, notes) is None
    assert out.tolist() == [1.0] * 4 and forgotten == [True]
