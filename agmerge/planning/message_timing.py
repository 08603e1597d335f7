"""One message, selected, packed and sent as in a step, and how long each of that takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from agmerge.exchanges import Exchange, InFlight, SegmentBuffers
from agmerge.exchanges.message.format import RoundHeader
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Segment
from sparsifiers import Selection

BUSY = torch.ones(128, 128)  # a piece of work: a tenth of a millisecond, more or less
MANY = 16  # small messages in a row


class MessageTimer:
    """One size: the same message again and again. ``backward``: its seconds on this rank."""

    def __init__(self, session: MergeBuffers, segment: Segment, exchange: Exchange, step: int, backward: float) -> None:
        self.session, self.segment, self.step, self._exchange = session, segment, step, exchange
        self._busy = backward / 2  # seconds, about, that backward goes on after a message has left
        self.load = session.load(segment) if exchange.sparse else _zeros(session.load(segment))
        self.on_host = segment.lane.device.type == "cpu"
        self._shares_cores = self.on_host and exchange.can_poll
        self.offer = self._select()
        self.capacity = 0 if self.offer is None else self.offer.indices.numel()

    def _select(self) -> Selection | None:
        sparsifier = self.session.config.sparsifier
        if sparsifier is None or not self._exchange.sparse:
            return None
        work, k, shapes = self.session.vector(self.segment, self.step)
        return sparsifier.select(work, k=k, key=f"probe of {self.segment.numel}", step=self.step, shapes=shapes)

    def start(self, name: str, loads: list[SegmentBuffers], offers: list[Selection | None], tensors: int) -> InFlight:
        """Collective. Send one message of this step."""
        control = RoundHeader(self.step, self.session.fingerprint, 0, 0, (False,) * tensors)
        return self._exchange.start(name, loads, offers, control)

    def wait(self, pending: InFlight) -> None:
        """Collective. Receive it."""
        self._exchange.wait(pending)

    def _send(self) -> Callable[[], object]:
        pending = self.start("probe", [self.load], [self.offer], len(self.segment.slots))

        def wait() -> None:
            # During backward the network's threads must share the cores: a message takes longer than on an idle host.
            start = time.monotonic()
            while self._shares_cores and time.monotonic() - start < self._busy:
                if self._exchange.arrived(pending):
                    break
                torch.mm(BUSY, BUSY)
            self._exchange.wait(pending)

        return wait

    def select(self, runs: int) -> tuple[float, float]:
        """Collective. Seconds to select, and to pack and start, means."""
        selecting = packing = 0.0
        for _ in range(runs):
            begin = self.now()
            self.offer = self._select()
            selected = self.now()
            wait = self._send()
            selecting, packing = selecting + selected - begin, packing + self.now() - selected
            wait()
        return selecting / runs, packing / runs

    def work(self, pieces: int) -> float:
        """Seconds of so many pieces of work."""
        begin = self.now()
        for _ in range(pieces):
            torch.mm(BUSY, BUSY)
        return self.now() - begin

    def burst(self, messages: int, pieces: int) -> float:
        """Collective. Seconds of work, so much for each of ``MANY`` messages, with this many under way.

        All are received in the end.
        """
        scratch = SegmentBuffers(self.segment, self.load.work, torch.empty_like(self.load.update))
        under_way = []
        begin = self.now()
        for number in range(MANY):
            if number < messages:
                self.offer = self._select()
                under_way.append(self.start(f"probe {number}", [scratch], [self.offer], len(self.segment.slots)))
            self.work(pieces)
        for pending in under_way:
            self._exchange.wait(pending)
            self._exchange.finish(pending)
        return self.now() - begin

    def exchange(self, runs: int) -> float:
        """Collective. Seconds from the packed message to its arrival, the median; dense, packing counts too."""
        took = []
        for _ in range(runs):
            begin = self.now()
            wait = self._send()
            begin = self.now() if self.offer is not None else begin
            wait()
            took.append(self.now() - begin)
        return statistics.median(took)

    def now(self) -> float:
        """Seconds, when all devices have got there."""
        device = self.segment.lane.device
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)  # between steps: nothing else runs
        return time.perf_counter()


def _zeros(load: SegmentBuffers) -> SegmentBuffers:
    """Return a load that may be summed where it lies, again and again.

    Between steps ``work`` is nobody's, unless the last update is in it.
    """
    shared = load.work.data_ptr() == load.update.data_ptr()
    return SegmentBuffers(load.segment, torch.zeros_like(load.work) if shared else load.work.zero_(), load.update)
