# SPDX-License-Identifier: Apache-2.0
"""Dense exchanges: gradients as they are, or cast to 16 bits, in an all-reduce or in its two halves.

An all-reduce has no room for a header, so it travels as a few numbers behind the gradients that mean the same after
summing: a flag is raised if the sum is not zero. Step and buffer are one-hot, so that ranks that are not at the same
place show up as two hot positions. Large segments are summed where they lie, by an all-reduce of their own: a copy
would cost as much memory as the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from agmerge.backends import Backend, Handle
from agmerge.errors import MessageError
from agmerge.exchanges.base import Exchange, ExchangeContext, InFlight, SegmentBuffers, wait_for
from agmerge.exchanges.message.format import Flag, RoundHeader, write_numbers
from sparsifiers import Selection, gpu

# Sums over ranks, added as the backend does or in rank order.

NARROW = torch.float16, torch.bfloat16  # dtypes that are added in float32
LARGE = 1 << 18  # elements from which on a segment is not copied: the all-reduce of 1 MB takes longer than one more


@dataclass
class Sum:
    """Sum over all ranks that is under way: its buffers and its first collective."""

    message: torch.Tensor  # 1-D, summed in place
    received: torch.Tensor | None  # in rank order: this rank's shard of every rank's message, one after the other
    handle: Handle  # of the first collective
    bytes: int  # handed to collectives, all in all
    name: str  # of its collectives


def start_sum(comm: Backend, message: torch.Tensor, received: torch.Tensor | None, name: str) -> Sum:
    """Collective. Start the sum of ``message``, 1-D, over all ranks; in rank order with ``received``, of its length.

    Their length is then a multiple of ``comm.size``. In rank order the sum of an element does not depend on its place.
    """
    size = message.numel() * message.element_size()
    if received is None:
        return Sum(message, None, comm.all_reduce(message, name), size, name)
    shard = [message.numel() // comm.size] * comm.size
    handle = comm.all_to_all(received, message, shard, shard, name)
    return Sum(message, received, handle, size + size // comm.size, name)


def wait_for_sum(
    comm: Backend, pending: Sum, timeout: float, wide: torch.dtype | None = None, *, on_stream: bool = False
) -> None:
    """Collective. Wait until the sum is in place; ``on_stream``: make the device's stream wait, and return at once.

    In rank order it is added in ``wide`` and rounded once (None: float32 for 16 bits, else the message's own dtype).
    """

    wait_for(pending.handle, timeout, on_stream=on_stream)
    if pending.received is None:
        return
    shard = sum_in_rank_order(pending.received.view(comm.size, -1), wide).to(pending.message.dtype)
    wait_for(comm.all_gather(pending.message, shard, f"{pending.name}/sum"), timeout, on_stream=on_stream)


def write_in_rank_order(out: torch.Tensor, rows: torch.Tensor, factor: float) -> None:
    """Write ``factor`` times the sum of ``rows``, (W, n), added from first to last, to ``out``, (n,)."""
    if rows.dtype == out.dtype == torch.float32 and _is_one_launch(rows, out.dtype):
        gpu.add_whole(out, rows, 1.0, factor=factor)
    else:
        out.copy_(sum_in_rank_order(rows).mul_(factor))


def _is_one_launch(rows: torch.Tensor, wide: torch.dtype) -> bool:
    """Return whether a kernel adds ``rows`` in ``wide``."""
    return gpu.is_fused(rows.device) and wide == torch.float32 and rows.dtype in (*NARROW, wide)


def sum_in_rank_order(rows: torch.Tensor, wide: torch.dtype | None = None) -> torch.Tensor:
    """Return the sum of ``rows``, (W, n), each contiguous, added from first to last: (n,).

    ``wide``: the dtype to add in; None: float32 for 16 bits, else their own. On a device with kernels float32 and 16
    bits are one launch.
    """
    wide = wide or (torch.float32 if rows.dtype in NARROW else rows.dtype)
    if _is_one_launch(rows, wide):
        total = torch.empty(rows.shape[1], dtype=wide, device=rows.device)
        gpu.add_whole(total, rows, 1.0)
        return total
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total += row
    return total


# The all-reduce: ``dense``.

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
    queues = True

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        self.cast, self.predivide = context.cast, context.predivide
        self.keeps = context.store.has_residual or context.feedback
        self.ordered = context.ordered
        self.can_poll = not context.ordered  # in rank order, the shards are still to be gathered

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
        sums = [start_sum(self.comm, load.work, None, f"{name}/dense {number}") for number, load in enumerate(large)]
        sums.append(start_sum(self.comm, message, received, name))
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

    def arrive(self, pending: InFlight, *, on_stream: bool = False) -> None:
        """Collective. Wait for all sums; in rank order, gather the shards."""
        for part in pending.extra:
            wait_for_sum(self.comm, part, self.timeout, pending.loads[0].work.dtype, on_stream=on_stream)

    def announced(self, pending: InFlight) -> list[torch.Tensor]:
        return [self._tail(pending)]

    def _tail(self, pending: InFlight) -> torch.Tensor:
        """Return the numbers behind the segments: a view, with the padding of shards."""
        return pending.message[sum(load.segment.length for load in pending.loads if not self._stays(load)) :]

    def check(self, pending: InFlight, announced: Sequence[torch.Tensor]) -> RoundHeader:
        (tail,) = announced
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
    write_numbers(tail, out)
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


# The all-reduce in two halves, with time between them: the reduce-scatter runs under backward, the all-gather under the
# next forward. Headers must not wait that long, so every shard carries a copy of the control numbers: with its own
# shard a rank has those of all ranks.


class ScatterExchange(DenseExchange):
    """All-reduce of one dense segment in two halves; the second can run under the next forward.

    1. Each rank writes W rows, one for each rank: its shard of the segment, then the control numbers.
    2. One reduce-scatter adds them up, under backward: every rank gets its own row of the sum. ``wait`` reads the
       merged header; ``finish`` writes nothing yet.
    3. :meth:`gather` starts the all-gathers of the shards. Each comes back into the message, which is free by then.
    4. :meth:`receive` waits for one of them, and writes its update.

    Casts, predivision and sums in rank order are those of :class:`DenseExchange`. So are the sums, to the bit where
    the backend adds alike in an all-reduce and in a reduce-scatter.
    """

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        self._scattered: list[InFlight] = []  # finished, not yet handed round

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Start the reduce-scatter of one segment."""
        (load,) = loads
        self._scattered = []  # messages of an attempt that came to nothing
        dtype, device, workers = self.cast or load.update.dtype, load.work.device, self.comm.size
        tail = tail_of(control, dtype, device)
        shard = -(-load.segment.length // workers)
        width = shard + tail.numel()
        message = self.keep(("message", name), workers * width, dtype, device)
        rows = message.view(workers, width)
        self._fill(load, rows[:, :shard])
        rows[:, shard:] = tail
        own = self.keep(("shard", name), width, dtype, device)
        if self.ordered:
            received = self.keep(("received", name), workers * width, dtype, device)
            handle = self.comm.all_to_all(received, message, [width] * workers, [width] * workers, name)
        else:
            received = own
            handle = self.comm.reduce_scatter(own, message, name)
        size = (message.numel() + shard) * message.element_size()
        return InFlight(name, loads, control, handle, size, load.segment.numel, message, received, own)

    def _stays(self, load: SegmentBuffers) -> bool:
        """Return False: no segment is summed where it lies."""
        return False  # shards have control numbers behind each of them

    def _fill(self, load: SegmentBuffers, rows: torch.Tensor) -> None:
        """Write ``work`` into ``rows``, the shards of all ranks, (W, shard); commit it, if there is a residual."""
        if not self.keeps:
            for work, part in _pieces(load.work, rows):
                self._pack(replace(load, work=work), part)
            return
        payload = self.keep(("payload",), load.segment.length, rows.dtype, rows.device)
        self._pack(load, payload)
        self.store.subtract_sent(load.segment, None, self._sent(load, payload))
        for sent, part in _pieces(payload, rows):
            part.copy_(sent)

    def arrive(self, pending: InFlight, *, on_stream: bool = False) -> None:
        """Collective. Wait for this rank's shard; add up the rows if sums are in rank order."""
        wait_for(pending.handle, self.timeout, on_stream=on_stream)
        if self.ordered:  # else the backend has added them
            rows = pending.received.view(self.comm.size, -1)
            pending.extra.copy_(sum_in_rank_order(rows, pending.loads[0].work.dtype))

    def _tail(self, pending: InFlight) -> torch.Tensor:
        """Return the numbers behind this rank's shard: a view."""
        own: torch.Tensor = pending.extra
        return own[self._shard(pending) :]

    def finish(self, pending: InFlight) -> None:
        """Remember the shard for :meth:`gather`. The update is written by :meth:`receive`."""
        self._scattered.append(pending)

    def gather(self) -> list[InFlight]:
        """Collective. Start the all-gathers of finished shards, the last merge buffer first: forward needs it first."""
        scattered, self._scattered = self._scattered[::-1], []
        for pending in scattered:
            shard = self._shard(pending)
            whole = pending.message[: shard * self.comm.size]
            pending.handle = self.comm.all_gather(whole, pending.extra[:shard], f"{pending.name}/gather")
        return scattered

    def receive(self, pending: InFlight) -> None:
        """Collective. Wait for one message of :meth:`gather`, in any order, and write its update."""
        pending.handle.wait_on_stream(self.timeout)
        super().finish(pending)

    def _shard(self, pending: InFlight) -> int:
        """Return the elements of a shard."""
        return -(-pending.loads[0].segment.length // self.comm.size)


def _pieces(flat: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of equal shape that lay ``flat`` (1-D) out in ``rows``, row by row, and write zero behind its end."""
    shard = rows.shape[1]
    full, left = divmod(flat.numel(), shard)
    yield flat[: full * shard].view(full, shard), rows[:full]
    if left:
        yield flat[full * shard :], rows[full, :left]
        rows[full, left:] = 0.0
    rows[full + bool(left) :] = 0.0
