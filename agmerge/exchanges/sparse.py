# SPDX-License-Identifier: Apache-2.0
"""Sparse exchange, ``sparse``: one all-gather of every rank's selection, added up in rank order.

Dense segments may share the message: for a few small tensors that is cheaper than an all-reduce of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agmerge.errors import MessageError
from agmerge.exchanges.base import Exchange, InFlight, SegmentBuffers, wait_for
from agmerge.exchanges.message.format import Flag, Format, RoundHeader, Section
from agmerge.exchanges.message.indices import in_order
from agmerge.exchanges.message.scaled import VALUES, WHOLE, clear_behind, saturated
from agmerge.tensors.layout import Segment
from sparsifiers import Selection, gpu, native
from sparsifiers.deferred import Deferred

# Sections in few passes, or kernels of the device where it has them, which take a launch or two where torch's
# operations take dozens: the same bytes and the same sums.


def writes(section: Section, device: torch.device) -> bool:
    """Return whether kernels of ``device`` write the indices of a section."""
    has_layout = section.index is not None and section.index.layout is not None
    return has_layout and device.type != "cpu" and gpu.is_fused(device)


def fused_places(section: Section, message: Tensor) -> tuple[gpu.Slots, gpu.IndexSection] | None:
    """Return where kernels write a section into ``message``, uint8[size]; None: they do not write all of it.

    They do where values travel as they are, or rounded.
    """
    dtype = None if section.value is None else section.value.dtype
    if dtype is None or not writes(section, message.device):
        return None
    assert section.index is not None and section.index.layout is not None
    indices = torch.empty(section.index.capacity, dtype=torch.int32, device=message.device)
    count = torch.empty((), dtype=torch.int32, device=message.device)
    slots = gpu.Slots(indices, message[section.values].view(dtype), count)
    return slots, gpu.IndexSection(section.index.layout, message[section.index_words].view(torch.int32))


def values_as_they_are(section: Section, message: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return where ``message``, uint8[size] on the host, has values of ``dtype`` as they are; None: it has not."""
    assert section.index is not None and section.value is not None
    if section.value.dtype != dtype or section.index.sends_all or message.device.type != "cpu":
        return None
    return message[section.values].view(dtype)


def encode_indices(section: Section, indices: Tensor, count: int | Tensor, message: Tensor) -> None:
    """Write the first ``count`` of ``indices``, int32[capacity], into the section of ``message``, uint8[size]."""
    assert section.index is not None
    if not writes(section, message.device):
        section.index.encode(indices, count, message[section.indices])
        return
    assert section.index.layout is not None
    words = message[section.index_words].view(torch.int32)
    words.zero_()
    gpu.encode_indices(indices, count, gpu.IndexSection(section.index.layout, words))


def fused_adds(section: Section, total: Tensor) -> bool:
    """Return whether kernels add up a section into ``total``, fp32[length]."""
    return gpu.has_kernels(total) and (section.index is None or section.index.layout is not None)


def fused_add(layout: Format, number: int, messages: Tensor, total: Tensor, scale: float) -> Tensor | None:
    """Write the sum of ``scale`` times all ranks' values of section ``number`` into ``total``, fp32[length].

    ``messages``: uint8[W, size]. Returns which ranks' indices were right, int32[W]: 1 or 0; None for a dense section.
    Damaged messages, too, have nothing written outside of ``total``.
    """
    section = layout.sections[number]
    if section.index is None or section.value is None:
        gpu.add_whole(total, layout.whole(messages, section), scale)
        return None
    codec = section.index.layout
    assert codec is not None
    ranks, capacity, device = len(messages), section.index.capacity, messages.device
    counts, words = layout.counts_of(messages, number), messages[:, section.index_words].view(torch.int32)
    indices = torch.empty(ranks, capacity, dtype=torch.int32, device=device)
    good = torch.empty(ranks, dtype=torch.int32, device=device)
    tiles = torch.empty(ranks, codec.tiles, dtype=torch.int32, device=device)
    gpu.decode_indices(words, counts, codec, indices, good, tiles)
    values = section.value.read_rows(messages[:, section.values], capacity, total.dtype)
    gpu.add_ranks(total, indices, values, counts, scale)
    return good


