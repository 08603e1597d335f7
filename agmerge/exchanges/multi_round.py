# SPDX-License-Identifier: Apache-2.0
"""Exchanges of several rounds: a generator makes those behind the first, and all messages advance together.

What they send in later rounds are pairs of indices and values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch

from agmerge.backends import Handle
from agmerge.exchanges.base import Exchange, ExchangeContext, InFlight
from agmerge.exchanges.dense import sum_in_rank_order
from agmerge.exchanges.message import Everything, IndexCodec, ValueCodec, bits, smallest, value_codec
from agmerge.exchanges.message.format import RoundHeader
from agmerge.exchanges.message.indices import in_order
from agmerge.exchanges.oktopk.regions import shares
from agmerge.tensors.layout import aligned

# Pairs of indices and values as bytes: ``checksum | indices | values``.
#
# Both ends know the range of the indices, their number, and the codec of the values. Indices stand in the smallest
# codec for so many of that range, and count from its start. The writer of values keeps their quantisation error.


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


# The exchange.

T = TypeVar("T")
Phases = Generator[Handle, None, T]  # yields each collective that it starts; goes on when that has ended


@dataclass
class State:
    """State of a message under way: its ``extra``."""

    phases: Phases[None] | None = None  # the remaining rounds; None: not scheduled
    control: RoundHeader | None = None  # the merged header of all ranks, once it is known


class MultiRoundExchange(Exchange):
    """Exchange in rounds, where later messages depend on the results of earlier ones.

    1. ``start`` sends the first message of each merge buffer, under backward, and schedules ``phases``.
    2. ``wait`` runs the phases of all messages under way together: each goes one collective further, in the order in
       which they were started, then each one more, until the one that is waited for has ended.
    3. ``finish`` writes the update.

    That order is the plan's, so all ranks make the same calls in the same order, in whatever order messages arrive. A
    step pays the latency of a round once, and not once for each message.

    A subclass (:mod:`agmerge.exchanges.oktopk.exchange` is the one to copy):

    * ends ``start`` in ``return self.schedule(...)``, with a message of which ``extra`` is a :class:`State`;
    * yields each further collective in ``phases``, and counts its bytes with ``pending.count``;
    * sets ``pending.extra.control`` there, to the merged header;
    * tells all ranks, in another collective, of damage that one rank alone can see in a later round.
    """

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        self.can_poll = False  # without a wait nothing goes on
        self._in_flight: dict[str, InFlight] = {}  # messages with phases left, in the order of their starts

    @abstractmethod
    def phases(self, pending: InFlight) -> Phases[None]:
        """Collective. Make the rounds behind the first collective, which has ended when this begins.

        Yields each collective that is to be waited for, and sets ``pending.extra.control``.
        """

    def schedule(self, pending: InFlight) -> InFlight:
        """Schedule ``phases`` for the next ``wait``, and return ``pending``.

        A message of this name that was never waited for is forgotten: it is of an attempt that came to nothing.
        """
        pending.extra.phases = self.phases(pending)
        self._in_flight.pop(pending.name, None)  # the new one goes to the end
        self._in_flight[pending.name] = pending
        return pending

    def arrived(self, pending: InFlight) -> bool:
        return pending.name not in self._in_flight

    def wait(self, pending: InFlight) -> RoundHeader:
        """Collective. Run the phases of all messages under way until those of ``pending`` have ended.

        Returns the merged header of all ranks. After an error no message advances any more.
        """
        try:
            while pending.name in self._in_flight:
                for message in list(self._in_flight.values()):
                    self._advance(message)
        except BaseException:
            self._in_flight.clear()  # their remaining rounds would be calls that other ranks do not make
            raise
        control: RoundHeader | None = pending.extra.control
        assert control is not None, f"{pending.name}: an earlier wait failed"
        return control

    def _advance(self, pending: InFlight) -> None:
        """Collective. Wait for the collective of a message, and start its next one."""
        pending.handle.wait(self.timeout)
        following = next(pending.extra.phases, None)
        if following is None:
            del self._in_flight[pending.name]
        else:
            pending.handle = following

    # -- phases that exchanges are made of: ``yield from`` them. ``what`` names a phase, once in a message ---------

    def all_gather_ints(self, pending: InFlight, what: str, numbers: Sequence[int]) -> Phases[list[list[int]]]:
        """Collective. Gather ``numbers`` (int32), as many from each rank; return them by rank."""
        own = torch.tensor(numbers, dtype=torch.int32, device=pending.message.device)
        rows = own.new_empty(self.comm.size * len(numbers))
        pending.count({"header": own.nbytes})
        yield self.comm.all_gather(rows, own, f"{pending.name}/{what}")
        by_rank: list[list[int]] = rows.view(self.comm.size, -1).tolist()
        return by_rank

    def all_reduce(self, pending: InFlight, what: str, numbers: torch.Tensor) -> Phases[torch.Tensor]:
        """Collective. Add ``numbers`` (1-D) up over all ranks, in place, and return them."""
        pending.count({"header": numbers.nbytes})
        yield self.comm.all_reduce(numbers, f"{pending.name}/{what}")
        return numbers

    def all_to_all_pairs(
        self,
        pending: InFlight,
        what: str,
        own: IndexValuePairs,
        table: list[list[int]],
        ranges: Sequence[Sequence[range]],
    ) -> Phases[tuple[list[IndexValuePairs], torch.Tensor, int]]:
        """Collective. Cut ``own`` pairs into pieces, send piece r to rank r, and return those that arrive, by rank.

        ``table[a][b]``: pairs that rank a sends to rank b, the same table on all ranks. ``ranges[a][b]``: where their
        indices lie, which ascend in it. Values travel in ``context.wire``. Also returns the values of ``own`` as they
        are read; and 1 + the first rank that sent a damaged or disordered piece, else 0.
        """
        rank = self.comm.rank
        leaving = [self._parcel(*pair, own) for pair in zip(ranges[rank], table[rank], strict=True)]
        arriving = [self._parcel(places[rank], row[rank], own) for places, row in zip(ranges, table, strict=True)]
        sizes, out_sizes = ([form.size for form in forms] for forms in (leaving, arriving))
        message = self._bytes(pending, what, sum(sizes))
        received = self._bytes(pending, f"{what} received", sum(out_sizes))
        seen = _read_of(own, leaving, write(leaving, own.split(table[rank]), message, sound=True))
        pending.count(by_codec(leaving, message.numel()))
        yield self.comm.all_to_all(received, message, out_sizes, sizes, f"{pending.name}/{what}")
        pieces, good = read(arriving, torch.split(received, out_sizes))
        return pieces, seen, 0 if all(good) else 1 + good.index(False)

    def all_gather_pairs(
        self,
        pending: InFlight,
        what: str,
        own: IndexValuePairs,
        held: Sequence[int],
        ranges: Sequence[range],
        sound: bool,
    ) -> Phases[tuple[list[IndexValuePairs], torch.Tensor, int]]:
        """Collective. Gather the pairs of all ranks, and return them by rank; messages are as long as the longest.

        ``held[r]``: how many rank r has; ``ranges[r]``: where their indices lie, which ascend in it. ``sound``: whether
        this rank's own are right. Also returns the values of ``own`` as they are read, see :meth:`all_to_all_pairs`;
        and 1 + the first rank that sent damaged or not sound pairs, else 0.
        """
        forms = [self._parcel(*pair, own) for pair in zip(ranges, held, strict=True)]
        longest = max(form.size for form in forms)
        message = self._bytes(pending, what, longest)
        received = self._bytes(pending, f"{what} received", self.comm.size * longest)
        mine = [forms[self.comm.rank]]
        seen = _read_of(own, mine, write(mine, [own], message, sound))
        pending.count(by_codec(mine, message.numel()))
        yield self.comm.all_gather(received, message, f"{pending.name}/{what}")
        parcels, good = read(forms, torch.split(received, [longest] * self.comm.size))
        return parcels, seen, 0 if all(good) else 1 + good.index(False)

    def add_up_values(
        self, pending: InFlight, what: str, values: torch.Tensor
    ) -> Phases[tuple[torch.Tensor, torch.Tensor, IndexValuePairs, int]]:
        """Collective. Add up ``values``, 1-D, as many on each rank, in rank order; they travel in ``context.wire``.

        Each rank adds up its share, and all gather the sums. Returns the sums as all ranks read them;
        ``values`` as they are read; the quantisation error of this rank's share of the sums, by place; and 1 + the
        first rank that sent damaged sums, or received damaged values, else 0.
        """
        workers, rank = self.comm.size, self.comm.rank
        held = shares(values.numel(), workers)
        parts = [range(stop - count, stop) for count, stop in zip(held, accumulate(held), strict=True)]
        places = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
        pieces, seen, fault = yield from self.all_to_all_pairs(
            pending, what, IndexValuePairs(places, values), [held] * workers, [parts] * workers
        )
        share = slice(parts[rank].start, parts[rank].stop)
        own = IndexValuePairs(places[share], sum_in_rank_order(torch.stack([piece.values for piece in pieces])))
        sums, read_of_own, fault = yield from self.all_gather_pairs(
            pending, f"{what} added up", own, held, parts, sound=not fault
        )
        return torch.cat([part.values for part in sums]), seen, unread(own, read_of_own), fault

    def _parcel(self, where: range, count: int, like: IndexValuePairs) -> PairFormat:
        """Return the layout of ``count`` pairs within ``where``, with values of the dtype of ``like``."""
        return PairFormat(where, count, like.values.dtype, self.context.wire)

    def _bytes(self, pending: InFlight, what: str, length: int) -> torch.Tensor:
        """Return the kept uint8[length] of a phase of a message."""
        key: tuple[Any, ...] = (what, pending.name)
        return self.keep(key, length, torch.uint8, pending.message.device)


def _read_of(own: IndexValuePairs, forms: Sequence[PairFormat], seen: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of ``own`` as they are read; themselves, where ``forms`` are exact.

    ``seen``: the result of :func:`agmerge.exchanges.multi_round.write`.
    """
    return own.values if forms[0].exact or not seen else torch.cat(list(seen))
