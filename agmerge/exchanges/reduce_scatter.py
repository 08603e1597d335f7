# SPDX-License-Identifier: Apache-2.0
"""Cut the all-reduce of a dense segment into its two halves, with time between them.

The reduce-scatter runs under backward, the all-gather under the next forward. Headers must not wait that long, so
every shard carries a copy of the control numbers: with its own shard a rank has those of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from agmerge.exchanges import all_reduce
from agmerge.exchanges.base import ExchangeContext, InFlight, SegmentBuffers
from agmerge.exchanges.dense import DenseExchange, tail_of
from agmerge.exchanges.message.format import RoundHeader
from sparsifiers import Selection


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

    def wait(self, pending: InFlight) -> RoundHeader:
        """Collective. Wait for this rank's shard, and return the merged header that travels in it."""
        pending.handle.wait(self.timeout)
        self._add_rows(pending)
        return self.read(pending, [self._tail(pending)])

    def wait_on_stream(self, pending: InFlight) -> None:
        """Collective. Make the device's stream wait for this rank's shard."""
        pending.handle.wait_on_stream(self.timeout)
        self._add_rows(pending)
        pending.said.append(self._tail(pending))

    def _add_rows(self, pending: InFlight) -> None:
        """Add up the rows that arrived, if sums are in rank order; else the backend has added them."""
        if self.ordered:
            rows = pending.received.view(self.comm.size, -1)
            pending.extra.copy_(all_reduce.sum_in_rank_order(rows, pending.loads[0].work.dtype))

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