# Selections in the form that codecs take.


def without_zeros(offer: Selection, values: torch.Tensor) -> tuple[Selection, torch.Tensor]:
    """Return ``offer`` and ``values``, (capacity,), 0 at and after the count, without zeros; later ones move up.

    On a device the count then stays there; on the host, these are the same objects where nothing is 0.
    """
    if values.device.type == "cpu":
        used = values.numpy() != 0  # seven times as fast as torch's
        count = int(np.count_nonzero(used))
        if count == offer.count:
            return offer, values
        chosen = torch.from_numpy(np.flatnonzero(used))
        indices, moved = torch.zeros_like(offer.indices), torch.zeros_like(values)
        torch.index_select(offer.indices, 0, chosen, out=indices[:count])
        torch.index_select(values, 0, chosen, out=moved[:count])
        return Selection(indices, count), moved
    kept = values != 0
    # Zeros fall behind the last entry.
    places = torch.where(kept, kept.cumsum(0) - 1, values.numel())
    indices = offer.indices.new_zeros(values.numel() + 1).scatter_(0, places, offer.indices)
    moved = values.new_zeros(values.numel() + 1).scatter_(0, places, values)
    return Selection(indices[:-1], kept.sum(dtype=torch.int32)), moved[:-1]


def spread(offer: Selection, values: torch.Tensor, length: int) -> tuple[torch.Tensor, int | torch.Tensor]:
    """Return ``values``, (capacity,), at their places among ``length``, 0 at others, and the count to announce.

    The count is ``length``; 0 if the selection is not in order, which receivers report as an error. On a device it
    stays there; on the host, ``values`` are returned themselves where all are selected.
    """
    if offer.indices.device.type != "cpu":
        return spread_on_device(offer, values, length)
    chosen = offer.trimmed()
    good = in_order(offer.indices[: len(chosen)], length)
    if good and len(chosen) == length:
        return values, length
    return values.new_zeros(length).index_copy_(0, chosen, values[: len(chosen)]), good * length


