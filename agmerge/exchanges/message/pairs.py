# SPDX-License-Identifier: Apache-2.0
"""Write pairs of indices and values as bytes: ``checksum | indices | values``.

Both ends know the range of the indices, their number, and the codec of the values. Indices stand in the smallest codec
for so many of that range, and count from its start. The writer of values keeps their quantisation error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agmerge.exchanges.message import Everything, IndexCodec, ValueCodec, bits, smallest, value_codec
from agmerge.exchanges.message.indices import in_order
from agmerge.tensors.layout import aligned


@dataclass(frozen=True)
class IndexValuePairs:
    """Indices and the values there."""

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

    def by_part(self, starts: Sequence[int]) -> list[IndexValuePairs]:
        """Return the pairs from each of ``starts`` to below the next one, with indices that count from there.

        Indices ascend, from the first of ``starts`` to below the last.
        """
        inner = torch.tensor(starts[1:-1], dtype=self.indices.dtype, device=self.indices.device)
        places = [0, *torch.searchsorted(self.indices, inner).tolist(), self.indices.numel()]
        parts = self.split([stop - start for start, stop in zip(places, places[1:], strict=False)])
        return [IndexValuePairs(part.indices - start, part.values) for part, start in zip(parts, starts, strict=False)]


def joined(parcels: Sequence[IndexValuePairs]) -> IndexValuePairs:
    """Return the pairs of all parcels, in order: a copy."""
    indices, values = [parcel.indices for parcel in parcels], [parcel.values for parcel in parcels]
    return IndexValuePairs(torch.cat(indices), torch.cat(values))


class PairFormat:
    """Layout of a parcel of pairs, of which the indices ascend in a range; no pairs take no bytes."""

    where: range  # of the indices; both ends know it
    count: int  # of the pairs; both ends know it
    dtype: torch.dtype  # of the values, as they are read
    codec: IndexCodec  # the smallest for so many indices of the range; none are written where these are all of it
    value: ValueCodec  # of the values
    exact: bool  # values travel as they are
    indices: slice  # bytes of the parcel
    values: slice  # bytes of the parcel
    size: int  # bytes of the parcel

    def __init__(self, where: range, count: int, dtype: torch.dtype, wire: str = "auto") -> None:
        self.where, self.count, self.dtype = where, count, dtype
        grain = max(bits.CRC_BYTES, dtype.itemsize)  # everything starts where a value may
        self.codec = Everything(count) if count == len(where) else smallest(len(where), count, grain)
        self.value, self.exact = value_codec(wire, dtype), wire == "auto"
        self.indices = slice(bits.CRC_BYTES, bits.CRC_BYTES + self.codec.size)
        start = aligned(self.indices.stop, grain)
        self.values = slice(start, start + self.value.size(count))
        self.size = aligned(self.values.stop, grain) if count else 0


def by_codec(forms: Sequence[PairFormat], size: int) -> dict[str, int]:
    """Return the bytes of a message of ``size`` bytes by "index codec/value codec"; checksums and gaps are "header"."""
    found: Counter[str] = Counter()
    for form in forms:
        if form.count:
            found[f"{form.codec.name}/{form.value.name}"] += form.codec.size + form.value.size(form.count)
    return {**found, "header": size - found.total()}


def write(
    forms: Sequence[PairFormat], parcels: Sequence[IndexValuePairs], message: torch.Tensor, sound: bool
) -> list[torch.Tensor]:
    """Write parcels side by side into ``message``, uint8, each under a checksum.

    Returns the values of each parcel that is not empty, as they will be read; perhaps views of ``message``. A parcel
    that does not fit its form, or is not ``sound``, is written so that :func:`read` refuses it on every rank: so all
    ranks know of the error.
    """
    pairs = [(form, parcel) for form, parcel in zip(forms, parcels, strict=True) if form.count]
    relative = [parcel.indices - form.where.start for form, parcel in pairs]
    checks = [in_order(indices, len(form.where)) for indices, (form, _) in zip(relative, pairs, strict=True)]
    good = torch.stack(checks).tolist() if checks else []  # one look at a device
    seen = []
    start = 0
    for (form, parcel), indices, right in zip(pairs, relative, good, strict=True):
        out = message[start : start + form.size]
        if right and sound:
            form.codec.encode(indices, form.count, out[form.indices])
        else:  # indices of -1; no marks
            out[form.indices] = form.codec.blank
        seen.append(form.value.encode(parcel.values, out[form.values]))
        bits.write_crc(out)
        if not (right and sound):
            out[: bits.CRC_BYTES].bitwise_not_()  # where there are no indices, that says it
        start += form.size
    return seen


def read(forms: Sequence[PairFormat], messages: Sequence[torch.Tensor]) -> tuple[list[IndexValuePairs], list[bool]]:
    """Return the parcels at the beginning of each message, uint8, and whether each of them is as it was written.

    A damaged parcel may have any pairs.
    """
    parcels, checks = [], []
    for form, message in zip(forms, messages, strict=True):
        data = message[: form.size]
        if form.count:
            indices, good = form.codec.decode(data[form.indices], form.count)
            values = data[form.values]
            values = values.view(form.dtype) if form.exact else form.value.decode(values, form.count, form.dtype)
            parcels.append(IndexValuePairs(indices + form.where.start, values))
            checks.append(good & _sealed(form, data))
        else:
            parcels.append(IndexValuePairs(data.new_empty(0, dtype=torch.int32), data.new_empty(0, dtype=form.dtype)))
            checks.append(torch.ones((), dtype=torch.bool, device=data.device))
    return parcels, torch.stack(checks).tolist()


def unread(pairs: IndexValuePairs, seen: torch.Tensor, factor: float = 1.0) -> IndexValuePairs:
    """Return the quantisation error of ``pairs`` that were written: ``factor`` times the differences to ``seen``.

    ``seen``: the values as they are read; themselves, where they travel as they are. Pairs without a difference, or
    with one that is not finite, are left out.
    """
    if seen is pairs.values:
        return pairs.first(0)
    errors = (pairs.values - seen).mul_(factor)
    return IndexValuePairs(pairs.indices, errors).where(errors.isfinite() & (errors != 0))


def _sealed(form: PairFormat, parcel: torch.Tensor) -> bool | torch.Tensor:
    """Return whether the checksum of a parcel is right; on a device, where there are no indices, whether it is 0."""
    if parcel.device.type == "cpu" or not form.codec.sends_all:
        return bits.crc_fits(parcel)
    return (parcel[: bits.CRC_BYTES] == 0).all()
