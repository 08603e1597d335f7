"""Write the selected values, and say what of them arrives: value codecs.

``encode`` returns what receivers will read, so that the residual keeps exactly what was not sent. Whatever is finite
stays finite, however large; what is not finite arrives as not finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale
LEVELS = 127  # the largest magnitude of int8 that is used: symmetric
LARGEST = torch.finfo(torch.float32).max / 128  # of a scale: 127 of them are finite


class ValueCodec(ABC):
    """Write the values of a section, so many bytes for so many slots."""

    name: str  # in figures and errors
    identity: int  # in a message, 1 to 255

    @abstractmethod
    def size(self, slots: int) -> int:
        """Return the bytes of so many values."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> Tensor:
        """Write ``values``, of any float dtype, (m,), into ``out``, uint8[size(m)].

        Returns what receivers will read of them, (m,); it may be a view of ``out``.
        """

    @abstractmethod
    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``count`` values of ``data``, uint8[size(m)]: (count,), of ``dtype``, not a view."""


class Cast(ValueCodec):
    """Write one number of a float dtype a value."""

    def __init__(self, name: str, identity: int, dtype: torch.dtype) -> None:
        self.name, self.identity, self.dtype = name, identity, dtype

    def size(self, slots: int) -> int:
        return slots * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor) -> Tensor:
        return out.view(self.dtype).copy_(saturated(values, torch.finfo(self.dtype).max))

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return data.view(self.dtype)[:count].to(dtype, copy=True)


class Int8(ValueCodec):
    """Write symmetric int8 with a float32 scale for every 256 values: the largest of them is 127 steps.

    One value that is not finite makes its block so.
    """

    name, identity = "int8", 8

    def size(self, slots: int) -> int:
        return 4 * -(-slots // BLOCK) + slots

    def encode(self, values: Tensor, out: Tensor) -> Tensor:
        count = values.numel()
        blocks = -(-count // BLOCK)
        rows = torch.zeros(blocks * BLOCK, dtype=values.dtype, device=values.device)
        rows[:count] = values
        rows = rows.view(blocks, BLOCK)
        largest = rows.abs().amax(dim=1) if blocks else rows.new_empty(0)
        scales = saturated(largest / LEVELS, LARGEST).to(torch.float32)
        steps = rows.div_(scales.to(values.dtype).unsqueeze(1)).round_()
        # 0/0, and what is not finite; the scale carries that.
        steps = steps.clamp_(-LEVELS, LEVELS).nan_to_num_(nan=0.0)
        out[: 4 * blocks].view(torch.float32).copy_(scales)
        out[4 * blocks :].view(torch.int8).copy_(steps.view(-1)[:count])
        return self.decode(out, count, values.dtype)

    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        slots = _slots(data.numel())
        blocks, held = -(-slots // BLOCK), -(-count // BLOCK)
        scales = data[: 4 * held].view(torch.float32).to(dtype)
        steps = data[4 * blocks : 4 * blocks + count].view(torch.int8).to(dtype)
        whole = count // BLOCK
        steps[: whole * BLOCK].view(whole, BLOCK).mul_(scales[:whole].unsqueeze(1))
        if held > whole:
            steps[whole * BLOCK :].mul_(scales[whole])
        return steps


def saturated(values: Tensor, limit: float) -> Tensor:
    """Return ``values`` with what is finite and beyond ``limit`` in magnitude at it, and what is not finite as NaN.

    Where no number of their dtype is beyond it, these are ``values`` themselves.
    """
    if torch.finfo(values.dtype).max <= limit:
        return values
    # Adding 0 times the value changes no bit of what is finite, and makes NaN of what is not.
    return torch.add(values.clamp(-limit, limit), values, alpha=0.0)


def _slots(size: int) -> int:
    """Return how many values so many bytes of int8 hold: ``size`` is that of some number of them."""
    return size - 4 * -(-size // (BLOCK + 4))


CASTS = (
    Cast("fp32", 1, torch.float32),
    Cast("fp16", 2, torch.float16),
    Cast("bf16", 3, torch.bfloat16),
    Cast("fp64", 4, torch.float64),
)
VALUES: dict[str, ValueCodec] = {codec.name: codec for codec in (*CASTS[:3], Int8())}  # those that can be asked for


def value_codec(wire: str, dtype: torch.dtype) -> ValueCodec:
    """Return the codec called ``wire``; "auto": the one of ``dtype``, the gradient's."""
    if wire != "auto":
        return VALUES[wire]
    return next(codec for codec in CASTS if codec.dtype == dtype)
