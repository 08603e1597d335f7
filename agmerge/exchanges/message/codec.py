# SPDX-License-Identifier: Apache-2.0
"""Contract of value codecs, and helpers that all of them need.

``encode`` returns the values that receivers will read, so that the residual is exact. Finite values stay finite,
however large; others arrive as not finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


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
