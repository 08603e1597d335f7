# SPDX-License-Identifier: Apache-2.0
"""Operations of ``bits`` on a device: the same bytes as on the host, in few launches, without a wait.

Messages of several ranks may be read at once: what is read has a row of bytes for each, (W, bytes).
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(values: Tensor, width: int, out: Tensor) -> None:
    """Write the low ``width`` bits (1, 2 or 4) of ``values``, int32[m] or uint8[m], into ``out``, uint8; padding is 0.

    Values of uint8 have no other bits.
    """
    each = 8 // width
    spread = values
    if values.dtype != torch.uint8 or values.numel() != out.numel() * each:
        spread = torch.zeros(out.numel() * each, dtype=torch.uint8, device=out.device)
        spread[: values.numel()].copy_(values)
        if values.dtype != torch.uint8:
            spread &= (1 << width) - 1
    # No two integers of a byte have a bit in common, so that their sum is all of them side by side.
    torch.sum(spread.view(-1, each) << _places(width, out.device), -1, dtype=torch.uint8, out=out)


def unpack(rows: Tensor, width: int, count: int) -> Tensor:
    """Return the first ``count`` integers of ``width`` bits (1, 2 or 4) of each row, uint8[..., bytes]: uint8."""
    held = rows[..., : -(-count * width // 8)].unsqueeze(-1) >> _places(width, rows.device)
    return held.bitwise_and_((1 << width) - 1).flatten(-2)[..., :count]


def integers(rows: Tensor, width: int, count: int) -> Tensor:
    """Return the first ``count`` integers of ``width`` bits (1 to 16) of each row, uint8[W, bytes]: int32[W, count]."""
    if width == 16:
        return rows.view(torch.int16)[:, :count].to(torch.int32).bitwise_and_(0xFFFF)
    return (rows[:, :count] if width == 8 else unpack(rows, width, count)).to(torch.int32)


def mark(places: Tensor, out: Tensor) -> None:
    """Set the bits ``places``, unique int32, of ``out``, uint8, and no others; one at ``8 * len(out)`` is dropped."""
    marks = torch.zeros(8 * out.numel() + 1, dtype=torch.uint8, device=out.device)
    marks.scatter_(0, places.long(), 1)
    pack(marks[:-1], 1, out)


def marked(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the bits of each row, uint8[W, bytes], that are set.

    Returns the places of the first ``count`` of them, int32[W, count], ascending (the number of bits in a row for those
    that are missing), and how many are set, int32[W].
    """
    rank = unpack(rows, 1, 8 * rows.shape[1]).cumsum(1, dtype=torch.int32)
    wanted = torch.arange(1, count + 1, dtype=torch.int32, device=rows.device).repeat(len(rows), 1)
    # The j-th bit that is set is the first one at which j are.
    places = torch.searchsorted(rank, wanted, out_int32=True)
    return places, rank[:, -1] if rank.shape[1] else rank.new_zeros(len(rows))


def _places(width: int, device: torch.device) -> Tensor:
    """Return where in a byte each of its integers begins: uint8[8 / width]."""
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)
