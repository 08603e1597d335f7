# SPDX-License-Identifier: Apache-2.0
"""Value codecs: those of few bits with scales (int8, int4, 2bit and sign), and casts; zeros that take bits.

Of few bits, a float32 scale or two for every 256 values come first, then the codes of all values, the first in the
lowest bits of a byte. Every bit is the same on every processor: operations are elementwise, or add up in an order that
is fixed here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import groupby
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from agmerge.exchanges.message import bits, device_bits
from sparsifiers import native

# The contract. ``encode`` returns the values that receivers will read, so that the residual is exact. Finite values
# stay finite, however large; others arrive as not finite.


class ValueCodec(ABC):
    """Codec of a section's values: bytes of a size that depends on the number of entries alone."""

    name: str  # in figures and errors
    identity: int  # in a message, 1 to 255
    has_zero: ClassVar[bool] = True  # 0 arrives as 0; else exchanges leave out zeros
    dtype: torch.dtype | None = None  # in which each value is a number of its own; None: values are codes

    @abstractmethod
    def size(self, slots: int) -> int:
        """Return the bytes of so many values."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor, count: int | Tensor | None = None) -> Tensor:
        """Write ``values``, of any float dtype, (m,), into ``out``, uint8[size(m)].

        ``count``: entries in use, an int, or 0-dim on the device of ``values``, which is not waited for; None: all.
        Values at and after it are 0, and arrive as 0. Returns the values that receivers will read, (m,), perhaps a view
        of ``out``.
        """

    @abstractmethod
    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``count`` values of ``data``, uint8[size(m)]: (count,), of ``dtype``, perhaps a view."""

    @abstractmethod
    def decode_rows(self, data: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
        """Return all entries of several ranks' sections, uint8[W, size(slots)]: (W, slots), of ``dtype``, not a view.

        Entries that are not in use may have any value.
        """

    def read_rows(self, data: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
        """Return the values of :meth:`decode_rows`, not to be written: in the dtype that travels, perhaps a view."""
        return self.decode_rows(data, slots, dtype)


def saturated(values: Tensor, limit: float) -> Tensor:
    """Return ``values`` clamped to ``limit`` in magnitude, and NaN where they are not finite.

    Where no number of their dtype is beyond it, these are ``values`` themselves.
    """
    if torch.finfo(values.dtype).max <= limit:
        return values
    # Adding 0 times the value changes no bit of finite values, and makes NaN of others.
    return values.clamp(-limit, limit).add_(values, alpha=0.0)


def clear_behind(values: Tensor, count: int | Tensor | None) -> Tensor:
    """Set ``values``, (m,), to +0 in entries at and after ``count``, see :meth:`ValueCodec.encode`; return them."""
    if isinstance(count, Tensor):
        return values.masked_fill_(torch.arange(values.numel(), device=values.device) >= count, 0.0)
    if count is not None and count < values.numel():
        values[count:] = 0.0
    return values


# Codecs of few bits.

WIDTHS = (8, 4, 2, 1)  # bits a value
BLOCK = 256  # values that share a scale
PART = 1024  # blocks that the host writes or reads at once: intermediate results stay in the cache
SCALE = 4  # bytes of a scale
LARGEST = torch.finfo(torch.float32).max
COARSE = -(1 << 8)  # the bits of a float32 that a magnitude may have: 16 significant ones


class Scaled(ValueCodec):
    """Value codec of float32 scales, some for each block, and a fixed number of bits a value."""

    def __init__(self, name: str, identity: int, width: int, scales: int = 1) -> None:
        self.name, self.identity = name, identity
        if width not in WIDTHS:  # packing and compiled loops know no others
            raise ValueError(
                f"{name}: values of {width} bits are not supported. Use {', '.join(map(str, WIDTHS))} bits."
            )
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

    def encode(self, values: Tensor, out: Tensor, count: int | Tensor | None = None) -> Tensor:
        read, used = _room_for(values.numel(), values.dtype, values.device), values.numel() if count is None else count
        if isinstance(used, int) and native.values_encode(values, used, self.width, *self.split(out), read):
            return read.view(-1)[: values.numel()]
        for part, blocks, scales, codes in self._parts(out, values.numel()):
            self._encode(values[part], scales, codes, used - part.start, read[blocks])
        return clear_behind(read.view(-1)[: values.numel()], count)

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        read = _room_for(count, dtype, data.device)
        if native.values_decode(*self.split(data), count, self.width, read):
            return read.view(-1)[:count]
        for part, blocks, scales, codes in self._parts(data, count):
            self._decode(_blocks_of(bits.unpack_bytes(codes, self.width, part.stop - part.start)), scales, read[blocks])
        return read.view(-1)[:count]

    def decode_rows(self, data: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
        ranks, blocks = len(data), -(-slots // BLOCK)
        end = SCALE * self.scales * blocks
        scales = data[:, :end].view(torch.float32).reshape(ranks * blocks, self.scales)
        codes = data[:, end:] if self.width == 8 else device_bits.unpack(data[:, end:], self.width, slots)
        read = _room_for(ranks * blocks * BLOCK, dtype, data.device)
        self._decode(pad(codes, (0, blocks * BLOCK - slots)).reshape(-1, BLOCK), scales, read)
        return read.view(ranks, blocks * BLOCK)[:, :slots]

    def _parts(self, data: Tensor, count: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield the first ``count`` values of ``data`` in groups of blocks; on a device, all at once.

        A group has: a slice of values, one of blocks, and views of their scales and their codes.
        """
        scales, codes = self.split(data)
        step = BLOCK * PART if data.device.type == "cpu" else max(count, 1)
        for start in range(0, count, step):
            stop = min(start + step, count)
            blocks = slice(start // BLOCK, -(-stop // BLOCK))
            where = slice(start * self.width // 8, bits.bytes_of(stop, self.width))
            yield slice(start, stop), blocks, scales[blocks], codes[where]

    @abstractmethod
    def _encode(self, values: Tensor, scales: Tensor, codes: Tensor, used: int | Tensor, read: Tensor) -> None:
        """Write ``scales``, (blocks, scales), ``codes``, and the values that will be ``read``, (blocks, BLOCK).

        ``used``: values in use, counted from the first of these; 0 or less: none.
        """

    @abstractmethod
    def _decode(self, codes: Tensor, scales: Tensor, read: Tensor) -> None:
        """Write the values of ``codes``, uint8[blocks, BLOCK], into ``read``, of that shape. May change ``codes``."""


class Steps(Scaled):
    """Value codec of symmetric integers of 8 or 4 bits: the largest value of a block is 127 or 7 of its steps.

    One value that is not finite makes its block not finite.
    """

    def __init__(self, name: str, identity: int, width: int) -> None:
        super().__init__(name, identity, width)
        self.levels = (1 << (width - 1)) - 1  # the largest magnitude that is used: symmetric

    def _encode(self, values: Tensor, scales: Tensor, codes: Tensor, used: int | Tensor, read: Tensor) -> None:
        rows = _blocks_of(values)
        largest = torch.abs(rows, out=read).amax(dim=1, keepdim=True)
        # By a tensor: torch divides by a Python number on the host, and multiplies by its reciprocal on a GPU.
        levels = torch.full((), self.levels, dtype=largest.dtype, device=largest.device)
        scales.copy_(saturated(largest / levels, LARGEST / (self.levels + 1)))  # levels times it are finite
        factors = scales.to(values.dtype)
        steps = torch.div(rows, factors, out=read).round_().clamp_(-self.levels, self.levels)
        steps.nan_to_num_(nan=0.0)  # 0/0, and values that are not finite; the scale carries that
        code = steps.to(torch.int8).view(torch.uint8).view(-1)[: values.numel()]
        bits.pack(code.bitwise_and_((1 << self.width) - 1), self.width, codes)
        steps.add_(0.0).mul_(factors)  # -0 is no step

    def _decode(self, codes: Tensor, scales: Tensor, read: Tensor) -> None:
        if self.width < 8:
            middle = 1 << (self.width - 1)  # flipping the sign's bit orders the codes from -middle on
            codes = codes.bitwise_xor_(middle).sub_(middle)
        read.copy_(codes.view(torch.int8)).mul_(scales.to(read.dtype))


class Signs(Scaled):
    """Value codec of the sign of each value (0: plus), and the mean magnitude of each block: ``sign``.

    With two magnitudes, ``2bit``, a second bit says which: the mean of the magnitudes above the mean of the block, or
    of the others. A mean has 16 significant bits, and no value of a block is more than 256 times it: a value that is at
    least half of the magnitude sent has an exact difference to it; that of a smaller one is rounded once.

    One value that is not finite makes its block not finite.
    """

    has_zero = False

    def _encode(self, values: Tensor, scales: Tensor, codes: Tensor, used: int | Tensor, read: Tensor) -> None:
        # A block of the largest that are not cut off has a finite sum.
        rows = _blocks_of(saturated(values, LARGEST / BLOCK).to(torch.float32)).abs_()
        filled = _filled(used, len(rows), values.device)
        means = _sum_of_rows(rows) / filled
        code = _blocks_of(_negative(values))
        if self.scales == 2:
            above = torch.gt(rows, means.unsqueeze(1), out=torch.empty_like(rows))  # 1 or 0
            code.add_(above.to(torch.int8).view(torch.uint8), alpha=2)
            higher = above.sum(dim=1)  # exact: an integer up to BLOCK
            both = torch.empty(2, *rows.shape, device=rows.device)  # either 0 or as it is, and the others
            torch.sub(rows, torch.mul(rows, above, out=both[1]), out=both[0])
            means = _sum_of_rows(both.view(-1, BLOCK)).view(2, -1) / torch.stack([filled - higher, higher]).clamp_(1.0)
        scales.copy_(_coarse(means).view(self.scales, -1).t())
        bits.pack(code.view(-1)[: values.numel()], self.width, codes)
        self._decode(code, scales, read)

    def _decode(self, codes: Tensor, scales: Tensor, read: Tensor) -> None:
        # The bits of a magnitude, and the sign before them.
        magnitudes = scales.view(torch.int32)
        words = read.view(torch.int32) if read.dtype == torch.float32 else torch.empty_like(read, dtype=torch.int32)
        words.copy_(codes)
        if self.scales == 2:
            higher = (words >> 1).neg_()  # all bits of it, or none
            higher &= magnitudes[:, :1] ^ magnitudes[:, 1:]
        words <<= 31
        words ^= magnitudes[:, :1]
        if self.scales == 2:
            words ^= higher
        if read.dtype != torch.float32:
            read.copy_(words.view(torch.float32))


def _room_for(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor for ``count`` values, (blocks, BLOCK)."""
    return torch.empty(-(-count // BLOCK), BLOCK, dtype=dtype, device=device)


def _blocks_of(values: Tensor) -> Tensor:
    """Return ``values`` in blocks, (blocks, BLOCK), padded with zeros: a view where no padding is needed."""
    missing = -values.numel() % BLOCK
    return (pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _filled(used: int | Tensor, blocks: int, device: torch.device) -> Tensor | float:
    """Return how many of the first ``used`` values lie in each block, 1 at least: float32[blocks], or one for all."""
    if isinstance(used, int) and used >= blocks * BLOCK:
        return float(BLOCK)
    return (used - torch.arange(0, blocks * BLOCK, BLOCK, device=device)).clamp_(1, BLOCK).to(torch.float32)


def _negative(values: Tensor) -> Tensor:
    """Return 1 where ``values`` are less than 0, else 0: uint8."""
    if values.device.type == "cpu" and values.dtype != torch.bfloat16:
        return torch.from_numpy(np.less(values.numpy(), 0)).view(torch.uint8)  # ten times as fast as torch's
    return (values < 0).to(torch.uint8)


def _sum_of_rows(rows: Tensor) -> Tensor:
    """Return the sums of ``rows``, (blocks, BLOCK): (blocks,). Halves are added elementwise, so the order is fixed."""
    half = BLOCK // 2
    sums = rows[:, :half] + rows[:, half:]
    while half > 1:
        half //= 2
        sums = sums[:, :half].add_(sums[:, half : 2 * half])
    return sums[:, 0]


def _coarse(means: Tensor) -> Tensor:
    """Return ``means``, float32, cut off to 16 significant bits."""
    return (means.view(torch.int32) & COARSE).view(torch.float32)


# Zeros beside other values, which take bits of a quantiser.


class ZeroCount:
    """Count of the coordinates that one step sends in few bits, and of those in mixed blocks.

    Mixed blocks have zeros and other values.
    """

    def __init__(self) -> None:
        self._coordinates = 0
        self._mixed: list[Tensor] = []  # int64, 0-dim: of parts of tensors

    def take(self, values: Tensor | None, numel: int, size: int) -> None:
        """Count ``values``, (numel,), in blocks of so many coordinates; None: all are zero. No device is waited for."""
        self._coordinates += numel
        if values is None:
            return
        whole = numel - numel % size
        for blocks in (values[:whole].view(-1, size), values[whole:].view(1, -1)):
            zeros = (blocks == 0).sum(dim=1)
            self._mixed.append(((zeros > 0) & (zeros < blocks.shape[1])).sum() * blocks.shape[1])

    def counts(self) -> tuple[int, int]:
        """Return the coordinates in mixed blocks, and all of them."""
        runs = groupby(self._mixed, key=lambda part: part.device)
        return sum(int(torch.stack(list(run)).sum()) for _, run in runs), self._coordinates


# Casts, and all codecs by name: those that a user may ask for, and for each dtype the one that loses nothing.


class Cast(ValueCodec):
    """Value codec of one number of a float dtype a value."""

    dtype: torch.dtype

    def __init__(self, name: str, identity: int, dtype: torch.dtype) -> None:
        self.name, self.identity, self.dtype = name, identity, dtype

    def size(self, slots: int) -> int:
        return slots * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor, count: int | Tensor | None = None) -> Tensor:
        return out.view(self.dtype).copy_(saturated(values, torch.finfo(self.dtype).max))

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return data.view(self.dtype)[:count].to(dtype)

    def decode_rows(self, data: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
        return data.view(self.dtype).to(dtype, copy=True)

    def read_rows(self, data: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
        return data.view(self.dtype)


CASTS = (
    Cast("fp32", 1, torch.float32),
    Cast("fp16", 2, torch.float16),
    Cast("bf16", 3, torch.bfloat16),
    Cast("fp64", 4, torch.float64),
)
SCALED = (Steps("int8", 8, 8), Steps("int4", 9, 4), Signs("2bit", 10, 2, scales=2), Signs("sign", 11, 1))
VALUES: dict[str, ValueCodec] = {codec.name: codec for codec in (*CASTS[:3], *SCALED)}  # those that can be asked for
# Those that wire="auto" chooses from, most bits first. With these residual and sent values add up to the bit, and most
# of the selected energy arrives, 0.9999 of it. Of int4 0.96 to 0.997 does, see benchmarks/notebook/parity.md.
CHOICE = ("fp32", "fp16", "int8")
# By the wire of selections: the codec of dense tensors in the same message, where the quantisation error is kept.
# Dense tensors have small elements, too: fewer bits would lose more of them.
WHOLE = {"fp16": "fp16", "bf16": "bf16", **{codec.name: "int8" for codec in SCALED}}


def value_codec(wire: str, dtype: torch.dtype) -> ValueCodec:
    """Return the codec called ``wire``; "auto": the one of ``dtype``, the gradient's."""
    if wire != "auto":
        return VALUES[wire]
    return next(codec for codec in CASTS if codec.dtype == dtype)
