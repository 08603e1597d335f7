# SPDX-License-Identifier: Apache-2.0
"""Convert selections to the form that codecs take, on the host and on devices."""

from __future__ import annotations

import numpy as np
import torch

from agmerge.exchanges.message.indices import in_order
from sparsifiers import Selection


def without_zeros(offer: Selection, values: torch.Tensor) -> tuple[Selection, torch.Tensor]:
    """Return ``offer`` and ``values``, (capacity,), 0 at and after the count, without zeros; later ones move up.

    On a device the count then stays there; on the host, these are the same objects where nothing is 0.
    """
    if values.device.type == "cpu":
        used = values.numpy() != 0  # seven times as fast as torch's
        count = int(np.count_nonzero(used))
        if count == offer.count:
            return offer, values
        chosen = torch.from_numpy(np.flatnonzero(used))
        indices, moved = torch.zeros_like(offer.indices), torch.zeros_like(values)
        torch.index_select(offer.indices, 0, chosen, out=indices[:count])
        torch.index_select(values, 0, chosen, out=moved[:count])
        return Selection(indices, count), moved
    kept = values != 0
    # Zeros fall behind the last entry.
    places = torch.where(kept, kept.cumsum(0) - 1, values.numel())
    indices = offer.indices.new_zeros(values.numel() + 1).scatter_(0, places, offer.indices)
    moved = values.new_zeros(values.numel() + 1).scatter_(0, places, values)
    return Selection(indices[:-1], kept.sum(dtype=torch.int32)), moved[:-1]


def spread(offer: Selection, values: torch.Tensor, length: int) -> tuple[torch.Tensor, int | torch.Tensor]:
    """Return ``values``, (capacity,), at their places among ``length``, 0 at others, and the count to announce.

    The count is ``length``; 0 if the selection is not in order, which receivers report as an error. On a device it
    stays there; on the host, ``values`` are returned themselves where all are selected.
    """
    if offer.indices.device.type != "cpu":
        return spread_on_device(offer, values, length)
    chosen = offer.trimmed()
    good = in_order(offer.indices[: len(chosen)], length)
    if good and len(chosen) == length:
        return values, length
    return values.new_zeros(length).index_copy_(0, chosen, values[: len(chosen)]), good * length


def spread_on_device(offer: Selection, values: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of :func:`spread`, on any device, without waiting for it."""
    slots = torch.arange(offer.indices.numel(), dtype=torch.int32, device=values.device)
    live = slots < offer.count
    places = torch.where(live, offer.indices, length)  # padding falls behind the last one
    good = ((places[1:] > places[:-1]) | ~live[1:]).all()
    return values.new_zeros(length + 1).scatter_(0, places.long(), values)[:-1], good * length
