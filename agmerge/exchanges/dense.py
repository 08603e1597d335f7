# SPDX-License-Identifier: Apache-2.0
"""Combine dense segments by an all-reduce, as they are or cast to 16 bits: ``dense``.

The all-reduce has no room for a header, so it travels as a few numbers behind the gradients that mean
the same after summing: a flag is raised if the sum is not zero. Step and buffer are one-hot, so that
ranks that are not at the same place show up as two hot positions. Large segments are summed where they lie, by an
all-reduce of their own: a copy would cost as much memory as the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from agmerge.errors import MessageError
from agmerge.exchanges import all_reduce, host_copies
from agmerge.exchanges.all_reduce import LARGE
from agmerge.exchanges.base import Exchange, ExchangeContext, InFlight, SegmentBuffers
from agmerge.exchanges.message.format import Flag, RoundHeader
from sparsifiers import Selection

_HOT = 8  # positions of a one-hot number
_FLAGS = 8


class DenseExchange(Exchange):
    """All-reduce of dense segments of one dtype over all ranks.

    1. Each rank copies its small segments into one message, one after the other, in the dtype of the wire, with its
       control numbers behind them; a large segment stays where it is.
    2. One all-reduce adds up the message, and one each large segment, in place, under backward. With
       ``context.ordered``: shards by all-to-all, added in rank order, all-gathered; the sum of an element does not
       depend on its place in the buffer then (a native all-reduce's does, from three ranks on).
    3. The update is the sum times ``scale``.

    Where ``work`` has a residual, or is handed back, sent values are committed.
    """

    sparse = False

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        self.cast, self.predivide = context.cast, context.predivide
        self.keeps = context.store.has_residual or context.feedback
        self.ordered = context.ordered

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Start the all-reduces; commit the sent values, where a residual is kept."""
        dtype = self.cast or loads[0].update.dtype
        large = [load for load in loads if self._stays(load)]
        packed = [load for load in loads if not self._stays(load)]
        elements = sum(load.segment.length for load in packed)
        end = length = elements + tail_length(control)
        length += -length % self.comm.size  # whole shards
        message = self.keep(("message", name), length, dtype, loads[0].work.device)
        for load, payload in _parts(message, packed):
            self._pack(load, payload)
            if self.keeps:
                # Before it leaves: the message is summed in place.
                self.store.subtract_sent(load.segment, None, self._sent(load, payload))
        write_tail(control, message[elements:end])
        received = self.keep(("received", name), length, dtype, message.device) if self.ordered else None
        sums = [
            all_reduce.start_sum(self.comm, load.work, None, f"{name}/dense {number}")
            for number, load in enumerate(large)
        ]
        sums.append(all_reduce.start_sum(self.comm, message, received, name))
        sent = sum(load.segment.numel for load in loads)
        size = sum(part.bytes for part in sums)
        return InFlight(name, loads, control, sums[0].handle, size, sent, message, message, sums)

    def _stays(self, load: SegmentBuffers) -> bool:
        """Return whether a segment is summed where it lies: it is large, and exactly its work travels."""
        exact = self.cast is None and self.predivide == 1.0 and load.work.dtype == load.update.dtype
        return exact and not self.ordered and load.segment.length >= LARGE

    def _pack(self, load: SegmentBuffers, payload: torch.Tensor) -> None:
        """Write ``work / predivide`` into ``payload``, in the dtype of the wire; a cast saturates, also when summed."""
        if self.predivide == 1.0:
            payload.copy_(load.work)
        else:
            torch.mul(load.work, 1.0 / self.predivide, out=payload)
        if self.cast is not None:
            limit = largest_summand(self.cast, self.comm.size)
            payload.clamp_(-limit, limit)

    def _sent(self, load: SegmentBuffers, payload: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand as the others see it; with a predivision, in the dtype of ``work``."""
        if self.predivide == 1.0:
            return payload
        sent = self.keep(("sent",), payload.numel(), load.work.dtype, load.work.device)
        return sent.copy_(payload).mul_(self.predivide)

    @property
    def can_poll(self) -> bool:
        return not self.ordered  # in rank order, the shards are still to be gathered

    def wait(self, pending: InFlight) -> RoundHeader:
        """Collective. Wait for all sums, and return the merged header, from the numbers behind them."""
        for part in pending.extra:
            all_reduce.wait_for_sum(self.comm, part, self.timeout, pending.loads[0].work.dtype)
        return self.read(pending, [self._tail(pending)])

    def can_queue(self, pending: InFlight) -> bool:
        return pending.has_streams

    def wait_on_stream(self, pending: InFlight) -> None:
        """Collective. Queue the remaining collectives of all sums on the device."""
        for part in pending.extra:
            all_reduce.wait_for_sum(self.comm, part, self.timeout, pending.loads[0].work.dtype, on_stream=True)
        pending.said.append(self._tail(pending))

    def _tail(self, pending: InFlight) -> torch.Tensor:
        """Return the numbers behind the segments: a view, with the padding of shards."""
        return pending.message[sum(load.segment.length for load in pending.loads if not self._stays(load)) :]

    def read(self, pending: InFlight, said: Sequence[torch.Tensor]) -> RoundHeader:
        (tail,) = said
        return decode(tail.tolist(), pending.control, pending.name)

    def finish(self, pending: InFlight) -> None:
        factor = self.scale * self.predivide
        for load, total in self._totals(pending):
            if total.dtype == load.update.dtype:
                torch.mul(total, factor, out=load.update)  # one pass
            else:
                load.update.copy_(total).mul_(factor)  # widened first: the product is not rounded to the wire's dtype
            if self.keeps and total is load.work:
                self.store.subtract_sent(load.segment, None, None)  # all of it was sent

    def _totals(self, pending: InFlight) -> Iterator[tuple[SegmentBuffers, torch.Tensor]]:
        """Yield each load with its sum over the ranks."""
        yield from ((load, load.work) for load in pending.loads if self._stays(load))
        yield from _parts(pending.message, [load for load in pending.loads if not self._stays(load)])


def _parts(message: torch.Tensor, loads: Sequence[SegmentBuffers]) -> Iterator[tuple[SegmentBuffers, torch.Tensor]]:
    """Yield each load with its slice of the message."""
    start = 0
    for load in loads:
        yield load, message[start : start + load.segment.length]
        start += load.segment.length


def largest_summand(dtype: torch.dtype, size: int) -> float:
    """Return the largest magnitude of which ``size`` add up without overflow, whatever the order.

    Its multiples are exact, so rounding cannot carry a partial sum beyond them. (The maximum of float16
    divided by 3 rounds up, and three of that are infinite.)
    """
    steps = round(2 / torch.finfo(dtype).eps) - 1  # the maximum in units of its last digit
    return torch.finfo(dtype).max / steps * max(steps // size, 1)


def tail_length(control: RoundHeader) -> int:
    """Return how many numbers :func:`encode` makes of ``control``."""
    return 2 * _HOT + _FLAGS + len(control.used)


def encode(control: RoundHeader) -> list[float]:
    """Return the header as numbers that mean the same after summing: step and buffer one-hot, flags, used bits."""
    tail = [0.0] * (2 * _HOT + _FLAGS)
    tail[control.step % _HOT] = 1.0
    tail[_HOT + (control.buffer + control.plan) % _HOT] = 1.0
    for bit in range(_FLAGS):
        tail[2 * _HOT + bit] = float(control.flags >> bit & 1)
    return tail + [float(used) for used in control.used]


def place_of(flag: Flag) -> int:
    """Return the place of a flag among the numbers of :func:`encode`."""
    return 2 * _HOT + flag.bit_length() - 1


def write_tail(control: RoundHeader, out: torch.Tensor) -> None:
    """Write the numbers of :func:`encode` into ``out``, 1-D, with the flag that only its device knows. No wait."""
    tail, place = encode(control), place_of(Flag.NONFINITE)
    if control.finite is not None:
        tail[place] = 1.0  # and taken off again
    host_copies.write(tail, out)
    if control.finite is not None:
        out[place].add_(control.finite, alpha=-1)


def tail_of(control: RoundHeader, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the numbers of :func:`write_tail` on a device, 1-D."""
    tail = torch.empty(tail_length(control), dtype=dtype, device=device)
    write_tail(control, tail)
    return tail


def decode(tail: Sequence[float], own: RoundHeader, name: str) -> RoundHeader:
    """Return the merged header of all ranks, from the sum of their numbers; ``own``: this rank's header.

    Raises :class:`agmerge.MessageError` if ranks are not at the same place.
    """
    hot = [[i for i in range(_HOT) if tail[start + i] != 0.0] for start in (0, _HOT)]
    if hot != [[own.step % _HOT], [(own.buffer + own.plan) % _HOT]]:
        raise MessageError(
            f"AGM502: {name}: ranks summed messages of different steps or buffers: steps {hot[0]} and buffers "
            f"{hot[1]} (modulo {_HOT})"
        )
    flags = sum(int(tail[2 * _HOT + bit] != 0.0) << bit for bit in range(_FLAGS))
    used = tuple(value != 0.0 for value in tail[2 * _HOT + _FLAGS :][: len(own.used)])
    return replace(own, flags=flags, used=used)
