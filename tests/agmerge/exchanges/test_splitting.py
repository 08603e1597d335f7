# SPDX-License-Identifier: Apache-2.0
"""Several messages of one merge buffer: every element in exactly one, and whole rows where there are rows."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import merging
from agmerge.exchanges.routing import cut, split, why_parts_impossible
from agmerge.tensors.layout import ALIGNMENT, Layout, Segment, TensorClass
from sparsifiers import Kind

CPU = torch.device("cpu")
SPARSE, NARROW = TensorClass(CPU, torch.float32, Kind.SPARSE), TensorClass(CPU, torch.float32, Kind.SPARSE, 0.5)
DENSE = TensorClass(CPU, torch.float32, Kind.DENSE)

shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
layouts = st.lists(st.tuples(shapes, st.sampled_from([SPARSE, NARROW, DENSE])), min_size=1, max_size=8).map(
    lambda drawn: Layout([(f"t{i}", shape, tensor_class) for i, (shape, tensor_class) in enumerate(drawn)])
)


def only(*tensors: tuple[int, ...]) -> Segment:
    """The segment of tensors of these shapes."""
    (segment,) = Layout([(f"t{i}", shape, SPARSE) for i, shape in enumerate(tensors)]).segments(0, len(tensors))
    return segment


@settings(deadline=None)
@given(layouts, st.integers(1, 9))
def test_pieces_tile_a_segment(layout: Layout, parts: int) -> None:
    for segment in layout.segments(0, len(layout.slots)):
        pieces = cut(segment, parts)
        assert 1 <= len(pieces) <= parts
        assert [piece.stop for piece in pieces] == [*(piece.start for piece in pieces[1:]), segment.stop]
        assert pieces[0].start == segment.start and sum(piece.length for piece in pieces) == segment.length
        assert sum(piece.numel for piece in pieces) == segment.numel and all(piece.numel for piece in pieces)
        assert all(piece.start % ALIGNMENT == 0 for piece in pieces)
        assert len({piece.key for piece in pieces}) == len(pieces)
        even = segment.length / parts
        assert max(piece.length for piece in pieces) <= 1.5 * even + ALIGNMENT
        found: dict[int, list[tuple[int, int]]] = {}
        for piece in pieces:
            for slot in piece.slots:
                found.setdefault(slot.index, []).append(piece.inside(slot))
        for slot in segment.slots:
            ranges = found[slot.index]
            assert ranges[0][0] == 0 and ranges[-1][1] == slot.numel
            assert all(a[1] == b[0] for a, b in pairwise(ranges)) and all(a < b for a, b in ranges)


@settings(deadline=None)
@given(layouts, st.integers(1, 9))
def test_shapes_of_a_piece_say_what_lies_where(layout: Layout, parts: int) -> None:
    for segment in layout.segments(0, len(layout.slots)):
        for piece in cut(segment, parts):
            assert sum(math.prod(shape) for shape in piece.shapes) == piece.length
            at, told = piece.start, {}
            for shape in piece.shapes:
                told[at] = shape
                at += math.prod(shape)
            for slot in piece.slots:
                start, stop = piece.inside(slot)
                shape = told[slot.offset + start]
                assert math.prod(shape) == stop - start
                if stop - start == slot.numel:
                    assert shape == slot.shape
                elif len(shape) > 1:
                    row = math.prod(slot.shape[1:])
                    assert shape[1:] == slot.shape[1:] and start % row == 0 and stop % row == 0
                else:
                    assert len(slot.shape) == 1 or start % math.prod(slot.shape[1:]) or stop % math.prod(slot.shape[1:])


@pytest.mark.parametrize(
    "shape, parts, expected",
    [
        ((64, 48), 4, [(16, 48)] * 4),
        ((64, 48), 3, [(22, 48), (20, 48), (22, 48)]),  # cuts after an even number of rows are aligned
        ((7, 64), 2, [(4, 64), (3, 64)]),
        ((96, 2, 3), 2, [(48, 2, 3)] * 2),
        ((3000,), 2, [(1504,), (1496,), (8,)]),
        ((3, 1001), 2, [(1504,), (1499,), (5,)]),  # no two rows meet at an aligned place
        ((32, 33), 2, [(512,), (544,)]),
        ((2, 10), 4, [(2, 10), (12,)]),  # too short
    ],
)
def test_rows_stay_whole_where_there_is_an_aligned_place_between_them(
    shape: tuple[int, ...], parts: int, expected: list[tuple[int, ...]]
) -> None:
    assert [found for piece in cut(only(shape), parts) for found in piece.shapes] == expected


def test_cuts_are_between_tensors_where_one_ends_near_by() -> None:
    pieces = cut(only((900,), (30, 40), (1000,)), 3)
    assert [[slot.name for slot in piece.slots] for piece in pieces] == [["t0"], ["t1"], ["t2"]]
    assert pieces[1].shapes == ((30, 40), (16,))


def test_keys_tell_parts_apart_and_do_not_depend_on_what_lies_before() -> None:
    behind = Layout([("first", (500,), SPARSE), ("t0", (64, 48), SPARSE)]).segments(1, 2)
    keys = [piece.key for piece in cut(only((64, 48)), 2)]
    assert keys == [f"t0[0:1536]/{SPARSE}", f"t0[1536:3072]/{SPARSE}"]
    assert keys == [piece.key for piece in cut(behind[0], 2)]
    assert only((64, 48)).key == f"t0/{SPARSE}" not in keys


@settings(deadline=None)
@given(layouts, st.integers(1, 5))
def test_what_is_sent_whole_goes_with_the_first_message(layout: Layout, parts: int) -> None:
    group = sorted(layout.segments(0, len(layout.slots)), key=lambda segment: not segment.tensor_class.sparse)
    messages = split(group, parts)
    assert 1 <= len(messages) <= parts
    for segment in group:
        pieces = [piece for message in messages for piece in message if piece.tensor_class == segment.tensor_class]
        assert pieces == (cut(segment, parts) if segment.tensor_class.sparse else [segment])
        assert all(sum(piece.tensor_class == segment.tensor_class for piece in message) <= 1 for message in messages)
        assert segment.tensor_class.sparse or segment in messages[0]


def test_several_tensors_ahead_are_refused() -> None:
    labels = ("ahead", "ahead", "")
    assert why_parts_impossible(merging.Plan((2, 1, 2), labels=labels, parts=(1, 3, 3))) == ""
    assert "merge buffer 0 has 2 parts, but each of its 2 tensors" in why_parts_impossible(
        merging.Plan((2, 1, 2), labels=labels, parts=(2, 1, 1))
    )
