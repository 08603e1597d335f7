"""Say what was sent of each tensor, and what is left of a way once that is taken off: functions of flat tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from agmerge.step.merge_buffers import Sent


class Piece(NamedTuple):
    """Say what was sent of elements ``start`` to ``stop`` of a tensor, flat in C order."""

    start: int
    stop: int | None  # None: the end
    indices: torch.Tensor | None  # of those that were sent, from `start`, int64, ascending; None: all of them
    values: torch.Tensor | None  # what was sent of each; None: all there was


WHOLE = Piece(0, None, None, None)  # all of a tensor


def pieces_by_name(sent: Iterable[Sent]) -> dict[str, list[Piece]]:
    """Return the pieces of each tensor of which something was sent, by its name. ``sent``: by segments."""
    pieces: dict[str, list[Piece]] = {}
    for segment, indices, values in sent:
        if indices is not None and values is not None:
            indices, values = _in_order(indices, values)
        for slot in segment.slots:
            start, stop = segment.inside(slot)
            first = slot.offset + start - segment.start  # in the segment
            pieces.setdefault(slot.name, []).append(_cut(start, stop, first, indices, values))
    return pieces


def rests_of(base: torch.Tensor, parameter: torch.Tensor, pieces: list[Piece]) -> list[torch.Tensor | None]:
    """Return, for each piece, what is left there of ``base - parameter``, 1-D; None: nothing."""
    rests: list[torch.Tensor | None] = []
    for start, stop, indices, values in pieces:
        end, begin = base[start:stop], parameter[start:stop]
        if values is None:
            rests.append(None)
        elif indices is None:
            rests.append(end.sub(begin).sub_(values))
        else:
            rests.append(end[indices].sub_(begin[indices]).sub_(values))
    return rests


def put(parameter: torch.Tensor, base: torch.Tensor, pieces: list[Piece], rests: list[torch.Tensor | None]) -> None:
    """Write ``parameter = base - rest`` at the elements of the pieces, all 1-D; ``rests``: see :func:`rests_of`."""
    for (start, stop, indices, _), rest in zip(pieces, rests, strict=True):
        end, begin = base[start:stop], parameter[start:stop]
        if rest is None:
            begin.copy_(end)
        elif indices is None:
            torch.sub(end, rest, out=begin)
        else:
            begin[indices] = end[indices].sub_(rest)


def take_off(way: torch.Tensor, pieces: list[Piece]) -> None:
    """Take what was sent off ``way``, 1-D, in place."""
    for start, stop, indices, values in pieces:
        part = way[start:stop]
        if values is None:
            part.zero_()
        elif indices is None:
            part.sub_(values)
        else:
            part[indices] -= values


def _in_order(indices: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices, int64, ascending, and their values, without those of value 0: an index comes once then."""
    kept = values != 0
    indices, values = indices[kept].long(), values[kept]
    if indices.numel() and not bool((indices[1:] > indices[:-1]).all()):
        order = indices.argsort()
        return indices[order], values[order]
    return indices, values


def _cut(start: int, stop: int, first: int, indices: torch.Tensor | None, values: torch.Tensor | None) -> Piece:
    """Return what of a segment's ``indices`` and ``values`` lies in a tensor, whose part begins at ``first`` there."""
    length = stop - start
    if indices is None:
        return Piece(start, stop, None, None if values is None else values[first : first + length])
    assert values is not None
    low, high = torch.searchsorted(indices, torch.tensor([first, first + length], device=indices.device)).tolist()
    return Piece(start, stop, indices[low:high] - first, values[low:high])
