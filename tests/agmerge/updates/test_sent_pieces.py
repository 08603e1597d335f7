# SPDX-License-Identifier: Apache-2.0
"""Test what was sent of a segment, cut into pieces of tensors, and what is left of a delta without it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from agmerge.tensors.layout import Layout, Segment, Slot, TensorClass
from agmerge.updates.shared_parameters import (
    WHOLE,
    Piece,
    apply_lists,
    apply_update,
    lists_by_name,
    pieces_by_name,
    subtract,
    update_of,
)
from sparsifiers import Kind

TENSOR_CLASS = TensorClass(torch.device("cpu"), torch.float32, Kind.SPARSE, None)
LAYOUT = Layout([("a", (8, 6), TENSOR_CLASS), ("b", (7,), TENSOR_CLASS), ("c", (2, 5), TENSOR_CLASS)])
NAMES = {slot.name: slot for slot in LAYOUT.slots}


def whole() -> Segment:
    """Return the segment of all tensors."""
    return Segment(TENSOR_CLASS, tuple(LAYOUT.slots))


def filled(slot: Slot, pieces: list[Piece]) -> Tensor:
    """Return a tensor with what the pieces say was sent of it, and 9 where all was sent."""
    flat = torch.zeros(slot.numel)
    for piece in pieces:
        part = flat[piece.start : piece.stop]
        if piece.values is None:
            part.fill_(9.0)
        elif piece.indices is None:
            part.copy_(piece.values)
        else:
            part.index_add_(0, piece.indices - piece.first, piece.values)
    return flat


@given(
    st.lists(st.integers(0, whole().length - 1), unique=True),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)
@example([1, 0], False, torch.int32)  # element 0 is not the first, and the padding follows at once
@example([5, 0, 3], False, torch.int64)
def test_pieces_are_what_was_sent_of_each_tensor(chosen: list[int], ascending: bool, dtype: torch.dtype) -> None:
    """With padding behind what was sent, index 0 again with 0; what lies between tensors is nobody's.

    No sparsifier offers indices in another order, but an exchange may commit them.
    """
    segment, chosen = whole(), sorted(chosen) if ascending else chosen
    values = torch.tensor([float(i + 1) for i in range(len(chosen))] + [0.0, 0.0])
    indices = torch.tensor([*chosen, 0, 0], dtype=dtype)
    pieces = pieces_by_name([(segment, indices, values)])
    expected = torch.zeros(segment.length).index_add_(0, indices, values)
    for slot in LAYOUT.slots:
        start = slot.offset - segment.start
        for piece in pieces[slot.name]:
            assert piece.first == start and (piece.indices.diff() > 0).all()
        assert torch.equal(filled(slot, pieces[slot.name]), expected[start : start + slot.numel])


def test_a_segment_that_was_sent_as_it_is_is_whole_pieces() -> None:
    pieces = pieces_by_name([(whole(), None, None)])
    assert pieces == {name: [Piece(0, slot.numel, slot.offset, None, None)] for name, slot in NAMES.items()}


def test_a_segment_that_was_sent_whole_and_rounded_has_all_its_values() -> None:
    values = torch.arange(float(whole().length))
    pieces = pieces_by_name([(whole(), None, values)])
    for name, slot in NAMES.items():
        ((start, stop, _, indices, sent),) = pieces[name]
        first = slot.offset - whole().start
        assert (start, stop, indices) == (0, slot.numel, None) and torch.equal(sent, values[first : first + slot.numel])


def test_parts_of_a_tensor_are_pieces_of_it() -> None:
    """Cut where the parts of a merge buffer end in the middle of a tensor."""
    first = Segment(TENSOR_CLASS, tuple(LAYOUT.slots[:1]), (0, 32))
    second = Segment(TENSOR_CLASS, tuple(LAYOUT.slots), (32, LAYOUT.slots[-1].end))
    parts = [(first, torch.tensor([1, 31]), torch.tensor([1.0, 2.0])), (second, torch.tensor([0, 15]), torch.ones(2))]
    pieces = pieces_by_name(parts)["a"]
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 32), (32, 48)]
    assert filled(NAMES["a"], pieces).nonzero().view(-1).tolist() == [1, 31, 32, 47]


PIECES = {
    "whole": [WHOLE],
    "all, rounded": [Piece(0, 6, 0, None, torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 0.25]))],
    "some": [Piece(0, 6, 0, torch.tensor([1, 4]), torch.tensor([0.5, -1.0]))],
    "some, counted from 32": [Piece(0, 6, 32, torch.tensor([33, 36]), torch.tensor([0.5, -1.0]))],
    "none": [Piece(0, 6, 0, torch.tensor([], dtype=torch.int64), torch.tensor([]))],
    "two parts": [Piece(0, 3, 0, torch.tensor([2]), torch.tensor([1.0])), Piece(3, 6, 3, None, None)],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_a_parameter_moves_with_the_base_but_for_what_was_sent(pieces: list[Piece]) -> None:
    """Check that what ``apply_update`` leaves between them is what ``subtract`` says of the delta."""
    source = torch.Generator().manual_seed(3)
    base, parameter, update = (torch.randint(-8, 8, (6,), generator=source).float() for _ in range(3))
    delta, before = base - parameter, base.clone()
    subtract(delta, pieces)
    apply_update(base, parameter, update, pieces)
    assert torch.equal(base, before - update) and torch.equal(parameter, base - delta)
    if pieces == [WHOLE]:
        assert not delta.any()


@given(st.data())
def test_lists_of_all_ranks_come_to_the_same_as_their_update(data: st.DataObject) -> None:
    """To the bit, of tensors that are cut in two parts, too."""
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    end = LAYOUT.slots[-1].end
    cut = data.draw(st.sampled_from([0, 32, end]))
    spans = [span for span in ((0, cut), (cut, end)) if span[0] < span[1]]
    received, sent, updates = [], [], {slot.name: torch.zeros(slot.numel) for slot in LAYOUT.slots}
    for start, stop in spans:
        segment = Segment(
            TENSOR_CLASS, tuple(s for s in LAYOUT.slots if s.offset < stop and s.end > start), (start, stop)
        )
        pairs = []
        for _ in range(3):
            indices = torch.rand(stop - start, generator=source).lt(0.4).nonzero().view(-1).int()
            pairs.append((indices, torch.randn(len(indices), generator=source)))
            flat = torch.zeros(end)
            flat[start:stop].index_add_(0, indices, pairs[-1][1] * (1 / 3))
            for slot in LAYOUT.slots:
                updates[slot.name] += flat[slot.offset : slot.offset + slot.numel]
        received.append((segment, pairs, 1 / 3))
        sent.append((segment, *pairs[1]))
    pieces, lists = pieces_by_name(sent), lists_by_name(received)
    for slot in LAYOUT.slots:
        base, parameter = torch.randn(slot.numel, generator=source), torch.randn(slot.numel, generator=source)
        own_base, own_parameter = base.clone(), parameter.clone()
        assert torch.equal(update_of(lists[slot.name], slot.numel), updates[slot.name])
        apply_update(base, parameter, updates[slot.name], pieces[slot.name])
        apply_lists(own_base, own_parameter, lists[slot.name], pieces[slot.name])
        assert torch.equal(own_base, base) and torch.equal(own_parameter, parameter)