def spread_on_device(offer: Selection, values: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of :func:`spread`, on any device, without waiting for it."""
    slots = torch.arange(offer.indices.numel(), dtype=torch.int32, device=values.device)
    live = slots < offer.count
    places = torch.where(live, offer.indices, length)  # padding falls behind the last one
    good = ((places[1:] > places[:-1]) | ~live[1:]).all()
    return values.new_zeros(length + 1).scatter_(0, places.long(), values)[:-1], good * length


# The exchange.

Part = tuple[torch.Tensor, torch.Tensor]  # indices (int32) and values of one rank


class SparseExchange(Exchange):
    """All-gather of every rank's selection, added up in the same order on all ranks.

    1. Each rank gathers the values at the selected indices, encodes both into one message behind a header
       (:class:`agmerge.exchanges.message.format.Format`), and subtracts the values as read from its work.
    2. One all-gather brings every message to every rank, under backward; a rank receives ``(W - 1) * size`` bytes.
    3. Each rank checks all messages, then adds ``scale * values`` to the update, rank by rank.

    ``context.wire`` is the value codec of sparse sections. With ``context.rounds_dense`` dense segments in the message
    are rounded, too (:data:`agmerge.exchanges.message.scaled.WHOLE`), as a section of which every element is selected.
    """

    needs_selection = False
    chooses_codec = rounds_dense = True
    pipelines_parts = True
    queues = True

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
        for load, offer, capacity, section in zip(loads, offers, capacities, layout.sections, strict=True):
            if offer is None or capacity is None:
                elements += load.segment.numel
                counts.append(self._write_whole(load, section, message))
            else:
                elements += min(capacity, load.segment.numel)
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
        if not section.value.has_zero:
            offer, chosen = without_zeros(offer, chosen)
        if section.index.sends_all:
            values, count = spread(offer, chosen, section.index.length)
            sent = section.value.encode(values, message[section.values])
            if values is not chosen:
                sent = clear_behind(sent.index_select(0, offer.indices), offer.count)
        else:
            count = offer.count
            encode_indices(section, offer.indices, count, message)
            sent = section.value.encode(chosen, message[section.values], count)
        self.store.subtract_sent(load.segment, offer.indices, sent)
        return count

    def _take(self, load: SegmentBuffers, offer: Selection, section: Section, message: torch.Tensor) -> bool:
        """Write and subtract, in one pass, values that travel as they are; False: nothing was done."""
        values = values_as_they_are(section, message, load.work.dtype)
        if values is None or isinstance(offer.count, torch.Tensor):
            return False
        indices, taken = offer.indices[: offer.count], values[: offer.count]
        if not self.store.write_and_subtract(
            load.segment,
            lambda commit, momentum: commit and native.write_and_subtract(load.work, indices, taken, momentum),
        ):
            return False
        clear_behind(values, offer.count)
        encode_indices(section, offer.indices, offer.count, message)
        return True

    def _take_on_device(self, load: SegmentBuffers, offer: Deferred, section: Section, message: torch.Tensor) -> bool:
        """Write and subtract with kernels, which select while they write; False: nothing was done."""
        places = fused_places(section, message)
        if places is None or not self.store.write_and_subtract(load.segment, functools.partial(offer.write, *places)):
            return False
        return True

    def arrive(self, pending: InFlight, *, on_stream: bool = False) -> None:
        """Collective. Wait for the all-gather."""
        wait_for(pending.handle, self.timeout, on_stream=on_stream)

    def announced(self, pending: InFlight) -> list[Tensor]:
        layout: Format = pending.extra
        return [pending.received.view(self.comm.size, -1)[:, : 4 * layout.words], *pending.good]

    def check(self, pending: InFlight, announced: Sequence[Tensor]) -> RoundHeader:
        """Check the messages of all ranks, on a device their headers and indices; return the merged header."""
        headers, *good = announced
        layout: Format = pending.extra
        control = layout.read_headers(headers, pending.control, pending.name, sealed=not pending.on_device)
        if not pending.on_device:
            layout.check_payloads(pending.received.view(self.comm.size, -1), pending.name)
        if not control.flags & (Flag.REPLAN | Flag.NONFINITE):  # else a rank may have sent anything
            self._check_indices(pending, good)
        pending.is_checked = True
        return control

    def _check_indices(self, pending: InFlight, good: Sequence[Tensor]) -> None:
        """Raise :class:`agmerge.MessageError` for indices that a device found wrong. ``good``: [], or by section."""
        sparse = [section for section in pending.extra.sections if section.capacity is not None]
        for section, by_rank in zip(sparse, good, strict=bool(good)):
            _refuse_disordered(pending.name, section, by_rank.tolist())

    def finish(self, pending: InFlight) -> None:
        if pending.on_device:
            self._finish_on_device(pending)
            if pending.is_checked:
                self._check_indices(pending, pending.good)
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
            elif not native.write_sum(total, sparse, self.scale):
                total.zero_()
                for indices, values in sparse:
                    if not native.scatter(total, indices, values, self.scale):
                        total.index_add_(0, indices, values * self.scale)
            if total is not load.update:
                load.update.copy_(total)

    def _finish_on_device(self, pending: InFlight) -> None:
        """Queue the updates, for all ranks at once, and fill ``pending.good`` with which ranks' indices were right.

        Damaged messages, too, have nothing written outside of an update.
        """
        layout: Format = pending.extra
        messages = pending.received.view(self.comm.size, -1)
        for number, (load, section) in enumerate(zip(pending.loads, layout.sections, strict=True)):
            total = self.accumulator(load)
            if fused_adds(section, total):
                good = fused_add(layout, number, messages, total, self.scale)
                pending.good += [] if good is None else [good]
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
                pending.good.append(good)
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
