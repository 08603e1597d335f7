# SPDX-License-Identifier: Apache-2.0
"""All-reduces: sums over ranks, added as the backend does or in rank order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agmerge.backends import Backend, Handle
from sparsifiers import gpu

NARROW = torch.float16, torch.bfloat16  # dtypes that are added in float32
LARGE = 1 << 18  # elements from which on a segment is not copied: the all-reduce of 1 MB takes longer than one more


@dataclass
class Sum:
    """Sum over all ranks that is under way: its buffers and its first collective."""

    message: torch.Tensor  # 1-D, summed in place
    received: torch.Tensor | None  # in rank order: this rank's shard of every rank's message, one after the other
    handle: Handle  # of the first collective
    bytes: int  # handed to collectives, all in all
    name: str  # of its collectives


def start_sum(comm: Backend, message: torch.Tensor, received: torch.Tensor | None, name: str) -> Sum:
    """Collective. Start the sum of ``message``, 1-D, over all ranks; in rank order with ``received``, of its length.

    Their length is then a multiple of ``comm.size``. In rank order the sum of an element does not depend on its place.
    """
    size = message.numel() * message.element_size()
    if received is None:
        return Sum(message, None, comm.all_reduce(message, name), size, name)
    shard = [message.numel() // comm.size] * comm.size
    handle = comm.all_to_all(received, message, shard, shard, name)
    return Sum(message, received, handle, size + size // comm.size, name)


def wait_for_sum(
    comm: Backend, pending: Sum, timeout: float, wide: torch.dtype | None = None, *, on_stream: bool = False
) -> None:
    """Collective. Wait until the sum is in place; ``on_stream``: make the device's stream wait, and return at once.

    In rank order it is added in ``wide`` and rounded once (None: float32 for 16 bits, else the message's own dtype).
    """

    def wait_for(handle: Handle) -> None:
        if on_stream:
            handle.wait_on_stream(timeout)
        else:
            handle.wait(timeout)

    wait_for(pending.handle)
    if pending.received is None:
        return
    shard = sum_in_rank_order(pending.received.view(comm.size, -1), wide).to(pending.message.dtype)
    wait_for(comm.all_gather(pending.message, shard, f"{pending.name}/sum"))


def write_in_rank_order(out: torch.Tensor, rows: torch.Tensor, factor: float) -> None:
    """Write ``factor`` times the sum of ``rows``, (W, n), added from first to last, to ``out``, (n,)."""
    if rows.dtype == out.dtype == torch.float32 and _is_one_launch(rows, out.dtype):
        gpu.add_whole(out, rows, 1.0, factor=factor)
    else:
        out.copy_(sum_in_rank_order(rows).mul_(factor))


def _is_one_launch(rows: torch.Tensor, wide: torch.dtype) -> bool:
    """Return whether a kernel adds ``rows`` in ``wide``."""
    return gpu.is_fused(rows.device) and wide == torch.float32 and rows.dtype in (*NARROW, wide)


def sum_in_rank_order(rows: torch.Tensor, wide: torch.dtype | None = None) -> torch.Tensor:
    """Return the sum of ``rows``, (W, n), each contiguous, added from first to last: (n,).

    ``wide``: the dtype to add in; None: float32 for 16 bits, else their own. On a device with kernels float32 and 16
    bits are one launch.
    """
    wide = wide or (torch.float32 if rows.dtype in NARROW else rows.dtype)
    if _is_one_launch(rows, wide):
        total = torch.empty(rows.shape[1], dtype=wide, device=rows.device)
        gpu.add_whole(total, rows, 1.0)
        return total
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total += row
    return total
