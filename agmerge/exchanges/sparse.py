"""``sparse``: every rank sends what it selected, one all-gather, added up in rank order.

Dense segments may ride in the same message, whole: for a few small tensors that is cheaper than an
all-reduce of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmerge.errors import MessageError
from agmerge.exchanges.base import Exchange, InFlight, SegmentBuffers
from agmerge.exchanges.message.format import Format, RoundHeader, Section
from sparsifiers import Selection, kernel

Part = tuple[torch.Tensor, torch.Tensor]  # indices and values of one rank


class SparseExchange(Exchange):
    """All-gather of sparse sections; bytes received are ``(W - 1) * size``.

    ``context.wire``: the value codec of sparse sections.
    """

    pipelines_parts = True

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        segments = [load.segment for load in loads]
        capacities = [None if offer is None else offer.indices.numel() for offer in offers]
        layout = Format(segments, capacities, self.context.wire)
        device = segments[0].lane.device
        message = self.keep(("message", name), layout.size, torch.uint8, device)
        received = self.keep(("received", name), layout.size * self.comm.size, torch.uint8, device)
        layout.write_header(message, control, [0 if offer is None else offer.count for offer in offers])
        elements = 0
        for load, offer, section in zip(loads, offers, layout.sections, strict=True):
            if offer is None:
                layout.whole(message, section).copy_(load.work)
                elements += load.segment.numel
            else:
                sent = layout.put(message, section, offer, _chosen(load.work, offer))
                self.commit(load.segment, offer.indices, sent)
                elements += min(offer.indices.numel(), load.segment.numel)
        layout.seal(message)
        handle = self.comm.all_gather(received, message, name)
        codecs = layout.by_codec()
        return InFlight(
            name, loads, control, handle, layout.size, elements, message, received, extra=layout, codecs=codecs
        )

    def wait(self, pending: InFlight) -> RoundHeader:
        pending.handle.wait(self.timeout)
        messages = pending.received.view(self.comm.size, -1)
        layout: Format = pending.extra
        control = layout.read_headers(messages, pending.control, pending.name)
        layout.check_payloads(messages, pending.name)
        return control

    def finish(self, pending: InFlight) -> None:
        layout: Format = pending.extra
        messages = pending.received.view(self.comm.size, -1)
        parts = self._open(pending, messages)  # all of them before anything is written
        for load, section, sparse in zip(pending.loads, layout.sections, parts, strict=True):
            total = self.accumulator(load)
            if section.capacity is None:
                self._add_dense(total, [layout.whole(message, section) for message in messages])
            else:
                total.zero_()
                for indices, values in sparse:
                    if not kernel.scatter(total, indices, values, self.scale):
                        # Unique within a rank: the same sum in any order the device takes.
                        total.index_add_(0, indices, values.mul_(self.scale))
            if total is not load.update:
                load.update.copy_(total)

    def _open(self, pending: InFlight, messages: torch.Tensor) -> list[list[Part]]:
        """What every rank sent, by section and rank; nothing for dense sections."""
        layout: Format = pending.extra
        counts = layout.counts(messages)
        parts: list[list[Part]] = []
        checks: list[torch.Tensor] = []
        whose: list[tuple[int, Section]] = []
        for number, (load, section) in enumerate(zip(pending.loads, layout.sections, strict=True)):
            parts.append([])
            if section.capacity is None:
                continue
            for rank, message in enumerate(messages):
                indices, values, good = layout.get(message, section, counts[rank][number], load.work.dtype)
                parts[-1].append((indices, values))
                checks.append(good)
                whose.append((rank, section))
        right = torch.stack(checks).tolist() if checks else []  # one look at a device for the whole message
        for (rank, section), good in zip(whose, right, strict=True):
            if not good:
                raise MessageError(
                    f"{pending.name}: the indices that rank {rank} sent are not ascending within 0 to "
                    f"{section.segment.length - 1}, or not as many as it announced: either its message was damaged, "
                    "or its sparsifier breaks the contract of a Selection"
                )
        return parts

    def _add_dense(self, total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        total.copy_(parts[0]).mul_(self.scale)
        scaled = self.keep(("scaled",), total.numel(), total.dtype, total.device)
        for part in parts[1:]:
            # Not add_(part, alpha=scale): whether that rounds once or twice is up to the processor.
            total.add_(scaled.copy_(part).mul_(self.scale))


def _chosen(work: torch.Tensor, offer: Selection) -> torch.Tensor:
    """``work`` at the offered indices; 0 in slots at and after the count."""
    values = work.index_select(0, offer.indices)
    if isinstance(offer.count, torch.Tensor):
        behind = torch.arange(values.numel(), device=values.device) >= offer.count
        return values.masked_fill_(behind, 0.0)
    values[offer.count :] = 0.0
    return values
