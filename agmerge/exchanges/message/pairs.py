"""Write pairs of indices and values as bytes: ``checksum | indices | values``.

Both ends know the range of the indices and their number. Indices stand in the smallest codec for so many of that range,
and count from its start. Values keep their dtype: which of them are kept, and so taken off a residual, is decided after
they have been added up, and what a lossy codec rounds off then would be in nobody's residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agmerge.exchanges.message import IndexCodec, Int32, bits, smallest
from agmerge.exchanges.message.indices import in_order
from agmerge.tensors.layout import aligned


@dataclass(frozen=True)
class IndexValuePairs:
    """Hold indices and the values there."""

    indices: torch.Tensor  # int32[count]
    values: torch.Tensor  # (count,), of any float dtype

    def first(self, count: int) -> IndexValuePairs:
        """Return the first ``count`` pairs: views."""
        return IndexValuePairs(self.indices[:count], self.values[:count])

    def where(self, mask: torch.Tensor) -> IndexValuePairs:
        """Return the pairs where ``mask`` (bool[count]) is set: a copy."""
        return IndexValuePairs(self.indices[mask], self.values[mask])

    def split(self, counts: Sequence[int]) -> list[IndexValuePairs]:
        """Cut into parcels of ``counts`` pairs, one after the other: views."""
        parts = zip(torch.split(self.indices, list(counts)), torch.split(self.values, list(counts)), strict=True)
        return [IndexValuePairs(indices, values) for indices, values in parts]


def joined(parcels: Sequence[IndexValuePairs]) -> IndexValuePairs:
    """Return the pairs of all parcels, in order: a copy."""
    indices, values = [parcel.indices for parcel in parcels], [parcel.values for parcel in parcels]
    return IndexValuePairs(torch.cat(indices), torch.cat(values))


class PairFormat:
    """Lay out a parcel of pairs whose indices ascend in a range; no pairs take no bytes."""

    where: range  # of the indices; both ends know it
    count: int  # of the pairs; both ends know it
    dtype: torch.dtype  # of the values
    codec: IndexCodec  # the smallest for so many indices of the range
    indices: slice  # bytes of the parcel
    values: slice  # bytes of the parcel
    size: int  # bytes of the parcel

    def __init__(self, where: range, count: int, dtype: torch.dtype) -> None:
        self.where, self.count, self.dtype = where, count, dtype
        grain = max(bits.CRC_BYTES, dtype.itemsize)  # everything starts where a value may
        self.codec: IndexCodec = smallest(len(where), count, grain)
        self.indices = slice(bits.CRC_BYTES, bits.CRC_BYTES + self.codec.size)
        start = aligned(self.indices.stop, grain)
        self.values = slice(start, start + count * dtype.itemsize)
        self.size = aligned(self.values.stop, grain) if count else 0


def write(forms: Sequence[PairFormat], parcels: Sequence[IndexValuePairs], message: torch.Tensor, sound: bool) -> None:
    """Write parcels side by side into ``message``, uint8, each under a checksum.

    A parcel that does not fit its form, because of whatever somebody selected or said, or that is not ``sound``, is
    written so that :func:`read` finds that out wherever it is read: only there is it known by all ranks.
    """
    pairs = [(form, parcel) for form, parcel in zip(forms, parcels, strict=True) if form.count]
    relative = [parcel.indices - form.where.start for form, parcel in pairs]
    checks = [in_order(indices, len(form.where)) for indices, (form, _) in zip(relative, pairs, strict=True)]
    good = torch.stack(checks).tolist() if checks else []  # one look at a device
    start = 0
    for (form, parcel), indices, right in zip(pairs, relative, good, strict=True):
        out = message[start : start + form.size]
        if right and sound:
            form.codec.encode(indices, form.count, out[form.indices])
        else:  # indices of -1; no marks
            out[form.indices] = 255 if isinstance(form.codec, Int32) else 0
        out[form.values].view(form.dtype).copy_(parcel.values)
        bits.write_crc(out)
        start += form.size


def read(forms: Sequence[PairFormat], messages: Sequence[torch.Tensor]) -> tuple[list[IndexValuePairs], list[bool]]:
    """Return the parcels at the beginning of each message, uint8, and which of them are what was written.

    Of the others the pairs may be any.
    """
    parcels, checks = [], []
    for form, message in zip(forms, messages, strict=True):
        data = message[: form.size]
        if form.count:
            indices, good = form.codec.decode(data[form.indices], form.count)
            good = good & bits.crc_fits(data)
            parcels.append(IndexValuePairs(indices + form.where.start, data[form.values].view(form.dtype)))
            checks.append(good)
        else:
            parcels.append(IndexValuePairs(data.new_empty(0, dtype=torch.int32), data.new_empty(0, dtype=form.dtype)))
            checks.append(torch.ones((), dtype=torch.bool, device=data.device))
    return parcels, torch.stack(checks).tolist()
