"""Pairs of indices and values as bytes: ``indices int32[count] | values[count]``, each padded to eight bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Parcel:
    """``indices`` int32[count] and ``values`` [count]; views, where the parcel is part of a message."""

    indices: torch.Tensor
    values: torch.Tensor

    def first(self, count: int) -> Parcel:
        """The first ``count`` pairs."""
        return Parcel(self.indices[:count], self.values[:count])

    def where(self, mask: torch.Tensor) -> Parcel:
        """The pairs where ``mask`` (bool[count]) is set."""
        return Parcel(self.indices[mask], self.values[mask])

    def split(self, counts: Sequence[int]) -> list[Parcel]:
        """Parcels of ``counts`` pairs, one after the other."""
        parts = zip(torch.split(self.indices, list(counts)), torch.split(self.values, list(counts)), strict=True)
        return [Parcel(indices, values) for indices, values in parts]

    def copy_(self, other: Parcel) -> None:
        """Overwrite what the parcel holds."""
        self.indices.copy_(other.indices)
        self.values.copy_(other.values)


def joined(parcels: Sequence[Parcel]) -> Parcel:
    """The pairs of all parcels, in order: a copy."""
    return Parcel(torch.cat([one.indices for one in parcels]), torch.cat([one.values for one in parcels]))


def size(count: int, dtype: torch.dtype) -> int:
    """The bytes of a parcel."""
    return _padded(4 * count) + _padded(dtype.itemsize * count)


def views(message: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> list[Parcel]:
    """Parcels of ``counts`` pairs, one after the other in ``message``, uint8."""
    found, start = [], 0
    for count in counts:
        middle = start + _padded(4 * count)
        indices = message[start : start + 4 * count].view(torch.int32)
        found.append(Parcel(indices, message[middle : middle + dtype.itemsize * count].view(dtype)))
        start += size(count, dtype)
    return found


def _padded(length: int) -> int:
    return -(-length // 8) * 8
