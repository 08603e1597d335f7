"""Write a few bits a value, and a float32 scale or two for every 256 of them: int8, int4, 2bit and sign.

The scales of all blocks come first, then the codes of all values, the first in the lowest bits of a byte. Every bit
is the same whatever instructions a processor has: all is elementwise, or added up in an order that is written here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agmerge.exchanges.message import bits
from agmerge.exchanges.message.codec import ValueCodec, clear_behind, saturated

BLOCK = 256  # values that share a scale
SCALE = 4  # bytes of a scale
LARGEST = torch.finfo(torch.float32).max
COARSE = -(1 << 8)  # the bits of a float32 that a magnitude may have: 16 significant ones


class Scaled(ValueCodec):
    """Lay out so many scales a block, then so many bits a value."""

    def __init__(self, name: str, identity: int, width: int, scales: int = 1) -> None:
        self.name, self.identity = name, identity
        self.width = width  # bits a value
        self.scales = scales  # of a block
        self.block_bytes = SCALE * scales + BLOCK * width // 8  # of a full block

    def size(self, slots: int) -> int:
        return SCALE * self.scales * -(-slots // BLOCK) + bits.bytes_of(slots, self.width)

    def split(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales, float32[blocks, scales], and the codes, uint8, of a section's ``data``: views."""
        blocks = -(-data.numel() // self.block_bytes)
        end = SCALE * self.scales * blocks
        return data[:end].view(torch.float32).view(blocks, self.scales), data[end:]


class Steps(Scaled):
    """Write symmetric integers of 8 or 4 bits: the largest value of a block is 127 or 7 of its steps.

    One value that is not finite makes its block so.
    """

    def __init__(self, name: str, identity: int, width: int) -> None:
        super().__init__(name, identity, width)
        self.levels = (1 << (width - 1)) - 1  # the largest magnitude that is used: symmetric

    def encode(self, values: Tensor, out: Tensor, count: int | Tensor | None = None) -> Tensor:
        scales, codes = self.split(out)
        rows = _blocks_of(values)
        largest = rows.abs().amax(dim=1, keepdim=True) if len(rows) else rows.new_empty(0, 1)
        scales.copy_(saturated(largest / self.levels, LARGEST / (self.levels + 1)))  # so many steps are finite
        steps = rows.div_(scales.to(values.dtype)).round_()
        # 0/0, and what is not finite; the scale carries that.
        steps = steps.clamp_(-self.levels, self.levels).nan_to_num_(nan=0.0).view(-1)[: values.numel()].to(torch.int8)
        if self.width == 8:
            codes.view(torch.int8).copy_(steps)
        else:
            bits.pack(steps, self.width, codes)
        return _times(steps.to(values.dtype), scales)

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        scales, codes = self.split(data)
        if self.width == 8:
            steps = codes[:count].view(torch.int8)
        else:
            middle = 1 << (self.width - 1)  # flipping the sign's bit orders the codes from -middle on
            steps = (bits.unpack(codes, self.width, count) ^ middle).sub_(middle)
        return _times(steps.to(dtype), scales)


class Signs(Scaled):
    """Write the sign of each value (0: plus), and the mean magnitude of each block: ``sign``.

    With two magnitudes, ``2bit``, a second bit says which: the mean of the magnitudes above the mean of the block, or
    of the others. A mean has 16 significant bits, and no value of a block is more than 256 times it: a value that is at
    least half of what is sent for it leaves exactly the difference; of a smaller one the difference is rounded once.

    One value that is not finite makes its block so.
    """

    has_zero = False

    def encode(self, values: Tensor, out: Tensor, count: int | Tensor | None = None) -> Tensor:
        scales, codes = self.split(out)
        slots = values.numel()
        # A block of the largest that are not cut off has a finite sum.
        rows = _blocks_of(saturated(values, LARGEST / BLOCK).to(torch.float32)).abs_()
        first = torch.arange(0, len(rows) * BLOCK, BLOCK, device=values.device)
        used = ((slots if count is None else count) - first).clamp_(0, BLOCK).to(torch.float32)
        sums = _sum_of_rows(rows)
        means = sums / used.clamp(min=1.0)
        code = (values < 0).to(torch.uint8)
        if self.scales == 1:
            scales[:, 0] = _coarse(means)
        else:
            above = rows > means.unsqueeze(1)
            higher = above.sum(dim=1, dtype=torch.int32)
            upper = rows * above  # either 0 or as it is, and so is what is left of `rows`
            scales[:, 0] = _coarse(_sum_of_rows(rows.sub_(upper)) / (used - higher).clamp_(min=1.0))
            scales[:, 1] = _coarse(_sum_of_rows(upper) / higher.clamp_(min=1))
            code += 2 * above.view(-1)[:slots].to(torch.uint8)
        bits.pack(code, self.width, codes)
        return clear_behind(_looked_up(code.to(torch.int32), scales, values.dtype), count)

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        scales, codes = self.split(data)
        return _looked_up(bits.unpack(codes, self.width, count), scales, dtype)


def _blocks_of(values: Tensor) -> Tensor:
    """Return a copy of ``values`` in blocks, (blocks, BLOCK), with zeros behind them."""
    blocks = -(-values.numel() // BLOCK)
    rows = torch.zeros(blocks * BLOCK, dtype=values.dtype, device=values.device)
    rows[: values.numel()] = values
    return rows.view(blocks, BLOCK)


def _times(steps: Tensor, scales: Tensor) -> Tensor:
    """Multiply ``steps``, (count,), by the scale of their block, (blocks, 1), in place; return them."""
    whole = len(steps) // BLOCK
    steps[: whole * BLOCK].view(whole, BLOCK).mul_(scales[:whole].to(steps.dtype))
    if len(steps) > whole * BLOCK:
        steps[whole * BLOCK :].mul_(scales[whole].to(steps.dtype))
    return steps


def _looked_up(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what ``codes``, int32[count], stand for, of ``dtype``. They are changed. ``scales``: (blocks, 1 or 2)."""
    count = len(codes)
    scales = scales[: -(-count // BLOCK)]
    # Of each block: [+low, -low] or [+low, -low, +high, -high].
    table = torch.stack([scales, -scales], dim=2).to(dtype).view(-1)
    starts = torch.arange(0, len(table), 2 * scales.shape[1], dtype=torch.int32, device=codes.device)
    codes.add_(starts.view(-1, 1).expand(-1, BLOCK).reshape(-1)[:count])
    return table.index_select(0, codes)


def _sum_of_rows(rows: Tensor) -> Tensor:
    """Return the sums of ``rows``, (blocks, BLOCK): (blocks,). Halves are added elementwise, so the order is fixed."""
    half = BLOCK
    while half > 1:
        half //= 2
        rows = rows[:, :half] + rows[:, half:]
    return rows.squeeze(1)


def _coarse(means: Tensor) -> Tensor:
    """Return ``means``, float32, cut off to 16 significant bits."""
    return (means.view(torch.int32) & COARSE).view(torch.float32)
