"""Say what was sent of each tensor, and what is left of a way once that is taken off: functions of flat tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch

from agmerge.step.merge_buffers import Sent
from sparsifiers import kernel


class Piece(NamedTuple):
    """Say what was sent of elements ``start`` to ``stop`` of a tensor, flat in C order."""

    start: int
    stop: int | None  # None: the end
    # int32 or int64, from `start`, those that were sent; one may come again with value 0. None: all of them.
    indices: torch.Tensor | None
    values: torch.Tensor | None  # what was sent of each; None: all there was


WHOLE = Piece(0, None, None, None)  # all of a tensor


def pieces_by_name(sent: Iterable[Sent]) -> dict[str, list[Piece]]:
    """Return the pieces of each tensor of which something was sent, by its name. ``sent``: by segments."""
    pieces: dict[str, list[Piece]] = {}
    for segment, indices, values in sent:
        starts = [slot.offset + segment.inside(slot)[0] - segment.start for slot in segment.slots]  # in the segment
        if indices is None:
            bounds = [(first, first + slot.numel) for first, slot in zip(starts, segment.slots, strict=True)]
        else:
            assert values is not None
            indices, values = _ascending(indices, values)
            edges = torch.tensor(starts[1:], dtype=indices.dtype, device=indices.device)
            cuts = [0, *torch.searchsorted(indices, edges).tolist(), len(indices)]
            bounds = list(pairwise(cuts))
        for slot, first, (low, high) in zip(segment.slots, starts, bounds, strict=True):
            start, stop = segment.inside(slot)
            part = None if indices is None else indices[low:high] - first
            chosen = None if values is None else values[low : high if part is not None else low + stop - start]
            pieces.setdefault(slot.name, []).append(Piece(start, stop, part, chosen))
    return pieces


def take_in(base: torch.Tensor, parameter: torch.Tensor, update: torch.Tensor, pieces: list[Piece]) -> None:
    """Take ``update`` off ``base`` and ``parameter``, all 1-D; what was sent of the latter is no longer on its way.

    Where something was sent, ``parameter = base - rest``, with what is left of ``base - parameter`` as it was before.
    """
    if len(pieces) == 1:
        start, stop, indices, values = pieces[0]
        if (start, stop) == (0, base.numel()) and kernel.take_in(base, parameter, update, indices, values):
            return
    rest = base - parameter
    take_off(rest, pieces)
    base.sub_(update)
    parameter.sub_(update)
    for start, stop, indices, _ in pieces:
        end, begin, left = base[start:stop], parameter[start:stop], rest[start:stop]
        if indices is None:
            torch.sub(end, left, out=begin)
        else:
            begin[indices] = end[indices].sub_(left[indices])


def take_off(way: torch.Tensor, pieces: list[Piece]) -> None:
    """Take what was sent off ``way``, 1-D, in place."""
    for start, stop, indices, values in pieces:
        part = way[start:stop]
        if values is None:
            part.zero_()
        elif indices is None:
            part.sub_(values)
        else:
            part.index_add_(0, indices, values, alpha=-1)


def _ascending(indices: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices, ascending, and their values.

    A padding of zeros behind them, with value 0, is cut off on the host; on a device it comes first.
    """
    if indices.device.type == "cpu":
        held = indices.numpy()
        if len(held) > 1 and held[-1] == 0:
            count = 1 + int((held[1:] == 0).argmax())
            indices, values, held = indices[:count], values[:count], held[:count]
        if (held[1:] > held[:-1]).all():
            return indices, values
    indices, order = indices.sort(stable=True)
    return indices, values[order]
