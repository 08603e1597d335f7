"""What `oktopk` does with pairs of indices and values: pure functions, and checks of what arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmerge.errors import MessageError
from agmerge.exchanges.base import Load
from agmerge.exchanges.parcels import Parcel, joined
from sparsifiers import Selection


def offered(loads: Sequence[Load], offers: Sequence[Selection], starts: Sequence[int]) -> Parcel:
    """What is selected from all segments, ascending, in the gradient's dtype, saturated.

    Indices (int32) count from ``starts[i]`` in segment i. Counts on a device are not looked at: what stands behind
    one gets the index ``starts[-1]``, and comes last. ValueError if the segments together have 2**31 elements or more.
    """
    if starts[-1] >= 2**31:
        raise ValueError(f"oktopk: a merge buffer of {starts[-1]} elements has no int32 indices; plan smaller ones")
    parts = []
    for load, offer, start in zip(loads, offers, starts, strict=False):
        known = not isinstance(offer.count, torch.Tensor)
        indices = offer.indices[: offer.count] if known else offer.indices
        values = load.work.index_select(0, indices)
        if values.dtype != load.segment.lane.dtype:
            limit = torch.finfo(load.segment.lane.dtype).max
            values = values.clamp_(-limit, limit).to(load.segment.lane.dtype)
        indices = indices + start
        if not known:
            behind = torch.arange(indices.numel(), device=indices.device) >= offer.count
            indices.masked_fill_(behind, starts[-1])
        parts.append(Parcel(indices, values))
    whole = joined(parts)
    if len(parts) > 1 and any(isinstance(offer.count, torch.Tensor) for offer in offers):
        order = torch.argsort(whole.indices, stable=True)
        whole = Parcel(whole.indices[order], whole.values[order])
    return whole


def added(pieces: Sequence[Parcel], dtype: torch.dtype, scale: float) -> Parcel:
    """The sum of ``scale * values`` of all pieces, in their order, in ``dtype``; every index once, ascending."""
    whole = torch.cat([piece.indices for piece in pieces])
    indices, places = torch.unique(whole, return_inverse=True)
    total = torch.zeros(indices.numel(), dtype=dtype, device=indices.device)
    for piece, here in zip(pieces, torch.split(places, [piece.indices.numel() for piece in pieces]), strict=True):
        total.index_add_(0, here, piece.values.to(dtype, copy=True).mul_(scale))
    return Parcel(indices, total)


def within(some: torch.Tensor, all_: torch.Tensor) -> torch.Tensor:
    """bool: which of ``some`` are in ``all_``; both ascending."""
    if not all_.numel():
        return torch.zeros(some.numel(), dtype=torch.bool, device=some.device)
    places = torch.searchsorted(all_, some).clamp_(max=all_.numel() - 1)
    return all_[places] == some


def first_outside(pieces: Sequence[Parcel], start: int, stop: int) -> int:
    """1 + the first rank whose piece has an index outside ``start`` to ``stop - 1``; 0 if none has."""
    outside = torch.cat([(piece.indices < start) | (piece.indices >= stop) for piece in pieces])
    if not bool(outside.any()):
        return 0
    parts = torch.split(outside, [piece.indices.numel() for piece in pieces])
    return 1 + next(rank for rank, part in enumerate(parts) if bool(part.any()))


def check_faults(name: str, faults: Sequence[int], cuts: Sequence[int]) -> None:
    """Raise :class:`agmerge.MessageError` if a rank was sent what is not of its region; see `first_outside`."""
    for rank, fault in enumerate(faults):
        if fault:
            raise MessageError(
                f"{name}: rank {fault - 1} sent indices to rank {rank} that are outside {cuts[rank]} to "
                f"{cuts[rank + 1] - 1}; what a sparsifier selects must be ascending and in range"
            )


def check_ascending(name: str, kept: Sequence[Parcel], length: int) -> None:
    """Raise :class:`agmerge.MessageError` if what ranks hand round does not ascend, one after another."""
    last = -1
    for rank, parcel in enumerate(kept):
        indices = parcel.indices
        if not indices.numel():
            continue
        if int(indices[0]) <= last or int(indices[-1]) >= length or bool((indices[1:] <= indices[:-1]).any()):
            raise MessageError(
                f"{name}: the result that rank {rank} handed round is damaged: its indices do not ascend within "
                f"{last + 1} to {length - 1}"
            )
        last = int(indices[-1])
