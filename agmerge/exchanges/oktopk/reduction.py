# SPDX-License-Identifier: Apache-2.0
"""Make, add up and check the pairs of indices and values of `oktopk`: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agmerge.errors import MessageError
from agmerge.exchanges.base import SegmentBuffers
from agmerge.exchanges.message.codec import clear_behind
from agmerge.exchanges.message.offers import without_zeros
from agmerge.exchanges.message.pairs import IndexValuePairs, joined
from sparsifiers import Selection


def nonzero(work: torch.Tensor, offer: Selection) -> Selection:
    """Return ``offer`` without the elements of ``work``, 1-D, that are 0; with as many entries."""
    values = clear_behind(work.index_select(0, offer.indices), offer.count)
    return without_zeros(offer, values)[0]


def offered(
    loads: Sequence[SegmentBuffers], offers: Sequence[Selection], starts: Sequence[int], dtype: torch.dtype
) -> IndexValuePairs:
    """Return the selections of all segments as pairs, ascending, in ``dtype``, saturated.

    Indices (int32) count from ``starts[i]`` in segment i. Counts on a device are not read: entries behind
    one get the index ``starts[-1]``, and come last. ValueError if the segments together have 2**31 elements or more.
    """
    if starts[-1] >= 2**31:
        raise ValueError(
            f"exchange='oktopk': a merge buffer of {starts[-1]} elements is too large for int32 indices. Use smaller "
            "merge buffers."
        )
    parts = []
    for load, offer, start in zip(loads, offers, starts, strict=False):
        known = not isinstance(offer.count, torch.Tensor)
        indices = offer.indices[: offer.count] if known else offer.indices
        values = load.work.index_select(0, indices)
        if values.dtype != dtype:
            limit = torch.finfo(dtype).max
            values = values.clamp_(-limit, limit).to(dtype)
        indices = indices + start
        if not known:
            behind = torch.arange(indices.numel(), device=indices.device) >= offer.count
            indices.masked_fill_(behind, starts[-1])
        parts.append(IndexValuePairs(indices, values))
    whole = joined(parts)
    if len(parts) > 1 and any(isinstance(offer.count, torch.Tensor) for offer in offers):
        order = torch.argsort(whole.indices, stable=True)
        whole = IndexValuePairs(whole.indices[order], whole.values[order])
    return whole


def added(pieces: Sequence[IndexValuePairs], dtype: torch.dtype, scale: float) -> IndexValuePairs:
    """Return the sum of ``scale * values`` of all pieces, in their order, in ``dtype``; each index once, ascending."""
    whole = torch.cat([piece.indices for piece in pieces])
    indices, places = torch.unique(whole, return_inverse=True)
    total = torch.zeros(indices.numel(), dtype=dtype, device=indices.device)
    for piece, targets in zip(pieces, torch.split(places, [piece.indices.numel() for piece in pieces]), strict=True):
        total.index_add_(0, targets, piece.values.to(dtype) * scale)
    return IndexValuePairs(indices, total)


def within(some: torch.Tensor, all_: torch.Tensor) -> torch.Tensor:
    """Return which of ``some`` are in ``all_``, both ascending: bool, in the shape of ``some``."""
    if not all_.numel():
        return torch.zeros(some.numel(), dtype=torch.bool, device=some.device)
    if some.device.type == "cpu":  # numpy goes on from the place of the index before: half of torch's time
        places = torch.from_numpy(np.searchsorted(all_.numpy(), some.numpy()))
    else:
        places = torch.searchsorted(all_, some)
    return all_[places.clamp_(max=all_.numel() - 1)] == some


def check_faults(name: str, faults: Sequence[int], cuts: Sequence[int]) -> None:
    """Raise :class:`agmerge.MessageError` if a rank was sent a piece that is damaged.

    ``faults``: by receiver, 1 + the sender of a damaged piece; else 0. ``cuts``: of the regions.
    """
    for rank, fault in enumerate(faults):
        if fault:
            raise MessageError(
                f"AGM501: {name}: the message of rank {fault - 1} to rank {rank} was damaged in transit, or its "
                f"indices are not ascending within {cuts[rank]} to {cuts[rank + 1] - 1}. Check the network and the "
                "memory of its machine. A sparsifier's indices must be ascending and in range."
            )


def check_kept(name: str, kept: Sequence[IndexValuePairs], fault: int) -> None:
    """Raise :class:`agmerge.MessageError` if ranks' results do not ascend from one to the next, or one is damaged.

    ``fault``: 1 + the rank of the damaged one; else 0.
    """
    last = -1
    for rank, parcel in enumerate(kept):
        indices = parcel.indices
        if fault == rank + 1 or (indices.numel() and int(indices[0]) <= last):
            raise MessageError(
                f"AGM501: {name}: the result of rank {rank} is damaged: its checksum is wrong, or its indices are not "
                f"ascending from {last + 1}"
            )
        last = int(indices[-1]) if indices.numel() else last
