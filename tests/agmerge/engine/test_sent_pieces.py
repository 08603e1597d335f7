"""What was sent of a segment, cut into pieces of tensors, and what is left of a way without it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agmerge.engine.sent_pieces import WHOLE, Piece, pieces_by_name, put, rests_of, take_off
from agmerge.tensors.layout import Lane, Layout, Segment, Slot
from sparsifiers import Kind

LANE = Lane(torch.device("cpu"), torch.float32, Kind.SPARSE, None)
LAYOUT = Layout([("a", (8, 6), LANE), ("b", (7,), LANE), ("c", (2, 5), LANE)])
NAMES = {slot.name: slot for slot in LAYOUT.slots}


def whole() -> Segment:
    """Return the segment of all tensors."""
    return Segment(LANE, tuple(LAYOUT.slots))


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
            part[piece.indices] = piece.values
    return flat


@given(st.data())
def test_pieces_are_what_was_sent_of_each_tensor(data: st.DataObject) -> None:
    """In any order, with padding that comes again with 0, which has no place in a piece."""
    segment = whole()
    places = [slot.offset - segment.start + i for slot in LAYOUT.slots for i in range(slot.numel)]
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True))
    values = torch.tensor([float(i + 1) for i in range(len(chosen))] + [0.0, 0.0])
    indices = torch.tensor([*chosen, 0, 0], dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    order = torch.tensor(data.draw(st.permutations(range(len(indices)))))
    pieces = pieces_by_name([(segment, indices[order], values[order])])
    for slot in LAYOUT.slots:
        expected = torch.zeros(segment.length)
        expected[indices[:-2].long()] = values[:-2]
        start = slot.offset - segment.start
        assert all(piece.indices.dtype == torch.int64 for piece in pieces[slot.name])
        assert all((piece.indices.diff() > 0).all() for piece in pieces[slot.name])
        assert torch.equal(filled(slot, pieces[slot.name]), expected[start : start + slot.numel])


def test_a_segment_that_was_sent_as_it_is_is_whole_pieces() -> None:
    pieces = pieces_by_name([(whole(), None, None)])
    assert pieces == {name: [Piece(0, slot.numel, None, None)] for name, slot in NAMES.items()}


def test_a_segment_that_was_sent_whole_and_rounded_has_all_its_values() -> None:
    values = torch.arange(float(whole().length))
    pieces = pieces_by_name([(whole(), None, values)])
    for name, slot in NAMES.items():
        ((start, stop, indices, sent),) = pieces[name]
        first = slot.offset - whole().start
        assert (start, stop, indices) == (0, slot.numel, None) and torch.equal(sent, values[first : first + slot.numel])


def test_parts_of_a_tensor_are_pieces_of_it() -> None:
    """The parts of a merge buffer end in the middle of a tensor."""
    first = Segment(LANE, tuple(LAYOUT.slots[:1]), (0, 32))
    second = Segment(LANE, tuple(LAYOUT.slots), (32, LAYOUT.slots[-1].end))
    parts = [(first, torch.tensor([1, 31]), torch.tensor([1.0, 2.0])), (second, torch.tensor([0, 15]), torch.ones(2))]
    pieces = pieces_by_name(parts)["a"]
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 32), (32, 48)]
    assert filled(NAMES["a"], pieces).nonzero().view(-1).tolist() == [1, 31, 32, 47]


PIECES = {
    "whole": [WHOLE],
    "all, rounded": [Piece(0, 6, None, torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 0.25]))],
    "some": [Piece(0, 6, torch.tensor([1, 4]), torch.tensor([0.5, -1.0]))],
    "none": [Piece(0, 6, torch.tensor([], dtype=torch.int64), torch.tensor([]))],
    "two parts": [Piece(0, 3, torch.tensor([2]), torch.tensor([1.0])), Piece(3, 6, None, None)],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_a_parameter_moves_with_the_base_but_for_what_was_sent(pieces: list[Piece]) -> None:
    """``rests_of`` and ``put`` around a move of the base are what ``take_off`` says of the way."""
    source = torch.Generator().manual_seed(3)
    base, parameter, update = (torch.randint(-8, 8, (6,), generator=source).float() for _ in range(3))
    way = base - parameter
    take_off(way, pieces)
    rests = rests_of(base, parameter, pieces)
    base -= update
    parameter -= update
    put(parameter, base, pieces, rests)
    assert torch.equal(parameter, base - way)
    if pieces == [WHOLE]:
        assert rests == [None] and not way.any()
