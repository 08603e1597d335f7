# SPDX-License-Identifier: Apache-2.0
"""Gather every rank's selection in one all-gather, and add them up in rank order: ``sparse``.

Dense segments may share the message: for a few small tensors that is cheaper than an
all-reduce of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from agmerge.errors import MessageError
from agmerge.exchanges.base import Exchange, InFlight, SegmentBuffers
from agmerge.exchanges.message import fused
from agmerge.exchanges.message.codec import clear_behind, saturated
from agmerge.exchanges.message.format import Flag, Format, RoundHeader, Section
from agmerge.exchanges.message.offers import spread, without_zeros
from agmerge.exchanges.message.values import VALUES, WHOLE
from agmerge.tensors.layout import Segment
from sparsifiers import Selection, kernel, kernel_message, kernel_updates
from sparsifiers.deferred import Deferred

Part = tuple[torch.Tensor, torch.Tensor]  # indices (int32) and values of one rank


class SparseExchange(Exchange):
    """All-gather of every rank's selection, added up in the same order on all ranks.

    1. Each rank gathers the values at the selected indices, encodes both into one message behind a header
       (:class:`agmerge.exchanges.message.format.Format`), and subtracts the values as read from its work.
    2. One all-gather brings every message to every rank, under backward; a rank receives ``(W - 1) * size`` bytes.
    3. Each rank checks all messages, then adds ``scale * values`` to the update, rank by rank.

    ``context.wire`` is the value codec of sparse sections. With ``context.rounds_dense`` dense segments in the message
    are rounded, too (:data:`agmerge.exchanges.message.values.WHOLE`), as a section of which every element is selected.
    """

    pipelines_parts = True

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Encode the selections, commit their values as receivers read them, and start the all-gather."""
        capacities = [None if offer is None else offer.capacity for offer in offers]
        device = loads[0].work.device
        layout = self.format_of(name, loads, capacities, self.context.wire, self._codec_of_whole(device))
        message = self.keep(("message", name), layout.size, torch.uint8, device)
        received = self.keep(("received", name), layout.size * self.comm.size, torch.uint8, device)
        elements = 0
        counts: list[int | torch.Tensor] = []
        for load, offer, section in zip(loads, offers, layout.sections, strict=True):
            if offer is None:
                elements += load.segment.numel
                counts.append(self._write_whole(load, section, message))
            else:
                elements += min(offer.capacity, load.segment.numel)
                counts.append(self._write(load, offer, section, message))
        layout.write_header(message, control, counts, seal=True)
        handle = self.comm.all_gather(received, message, name)
        return InFlight(
            name, loads, control, handle, layout.size, elements, message, received, layout, codecs=layout.by_codec
        )

    def whole_bytes(self, segment: Segment) -> int:
        """Return the bytes of a dense segment in a shared message, in its codec."""
        codec = None if segment.tensor_class.dtype.is_complex else self._codec_of_whole(segment.tensor_class.device)
        return super().whole_bytes(segment) if codec is None else VALUES[codec].size(segment.length)

    def _codec_of_whole(self, device: torch.device) -> str | None:
        """Return the value codec of dense segments on ``device``; None: they travel as they are."""
        return WHOLE.get(self.context.wire) if self._keeps_rounding(device) else None

    def _keeps_rounding(self, device: torch.device) -> bool:
        """Return whether ``work`` of dense segments on ``device`` keeps their quantisation error."""
        return self.context.rounds_dense and device.type == "cpu"

    def _write_whole(self, load: SegmentBuffers, section: Section, message: torch.Tensor) -> int:
        """Write all of one segment, and commit it if its work has a residual; return the count to announce."""
        where = message[section.values]
        if section.value is not None:
            self.store.subtract_sent(load.segment, None, section.value.encode(load.work, where))
            return load.segment.length
        sent = where.view(load.segment.tensor_class.dtype)
        if not self.store.has_residual:
            sent.copy_(load.work)
            return 0
        # With the residual, a gradient of 16 bits may be beyond its dtype.
        sent.copy_(load.work if sent.dtype == load.work.dtype else saturated(load.work, torch.finfo(sent.dtype).max))
        self.store.subtract_sent(load.segment, None, sent)
        return 0

    def _write(
        self, load: SegmentBuffers, offer: Selection, section: Section, message: torch.Tensor
    ) -> int | torch.Tensor:
        """Write the selection of one segment, and subtract it from its work; return the count to announce."""
        assert section.index is not None and section.value is not None
        if isinstance(offer, Deferred) and self._take_on_device(load, offer, section, message):
            return offer.count
        if self._take(load, offer, section, message):
            return offer.count
        chosen = offer.values
        if chosen is None:
            chosen = clear_behind(load.work.index_select(0, offer.indices), offer.count)
        self.store.observe(chosen, offer.count)
        if not section.value.has_zero:
            offer, chosen = without_zeros(offer, chosen)
        if section.index.sends_all:
            values, count = spread(offer, chosen, section.index.length)
            sent = section.value.encode(values, message[section.values])
            if values is not chosen:
                sent = clear_behind(sent.index_select(0, offer.indices), offer.count)
        else:
            count = offer.count
            fused.encode_indices(section, offer.indices, count, message)
            sent = section.value.encode(chosen, message[section.values], count)
        self.store.subtract_sent(load.segment, offer.indices, sent)
        return count

    def _take(self, load: SegmentBuffers, offer: Selection, section: Section, message: torch.Tensor) -> bool:
        """Write and subtract, in one pass, values that travel as they are; False: nothing was done."""
        values = fused.values_as_they_are(section, message, load.work.dtype)
        if values is None or isinstance(offer.count, torch.Tensor):
            return False
        indices, taken = offer.indices[: offer.count], values[: offer.count]
        if not self.store.write_and_subtract(
            load.segment,
            lambda commit, momentum: commit and kernel_message.write_and_subtract(load.work, indices, taken, momentum),
        ):
            return False
        self.store.observe(clear_behind(values, offer.count), offer.count)
        fused.encode_indices(section, offer.indices, offer.count, message)
        return True

    def _take_on_device(self, load: SegmentBuffers, offer: Deferred, section: Section, message: torch.Tensor) -> bool:
        """Write and subtract with kernels, which select while they write; False: nothing was done."""
        places = fused.fused_places(section, message)
        if places is None or not self.store.write_and_subtract(load.segment, functools.partial(offer.write, *places)):
            return False
        self.store.observe(places[0].values, offer.count)
        return True

    def wait(self, pending: InFlight) -> RoundHeader:
        """Collective. Wait for the all-gather, check all messages, and return the merged header."""
        pending.handle.wait(self.timeout)
        layout: Format = pending.extra
        messages = pending.received.view(self.comm.size, -1)
        control = layout.read_headers(messages, pending.control, pending.name)
        layout.check_payloads(messages, pending.name)
        return control

    def can_queue(self, pending: InFlight) -> bool:
        return pending.has_streams

    def wait_on_stream(self, pending: InFlight) -> None:
        """Collective. Make the device's stream wait for the all-gather."""
        pending.handle.wait_on_stream(self.timeout)
        layout: Format = pending.extra
        pending.said.append(pending.received.view(self.comm.size, -1)[:, : 4 * layout.words])

    def read(self, pending: InFlight, said: Sequence[torch.Tensor]) -> RoundHeader:
        """Check the headers of all ranks, and whether their indices were right; return the merged header."""
        headers, *good = said
        layout: Format = pending.extra
        control = layout.read_headers(headers, pending.control, pending.name, sealed=False)
        if not control.flags & (Flag.REPLAN | Flag.NONFINITE):  # else a rank may have sent anything
            sparse = (section for section in layout.sections if section.capacity is not None)
            for section, by_rank in zip(sparse, good, strict=True):
                _refuse_disordered(pending.name, section, by_rank.tolist())
        return control

    def finish(self, pending: InFlight) -> None:
        if pending.on_device:
            self._finish_on_device(pending)
            return
        layout: Format = pending.extra
        messages = pending.received.view(self.comm.size, -1)
        parts = self._decode(pending, messages)  # all of them before anything is written
        for load, section, sparse in zip(pending.loads, layout.sections, parts, strict=True):
            if section.capacity is not None and self.store.takes_selections(load.segment, sparse, self.scale):
                continue
            total = self.accumulator(load)
            if section.capacity is None:
                self._add_dense(total, [layout.whole(message, section) for message in messages])
            elif not kernel_updates.write_sum(total, sparse, self.scale):
                total.zero_()
                for indices, values in sparse:
                    if not kernel.scatter(total, indices, values, self.scale):
                        total.index_add_(0, indices, values * self.scale)
            if total is not load.update:
                load.update.copy_(total)

    def _finish_on_device(self, pending: InFlight) -> None:
        """Queue the updates, for all ranks at once; :meth:`read` checks which ranks' indices were right.

        Damaged messages, too, have nothing written outside of an update.
        """
        layout: Format = pending.extra
        messages = pending.received.view(self.comm.size, -1)
        for number, (load, section) in enumerate(zip(pending.loads, layout.sections, strict=True)):
            total = self.accumulator(load)
            if fused.fused_adds(section, total):
                good = fused.fused_add(layout, number, messages, total, self.scale)
                pending.said += [] if good is None else [good]
            elif section.index is None or section.value is None:
                rows = layout.whole(messages, section).to(total.dtype) * self.scale
                total.copy_(rows[0])
                for row in rows[1:]:
                    total.add_(row)
            else:
                counts = layout.counts_of(messages, number)
                indices, good = section.index.decode_rows(messages[:, section.indices], counts)
                values = section.value.decode_rows(messages[:, section.values], indices.shape[1], load.work.dtype)
                if not section.value.has_zero:
                    slots = torch.arange(indices.shape[1], dtype=torch.int32, device=counts.device)
                    values.masked_fill_(slots >= counts.unsqueeze(1), 0.0)
                values.mul_(self.scale)
                total.zero_()
                for rank in range(self.comm.size):
                    # Unique within a rank, but for entries that add 0: the same sum in any order the device takes.
                    total.index_add_(0, indices[rank], values[rank])
                pending.said.append(good)
            if total is not load.update:
                load.update.copy_(total)

    def _decode(self, pending: InFlight, messages: torch.Tensor) -> list[list[Part]]:
        """Return the indices and values of every rank, by section and rank; [] for dense sections.

        ``messages``: uint8[W, size]. Raises :class:`agmerge.MessageError` where indices cannot be right.
        """
        layout: Format = pending.extra
        counts = layout.counts(messages)
        parts: list[list[Part]] = []
        for number, (load, section) in enumerate(zip(pending.loads, layout.sections, strict=True)):
            parts.append([])
            if section.index is None or section.value is None:
                continue
            checks: list[bool] = []  # by rank
            for rank, message in enumerate(messages):
                count = counts[rank][number]
                indices, good = section.index.decode(message[section.indices], count)
                values = section.value.decode(message[section.values], count, load.work.dtype)
                parts[-1].append((indices, values))
                checks.append(bool(good))
            _refuse_disordered(pending.name, section, checks)
        return parts

    def _add_dense(self, total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Write the sum of ``scale * part`` over all ranks' parts into ``total``, each product rounded by itself."""
        total.copy_(parts[0]).mul_(self.scale)
        scaled = self.keep(("scaled",), total.numel(), total.dtype, total.device)
        for part in parts[1:]:
            # Not add_(part, alpha=scale): whether that rounds once or twice is up to the processor.
            total.add_(scaled.copy_(part).mul_(self.scale))


def _refuse_disordered(name: str, section: Section, good: Sequence[bool]) -> None:
    """Raise :class:`agmerge.MessageError` for the first rank of which the indices cannot be right, by ``good``."""
    if not all(good):
        raise MessageError(
            f"AGM501: {name}: the indices of rank {list(good).index(False)} are not ascending within 0 to "
            f"{section.segment.length - 1}, or not as many as announced. Its message was damaged, or its sparsifier "
            "does not follow the contract of a Selection."
        )
