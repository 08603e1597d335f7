# SPDX-License-Identifier: Apache-2.0
"""Pieces of tensors that were sent, and the combined updates applied to them: functions of flat tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from agmerge.step.sent_values import Received, Sent
from agmerge.tensors.layout import Segment, Slot
from sparsifiers import kernel_updates

Pair = tuple[torch.Tensor, torch.Tensor]  # indices and values


class Piece(NamedTuple):
    """Sent elements among ``start`` to ``stop`` of a tensor, flat in C order."""

    start: int
    stop: int | None  # None: the end
    first: int  # the number of element `start`, as indices count
    # int32 or int64, of the sent elements; one may be repeated with value 0. None: all of them.
    indices: torch.Tensor | None
    values: torch.Tensor | None  # sent values; None: the elements' own


class Lists(NamedTuple):
    """Elements among ``start`` to ``stop`` of a tensor that all ranks have sent, flat in C order."""

    start: int
    stop: int
    first: int  # the number of element `start`, as indices count
    lists: list[Pair]  # of each rank: int32, ascending
    scale: float  # factor of the values


WHOLE = Piece(0, None, 0, None, None)  # all of a tensor


def pieces_by_name(sent: Iterable[Sent]) -> dict[str, list[Piece]]:
    """Return the sent pieces of each tensor, by its name. ``sent``: by segments."""
    pieces: dict[str, list[Piece]] = {}
    for segment, indices, values in sent:
        if indices is None or values is None:
            for slot, start, stop, first in _parts(segment):
                part = None if values is None else values[first : first + stop - start]
                pieces.setdefault(slot.name, []).append(Piece(start, stop, first, None, part))
        else:
            for (slot, start, stop, first), pair in zip(_parts(segment), _cut(segment, indices, values), strict=True):
                pieces.setdefault(slot.name, []).append(Piece(start, stop, first, *pair))
    return pieces


def lists_by_name(received: Iterable[Received]) -> dict[str, list[Lists]]:
    """Return the lists of each tensor, by its name. ``received``: by segments."""
    lists: dict[str, list[Lists]] = {}
    for segment, pairs, scale in received:
        by_rank = [_cut(segment, *pair) for pair in pairs]
        for (slot, start, stop, first), *of_slot in zip(_parts(segment), *by_rank, strict=True):
            lists.setdefault(slot.name, []).append(Lists(start, stop, first, of_slot, scale))
    return lists


def update_of(lists: Sequence[Lists], numel: int) -> torch.Tensor:
    """Return the update of a tensor of ``numel`` elements from its lists, 1-D: added up rank by rank."""
    update = lists[0].lists[0][1].new_zeros(numel)
    for part in lists:
        _add_up(update[part.start : part.stop], part)
    return update


def apply_update(base: torch.Tensor, own: torch.Tensor, update: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """Subtract ``update`` from ``base`` and ``own``, all 1-D, and sent pieces from the delta between the two.

    At sent elements ``own = base - (delta - sent)`` afterwards, with ``delta = base - own`` before.
    """
    unsent = base - own
    subtract(unsent, pieces)
    base.sub_(update)
    own.sub_(update)
    for start, stop, first, indices, _ in pieces:
        shared, moved, left = base[start:stop], own[start:stop], unsent[start:stop]
        if indices is None:
            torch.sub(shared, left, out=moved)
        else:
            places = indices - first
            moved[places] = shared[places].sub_(left[places])


def apply_lists(base: torch.Tensor, own: torch.Tensor, lists: Sequence[Lists], pieces: Sequence[Piece]) -> None:
    """Apply the update of ``lists`` as :func:`apply_update` does, in one pass where that is possible."""
    for part, piece in zip(lists, pieces, strict=True):
        shared, moved = base[part.start : part.stop], own[part.start : part.stop]
        indices, values = piece.indices, piece.values
        if (
            indices is None
            or values is None
            or not kernel_updates.take_in(shared, moved, part.first, part.lists, part.scale, (indices, values))
        ):
            update = _add_up(torch.zeros_like(shared), part)
            apply_update(shared, moved, update, [piece._replace(start=0, stop=None)])


def subtract(delta: torch.Tensor, pieces: Iterable[Piece]) -> None:
    """Subtract the sent pieces from ``delta``, 1-D, in place."""
    for start, stop, first, indices, values in pieces:
        part = delta[start:stop]
        if values is None:
            part.zero_()
        elif indices is None:
            part.sub_(values)
        else:
            part.index_add_(0, indices - first, values, alpha=-1)


def _add_up(update: torch.Tensor, part: Lists) -> torch.Tensor:
    """Add the lists of a slice, rank by rank, to its ``update``, 1-D, and return that."""
    for indices, values in part.lists:
        update.index_add_(0, indices - part.first, values * part.scale)
    return update


def _parts(segment: Segment) -> Iterator[tuple[Slot, int, int, int]]:
    """Yield each tensor in a segment, the start and stop of its elements there, and their offset in the segment."""
    for slot in segment.slots:
        start, stop = segment.inside(slot)
        yield slot, start, stop, slot.offset + start - segment.start


def _cut(segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> list[Pair]:
    """Return the indices and values of each tensor in a segment, without those in the padding between tensors."""
    indices, values = _ascending(indices, values)
    if len(segment.slots) == 1 and segment.numel == segment.length:
        return [(indices, values)]
    edges = [edge for _, start, stop, first in _parts(segment) for edge in (first, first + stop - start)]
    marks = torch.tensor(edges, dtype=indices.dtype, device=indices.device)
    cuts = torch.searchsorted(indices, marks).tolist()
    return [(indices[low:high], values[low:high]) for low, high in zip(cuts[::2], cuts[1::2], strict=True)]


def _ascending(indices: torch.Tensor, values: torch.Tensor) -> Pair:
    """Return the indices, ascending, and their values.

    A padding of zero indices behind them, with value 0, is cut off on the host; on a device it is sorted to the front.
    """
    if indices.device.type == "cpu":
        held = indices.numpy()
        if len(held) > 1 and held[-1] == 0:
            zeros = int((held[::-1] != 0).argmax()) or len(held)  # at the end
            count = len(held) - zeros
            count += bool(values[count] != 0)  # the first zero is element 0 itself, if that was sent last
            indices, values, held = indices[:count], values[:count], held[:count]
        if (held[1:] > held[:-1]).all():
            return indices, values
    indices, order = indices.sort(stable=True)
    return indices, values[order]
