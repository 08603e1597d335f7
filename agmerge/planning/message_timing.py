# SPDX-License-Identifier: Apache-2.0
"""Time one message, selected, packed and sent as in a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import cast

import torch

from agmerge.exchanges import Exchange, InFlight, SegmentBuffers
from agmerge.exchanges.message.format import RoundHeader
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Segment
from sparsifiers import Kind, Selection, Sparsifier

PIECE_OF_WORK = torch.ones(128, 128)  # its product with itself takes about a tenth of a millisecond
BURST = 4  # small messages in a row


class MessageTimer:
    """Timer of one message, sent again and again: one segment, selected from and exchanged as in a step.

    All times are this rank's own. No residual or update that is still needed is written to. Used between two steps and
    not after the next one, in which memory changes places.
    """

    def __init__(self, buffers: MergeBuffers, segment: Segment, exchange: Exchange, step: int, backward: float) -> None:
        """Select once, so that the length of the message is known.

        Args:

            buffers: the merge buffers in use, with their memory and sparsifier.
            segment: the elements of the message.
            exchange: how it is sent: selected from if that is a sparse one, else dense.
            step: its density and number count.
            backward: seconds of a backward pass on this rank; half of it goes on after a message has left.
        """
        self.buffers, self.segment, self.step, self._exchange = buffers, segment, step, exchange
        self.began = self.now()
        self.sent = 0  # bytes handed to collectives
        self._busy = backward / 2  # seconds, about, that backward goes on after a message has left
        self.prepares = exchange.prepares is not None  # factors are made of segments, or few bits, tensor by tensor
        self.segment_buffers = buffers.flat.operands(segment)
        if not exchange.sparse:
            quantises = exchange.prepares is Kind.QUANTISED
            self.segment_buffers = _in_use(self.segment_buffers) if quantises else _zeros(self.segment_buffers)
        self.on_host = segment.tensor_class.device.type == "cpu"
        self._shares_cores = self.on_host and exchange.can_poll  # backward and the network's threads
        self.selection = self._select()  # the last one; None: the segment is sent dense
        self.factorises = exchange.factorises  # segments are matrices, and factors of these are sent
        self.capacity = self._elements()  # of a message

    def start(
        self, name: str, segment_buffers: list[SegmentBuffers], selections: list[Selection | None], tensors: int
    ) -> InFlight:
        """Collective. Send a message of these segments, ``tensors`` in all, and return it under way."""
        header = RoundHeader(self.step, self.buffers.fingerprint, 0, 0, (False,) * tensors)
        return self._exchange.start(name, segment_buffers, selections, header)

    def wait(self, in_flight: InFlight) -> None:
        """Collective. Receive a message and write nothing."""
        self._exchange.wait(in_flight)
        self.sent += in_flight.bytes

    def time_selection(self, runs: int) -> tuple[float, float]:
        """Collective. Return the seconds to select, and those to pack and start: means of ``runs`` messages."""
        selecting = packing = 0.0
        for _ in range(runs):
            begin = self.now()
            self.selection = self._select()
            selected = self.now()
            wait = self._send()
            selecting, packing = selecting + selected - begin, packing + self.now() - selected
            wait()
        return selecting / runs, packing / runs

    def time_exchange(self, runs: int) -> float:
        """Collective. Return the seconds from the packed message to its arrival, the median of ``runs`` messages.

        For dense segments packing counts, too.
        """
        seconds = []
        for _ in range(runs):
            begin = self.now()
            wait = self._send()
            begin = self.now() if self.selection is not None or self.prepares else begin
            wait()
            seconds.append(self.now() - begin)
        return statistics.median(seconds)

    def time_work(self, pieces: int) -> float:
        """Return the seconds of so many pieces of work, with no message under way."""
        begin = self.now()
        for _ in range(pieces):
            torch.mm(PIECE_OF_WORK, PIECE_OF_WORK)
        return self.now() - begin

    def time_burst(self, messages: int, pieces: int) -> float:
        """Collective. Return the seconds of ``BURST`` times so many pieces of work, with messages sent in between.

        The first ``messages`` of the turns send one each, and at the end all are received.
        """
        scratch = SegmentBuffers(self.segment, self.segment_buffers.work, torch.empty_like(self.segment_buffers.update))
        started = []
        begin = self.now()
        for number in range(BURST):
            if number < messages:
                self.selection = self._select()
                started.append(self.start(f"probe {number}", [scratch], [self.selection], len(self.segment.slots)))
            self.time_work(pieces)
        for in_flight in started:
            self.wait(in_flight)
            self._exchange.finish(in_flight)
        return self.now() - begin

    def now(self) -> float:
        """Return a time in seconds, when the device has finished all queued work."""
        device = self.segment.tensor_class.device
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)  # between steps: nothing else runs
        return time.perf_counter()

    def _elements(self) -> int:
        """Return the elements of a message."""
        if self.factorises and self.buffers.flat.bases is not None:
            return sum(map(self.buffers.flat.bases.elements, self.segment.slots))
        return self.segment.numel if self.selection is None else self.selection.indices.numel()

    def _select(self) -> Selection | None:
        """Select from the segment under a key of its own; return None where it is sent dense."""
        if not self._exchange.sparse or not self.segment.tensor_class.sparse:
            return None
        part = self.buffers.config.compression.compressor.part(Kind.SPARSE)
        assert part is not None  # the tensor class is a sparse one
        sparsifier = cast(Sparsifier, part.unobserved)  # figures are of training, and not of probes
        work, k, shapes = self.buffers.vector(self.segment, self.step)
        return sparsifier.select(work, k=k, key=f"probe of {self.segment.numel}", step=self.step, shapes=shapes)

    def _send(self) -> Callable[[], object]:
        """Collective. Send the message; return the function that waits for it."""
        in_flight = self.start("probe", [self.segment_buffers], [self.selection], len(self.segment.slots))

        def wait() -> None:
            # During backward the network's threads must share the cores: a message takes longer than on an idle host.
            start = time.monotonic()
            while self._shares_cores and time.monotonic() - start < self._busy:
                if self._exchange.arrived(in_flight):
                    break
                torch.mm(PIECE_OF_WORK, PIECE_OF_WORK)
            self.wait(in_flight)

        return wait


def _zeros(segment_buffers: SegmentBuffers) -> SegmentBuffers:
    """Return buffers that may be summed where they lie, again and again.

    Between steps ``work`` is free to be overwritten, unless the last update is in it.
    """
    shared = segment_buffers.work.data_ptr() == segment_buffers.update.data_ptr()
    work = torch.zeros_like(segment_buffers.work) if shared else segment_buffers.work.zero_()
    return SegmentBuffers(segment_buffers.segment, work, segment_buffers.update)


def _in_use(segment_buffers: SegmentBuffers) -> SegmentBuffers:
    """Return separate buffers, with numbers in them: zeros might be quantised faster."""
    work = torch.linspace(-1.0, 1.0, segment_buffers.segment.length, device=segment_buffers.work.device)
    update = torch.empty_like(segment_buffers.update)
    return SegmentBuffers(segment_buffers.segment, work.to(segment_buffers.work.dtype), update)
