# SPDX-License-Identifier: Apache-2.0
"""Value codecs by name: those that a user may ask for, and for each dtype the one that loses nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from agmerge.exchanges.message.codec import ValueCodec, saturated
from agmerge.exchanges.message.scaled import Signs, Steps


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
# Those that wire="auto" chooses from, most bits first: with these residual and sent values add up to the bit.
CHOICE = ("fp32", "fp16", "int8", "int4")
# By the wire of selections: the codec of dense tensors in the same message, where the quantisation error is kept.
# Dense tensors have small elements, too: fewer bits would lose more of them.
WHOLE = {"fp16": "fp16", "bf16": "bf16", **{codec.name: "int8" for codec in SCALED}}


def value_codec(wire: str, dtype: torch.dtype) -> ValueCodec:
    """Return the codec called ``wire``; "auto": the one of ``dtype``, the gradient's."""
    if wire != "auto":
        return VALUES[wire]
    return next(codec for codec in CASTS if codec.dtype == dtype)
