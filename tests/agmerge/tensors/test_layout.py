# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie: aligned, in readiness order, and every element in exactly one segment."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agmerge.tensors.layout import ALIGNMENT, Layout, Slot, TensorClass, padded
from sparsifiers import Kind

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CLASSES = [TensorClass(CPU, dtype, kind) for dtype in DTYPES for kind in (Kind.SPARSE, Kind.DENSE)]

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(CLASSES)), max_size=12)


def layout_of(given_tensors: list[tuple[tuple[int, ...], TensorClass]]) -> Layout:
    return Layout([(f"t{i}", shape, tensor_class) for i, (shape, tensor_class) in enumerate(given_tensors)])


@settings(deadline=None)
@given(tensors)
def test_slots_are_aligned_and_follow_one_another(drawn: list[tuple[tuple[int, ...], TensorClass]]) -> None:
    layout = layout_of(drawn)
    assert [slot.index for slot in layout.slots] == list(range(len(drawn)))
    assert [slot.name for slot in layout.slots] == [f"t{i}" for i in range(len(drawn))]
    assert [(slot.shape, slot.tensor_class) for slot in layout.slots] == drawn
    assert layout.numel == sum(math.prod(shape) for shape, _ in drawn)
    assert set(layout.lengths) == {tensor_class for _, tensor_class in drawn}
    for tensor_class, length in layout.lengths.items():
        here = [slot for slot in layout.slots if slot.tensor_class == tensor_class]
        assert here[0].offset == 0
        assert [slot.end for slot in here] == [*(slot.offset for slot in here[1:]), length]
        for slot in here:
            assert slot.numel == math.prod(slot.shape)
            assert slot.numel <= slot.end - slot.offset < slot.numel + ALIGNMENT
            for dtype in (tensor_class.dtype, tensor_class.storage):
                assert slot.offset * dtype.itemsize % 64 == 0


@settings(deadline=None)
@given(tensors, st.data())
def test_segments_of_any_plan_cover_every_class_once(
    drawn: list[tuple[tuple[int, ...], TensorClass]], data: st.DataObject
) -> None:
    layout = layout_of(drawn)
    cuts = sorted({0, len(drawn), *data.draw(st.lists(st.integers(0, len(drawn))))})
    buffers = [layout.segments(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
    for tensor_class, length in layout.lengths.items():
        position = 0
        for segments in buffers:
            mine = [segment for segment in segments if segment.tensor_class == tensor_class]
            assert len(mine) <= 1  # one segment a tensor class and merge buffer
            for segment in mine:
                assert segment.start == position
                assert segment.length == segment.stop - segment.start > 0
                position = segment.stop
        assert position == length
    slots = [slot for segments in buffers for segment in segments for slot in segment.slots]
    assert sorted(slot.index for slot in slots) == [slot.index for slot in layout.slots if slot.numel]
    assert sum(segment.numel for segments in buffers for segment in segments) == layout.numel


@settings(deadline=None)
@given(tensors)
def test_shapes_tell_where_each_tensor_of_a_segment_lies(drawn: list[tuple[tuple[int, ...], TensorClass]]) -> None:
    for segment in layout_of(drawn).segments(0, len(drawn)):
        assert sum(math.prod(shape) for shape in segment.shapes) == segment.length
        position, found = segment.start, []
        for shape in segment.shapes:
            found.append((position, shape))
            position += math.prod(shape)
        for slot in segment.slots:
            assert (slot.offset, slot.shape) in found
        paddings = len(segment.shapes) - len(segment.slots)
        assert paddings == sum(slot.end - slot.offset > slot.numel for slot in segment.slots)


def test_tensors_without_elements_take_no_place() -> None:
    tensor_class = CLASSES[0]
    layout = layout_of(
        [((0,), tensor_class), ((3,), tensor_class), ((2, 0), tensor_class), ((4,), tensor_class), ((0,), CLASSES[2])]
    )
    assert [slot.offset for slot in layout.slots] == [0, 0, ALIGNMENT, ALIGNMENT, 0]
    assert layout.lengths == {tensor_class: 2 * ALIGNMENT, CLASSES[2]: 0}
    (segment,) = layout.segments(0, 5)
    assert [slot.index for slot in segment.slots] == [1, 3]
    assert layout.segments(2, 3) == layout.segments(4, 5) == layout.segments(1, 1) == []


def test_a_class_keeps_apart_what_is_treated_differently() -> None:
    classes = [
        TensorClass(CPU, torch.float32, Kind.SPARSE),
        TensorClass(CPU, torch.float32, Kind.DENSE),
        TensorClass(CPU, torch.float16, Kind.SPARSE),
        TensorClass(torch.device("meta"), torch.float32, Kind.SPARSE),
    ]
    layout = layout_of([((5,), tensor_class) for tensor_class in [*classes, *classes]])
    assert [slot.offset for slot in layout.slots] == [0] * 4 + [ALIGNMENT] * 4
    assert [segment.tensor_class for segment in layout.segments(0, 8)] == classes
    assert str(classes[1]) == "dense/float32/cpu"
    assert len({str(tensor_class) for tensor_class in classes}) == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_16_bit_gradients_are_kept_in_32(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert TensorClass(CPU, dtype, Kind.SPARSE).storage == expected


def test_a_0_dim_tensor_is_one_element() -> None:
    slot = Slot(0, "scale", (), CLASSES[0], 64)
    assert (slot.numel, slot.end) == (1, 64 + ALIGNMENT)


@pytest.mark.parametrize("numel, length", [(0, 0), (1, 32), (31, 32), (32, 32), (33, 64), (2**40 + 1, 2**40 + 32)])
def test_padded(numel: int, length: int) -> None:
    assert padded(numel) == length


def test_the_layout_depends_on_the_order_only() -> None:
    tensor_class = CLASSES[4]
    first = Layout([("a", (3,), tensor_class), ("b", (40,), tensor_class)])
    again = Layout([("a", (3,), tensor_class), ("b", (40,), tensor_class)])
    other = Layout([("b", (40,), tensor_class), ("a", (3,), tensor_class)])
    assert first.slots == again.slots and first.segments(0, 2) == again.segments(0, 2)
    assert [slot.offset for slot in other.slots] == [0, 64]
