"""Say what a value codec is, and share what all of them need.

``encode`` returns what receivers will read, so that the residual keeps exactly what was not sent. Whatever is finite
stays finite, however large; what is not finite arrives as not finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class ValueCodec(ABC):
    """Write the values of a section, so many bytes for so many slots."""

    name: str  # in figures and errors
    identity: int  # in a message, 1 to 255
    has_zero: ClassVar[bool] = True  # 0 arrives as 0; else exchanges leave out what is 0

    @abstractmethod
    def size(self, slots: int) -> int:
        """Return the bytes of so many values."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor, count: int | Tensor | None = None) -> Tensor:
        """Write ``values``, of any float dtype, (m,), into ``out``, uint8[size(m)].

        ``count``: slots in use, an int, or 0-dim on the device of ``values``, which is not waited for; None: all.
        Values at and after it are 0, and arrive as 0. Returns what receivers will read, (m,); it may be a view of
        ``out``.
        """

    @abstractmethod
    def decode(self, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``count`` values of ``data``, uint8[size(m)]: (count,), of ``dtype``, perhaps a view."""

    @abstractmethod
    def decode_rows(self, data: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
        """Return the values in all slots of what several ranks sent, uint8[W, size(slots)]: (W, slots), not a view.

        Slots that are not in use may have any value.
        """

    def read_rows(self, data: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
        """Return what :meth:`decode_rows` does to be read alone: in the dtype in which it travels, perhaps a view."""
        return self.decode_rows(data, slots, dtype)


def saturated(values: Tensor, limit: float) -> Tensor:
    """Return ``values`` with what is finite and beyond ``limit`` in magnitude at it, and what is not finite as NaN.

    Where no number of their dtype is beyond it, these are ``values`` themselves.
    """
    if torch.finfo(values.dtype).max <= limit:
        return values
    # Adding 0 times the value changes no bit of what is finite, and makes NaN of what is not.
    return values.clamp(-limit, limit).add_(values, alpha=0.0)


def clear_behind(values: Tensor, count: int | Tensor | None) -> Tensor:
    """Set ``values``, (m,), to +0 in slots at and after ``count``, see :meth:`ValueCodec.encode`; return them."""
    if isinstance(count, Tensor):
        return values.masked_fill_(torch.arange(values.numel(), device=values.device) >= count, 0.0)
    if count is not None and count < values.numel():
        values[count:] = 0.0
    return values
