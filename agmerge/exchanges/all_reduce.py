"""Sums over ranks that are under way: an all-reduce, as the backend adds or in rank order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agmerge.backends import Backend, Handle


@dataclass
class Sum:
    """``message``: 1-D, summed in place. ``bytes``: handed to collectives, all in all."""

    message: torch.Tensor
    received: torch.Tensor | None  # in rank order: this rank's shard of every rank's message
    handle: Handle
    bytes: int
    name: str


def start(comm: Backend, message: torch.Tensor, received: torch.Tensor | None, name: str) -> Sum:
    """Collective. Begin to add ``message`` up over all ranks. With ``received``, of its length, in rank order.

    Their length is then a multiple of ``comm.size``. In rank order the sum of an element does not depend on its place.
    """
    size = message.numel() * message.element_size()
    if received is None:
        return Sum(message, None, comm.all_reduce(message, name), size, name)
    shard = [message.numel() // comm.size] * comm.size
    handle = comm.all_to_all(received, message, shard, shard, name)
    return Sum(message, received, handle, size + size // comm.size, name)


def wait(comm: Backend, under_way: Sum, timeout: float, wide: torch.dtype | None = None) -> None:
    """Collective. Return when the sum is in place. In rank order it is added in ``wide`` and rounded once
    (None: float32 for 16 bits, else the message's own dtype)."""
    under_way.handle.wait(timeout)
    if under_way.received is None:
        return
    mine = in_rank_order(under_way.received.view(comm.size, -1), wide).to(under_way.message.dtype)
    comm.all_gather(under_way.message, mine, f"{under_way.name}/sum").wait(timeout)


def in_rank_order(rows: torch.Tensor, wide: torch.dtype | None = None) -> torch.Tensor:
    """The sum of ``rows``, (W, n), first to last, in ``wide`` (None: float32 for 16 bits, else their own dtype)."""
    narrow = rows.dtype in (torch.float16, torch.bfloat16)
    total = rows[0].to(wide or (torch.float32 if narrow else rows.dtype), copy=True)
    for row in rows[1:]:
        total += row
    return total
