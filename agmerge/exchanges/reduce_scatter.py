"""``scatter``: the all-reduce of a dense segment in its two halves, with time between them.

The reduce-scatter runs under backward, the all-gather under the next forward. What ranks have to say to each
other must not wait that long, so every shard carries a copy of the control numbers: with its own shard a rank
has everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from agmerge.exchanges import all_reduce
from agmerge.exchanges.base import InFlight, SegmentBuffers
from agmerge.exchanges.dense import DenseExchange, decode, tail_of
from agmerge.exchanges.message.format import RoundHeader
from sparsifiers import Selection


class ScatterExchange(DenseExchange):
    """A dense exchange whose ``finish`` writes nothing yet: :meth:`gather`, then :meth:`receive`.

    A message is W rows, one for each rank: its shard of the segment, then the control numbers. Casts, predivision and
    sums in rank order are those of :class:`DenseExchange`, and so are the sums, to the bit where the backend adds
    alike in an all-reduce and in a reduce-scatter. The all-gather comes back into the message, which is free by then.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._scattered: list[InFlight] = []

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        (load,) = loads
        self._scattered = []  # what an attempt that came to nothing has left
        dtype, device, workers = self.cast or load.update.dtype, load.work.device, self.comm.size
        tail = tail_of(control, dtype, device)
        shard = -(-load.segment.length // workers)
        width = shard + tail.numel()
        message = self.keep(("message", name), workers * width, dtype, device)
        rows = message.view(workers, width)
        self._fill(load, rows[:, :shard])
        rows[:, shard:] = tail
        mine = self.keep(("shard", name), width, dtype, device)
        if self.ordered:
            received = self.keep(("received", name), workers * width, dtype, device)
            handle = self.comm.all_to_all(received, message, [width] * workers, [width] * workers, name)
        else:
            received = mine
            handle = self.comm.reduce_scatter(mine, message, name)
        size = (message.numel() + shard) * message.element_size()
        return InFlight(name, loads, control, handle, size, load.segment.numel, message, received, mine)

    def _stays(self, load: SegmentBuffers) -> bool:
        return False  # shards have control numbers behind each of them

    def _fill(self, load: SegmentBuffers, rows: torch.Tensor) -> None:
        """Write ``work`` into the shards, (W, shard); commit it, if anything is kept."""
        if not self.keeps:
            for work, part in _pieces(load.work, rows):
                self._pack(replace(load, work=work), part)
            return
        payload = self.keep(("payload",), load.segment.length, rows.dtype, rows.device)
        self._pack(load, payload)
        self.commit(load.segment, None, self._sent(load, payload))
        for sent, part in _pieces(payload, rows):
            part.copy_(sent)

    def wait(self, pending: InFlight) -> RoundHeader:
        """Return when this rank's shard is there. What all ranks say travels in it."""
        pending.handle.wait(self.timeout)
        if self.ordered:
            rows = pending.received.view(self.comm.size, -1)
            pending.extra.copy_(all_reduce.in_rank_order(rows, pending.loads[0].work.dtype))
        return decode(pending.extra[self._shard(pending) :].tolist(), pending.control, pending.name)

    def finish(self, pending: InFlight) -> None:
        """Remember the shard for :meth:`gather`. The update is written by :meth:`receive`."""
        self._scattered.append(pending)

    def gather(self) -> list[InFlight]:
        """Collective. Start to hand the finished shards round, the last merge buffer first.

        Forward needs that one first.
        """
        under_way, self._scattered = self._scattered[::-1], []
        for pending in under_way:
            shard = self._shard(pending)
            whole = pending.message[: shard * self.comm.size]
            pending.handle = self.comm.all_gather(whole, pending.extra[:shard], f"{pending.name}/gather")
        return under_way

    def receive(self, pending: InFlight) -> None:
        """Wait for one message of :meth:`gather`, in any order, and write its update."""
        pending.handle.wait(self.timeout)
        super().finish(pending)

    def _shard(self, pending: InFlight) -> int:
        return -(-pending.loads[0].segment.length // self.comm.size)


def _pieces(flat: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equal shape that lay ``flat`` (1-D) out in ``rows``, row by row; what is left over becomes zero."""
    shard = rows.shape[1]
    full, rest = divmod(flat.numel(), shard)
    yield flat[: full * shard].view(full, shard), rows[:full]
    if rest:
        yield flat[full * shard :], rows[full, :rest]
        rows[full, rest:] = 0.0
    rows[full + bool(rest) :] = 0.0
