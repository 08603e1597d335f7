# SPDX-License-Identifier: Apache-2.0
"""Messages of a round that have left: their bytes, their arrival, their headers and their updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from agmerge.exchanges import InFlight, Noise, SegmentBuffers
from agmerge.exchanges.message.format import Flag, RoundHeader
from agmerge.exchanges.routing import Message
from agmerge.metrics.step_times import StepRecorder
from agmerge.metrics.totals import Totals
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.queued_messages import said_by_all
from sparsifiers import Kind, Selection

SentMessage = tuple[Message, InFlight]


class MessagesUnderWay:
    """Messages of a round, merge buffer by merge buffer, from their start to their updates.

    On devices that can wait for messages by themselves, the host queues all work on them with :meth:`queue`, and then
    waits once for their headers. Elsewhere :meth:`headers` waits for one merge buffer's messages after the other.
    """

    def __init__(self, buffers: MergeBuffers, totals: Totals, recorder: StepRecorder) -> None:
        self._buffers, self._totals, self._recorder = buffers, totals, recorder
        self.sent: list[list[SentMessage]] = []  # per merge buffer; empty: it is not exchanged in this round
        # By message: bytes, elements, and bytes by codec that are in the totals already.
        self._counted: dict[int, tuple[int, int, Mapping[str, int]]] = {}
        self._waited: set[int] = set()  # by `id`: messages that devices wait for, or have
        self._arrived = 0  # merge buffers with messages that are known to have arrived
        self._said: dict[int, list[torch.Tensor]] = {}  # by the `id` of a queued message: input of `Exchange.read`

    def start(
        self,
        message: Message,
        operands: Sequence[SegmentBuffers],
        selections: Sequence[Selection | None],
        header: RoundHeader,
    ) -> SentMessage:
        """Collective. Start one message, and count its bytes."""
        if self._buffers.store.counts_zeros and not header.flags & Flag.REPLAN:
            self._count_zeros(message, operands)
        in_flight = message.exchange.start(message.name, operands, selections, header)
        self._count(in_flight)
        return message, in_flight

    def _count_zeros(self, message: Message, operands: Sequence[SegmentBuffers]) -> None:
        """Count zeros of tensors that could be quantised, and go dense: exchanges in few bits count their own."""
        for load in operands if message.exchange.prepares is not Kind.QUANTISED else ():
            if load.segment.tensor_class.kind is Kind.QUANTISED:
                for slot in load.segment.slots:
                    start = slot.offset - load.segment.start
                    self._buffers.store.count_zeros(slot, load.work[start : start + slot.numel])

    def poll(self) -> None:
        """Collective. Record which messages have arrived: the ends of hidden exchanges could not be timed otherwise.

        Waits for nothing. Second phases of later merge buffers do not wait for earlier ones.
        """
        while self._arrived < len(self.sent):
            for message, in_flight in self.sent[self._arrived]:
                if not message.exchange.arrived(in_flight):
                    for exchange in self._buffers.in_use:
                        exchange.advance()
                    return
            if self.sent[self._arrived]:
                self._recorder.arrived()
            self._arrived += 1

    def queue(self, buffers: int, *, writes: bool) -> None:
        """Collective. Queue all device work on messages of the first so many merge buffers; wait for their headers.

        Of a merge buffer all messages are queued, or none is. ``writes``: their updates, too, but for exchanges that
        overwrite gradients. Should the round have to be repeated, its gradients do not lie where updates were written:
        see :meth:`Round.add`. Called again after an error, it leaves out what was queued before that.
        """
        queued = []
        for buffer, messages in enumerate(self.sent[:buffers]):
            if messages and all(message.exchange.can_queue(in_flight) for message, in_flight in messages):
                queued += [in_flight for _, in_flight in messages]
                left = [one for one in messages if id(one[1]) not in self._waited]
                if not left:
                    continue
                self._recorder.mark(buffer)
                for message, in_flight in left:
                    message.exchange.wait_on_stream(in_flight)
                    self._waited.add(id(in_flight))
                self._recorder.mark(buffer)
                for message, in_flight in messages if writes else ():
                    if not message.exchange.overwrites:
                        message.exchange.finish(in_flight)
                self._recorder.mark(buffer)
        self._said = said_by_all(queued, self._buffers.config.guards.timeout)

    def headers(self, buffer: int) -> list[RoundHeader]:
        """Collective. Return the merged headers of a merge buffer's messages; wait for those that were not queued."""
        messages = self.sent[buffer]
        if self._is_queued(buffer):
            found = [message.exchange.read(in_flight, self._said[id(in_flight)]) for message, in_flight in messages]
        else:
            self._recorder.mark(buffer)
            found = [message.exchange.wait(in_flight) for message, in_flight in messages]
            self._recorder.mark(buffer)
        for _, in_flight in messages:
            self._count(in_flight)  # bytes sent since its start
        self.poll()
        return found

    def finish(self, buffer: int, *, writes: bool) -> list[Noise]:
        """Collective. Write the updates of a merge buffer's messages, if ``writes``; return their noise.

        Updates that were queued are left to devices.
        """
        noises, is_queued = [], self._is_queued(buffer)
        for message, in_flight in self.sent[buffer] if writes else ():
            if message.exchange.overwrites or not is_queued:
                message.exchange.finish(in_flight)
            noise = message.exchange.noise(in_flight)
            noises += [] if noise is None else [noise]
        if not is_queued:
            self._recorder.mark(buffer)
        self.poll()
        return noises

    def _is_queued(self, buffer: int) -> bool:
        return id(self.sent[buffer][0][1]) in self._said

    def _count(self, in_flight: InFlight) -> None:
        """Add a message's new bytes and elements to the totals: some messages go on sending after their start."""
        size, elements, codecs = self._counted.get(id(in_flight), (0, 0, {}))
        if (in_flight.bytes, in_flight.elements) != (size, elements):
            new = {what: count - codecs.get(what, 0) for what, count in in_flight.codecs.items()}
            by_codec = new if sum(new.values()) == in_flight.bytes - size else None
            self._totals.sent(in_flight.bytes - size, in_flight.elements - elements, by_codec)
            self._counted[id(in_flight)] = (in_flight.bytes, in_flight.elements, dict(in_flight.codecs))
