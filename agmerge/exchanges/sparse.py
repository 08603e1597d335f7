"""``sparse``: every rank sends what it selected, one all-gather, added up in rank order.

Dense segments may ride in the same message, whole: for a few small tensors that is cheaper than an
all-reduce of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmerge.errors import MessageError
from agmerge.exchanges.base import Exchange, Load, Pending
from agmerge.wire import Control, Format, Section
from sparsifiers import Selection


class SparseExchange(Exchange):
    """All-gather of sparse sections; bytes received are ``(W - 1) * size``."""

    def start(self, name: str, loads: Sequence[Load], offers: Sequence[Selection | None], control: Control) -> Pending:
        segments = [load.segment for load in loads]
        layout = Format(segments, [None if offer is None else offer.indices.numel() for offer in offers])
        device = segments[0].lane.device
        message = self.keep(("message", name), layout.size, torch.uint8, device)
        received = self.keep(("received", name), layout.size * self.comm.size, torch.uint8, device)
        layout.write_header(message, control, [0 if offer is None else offer.count for offer in offers])
        elements = 0
        for load, offer, section in zip(loads, offers, layout.sections, strict=True):
            values = layout.values(message, section)
            if offer is None:
                values.copy_(load.work)
                elements += load.segment.numel
            else:
                layout.indices(message, section).copy_(offer.indices)
                values.copy_(_chosen(load.work, offer, values.dtype))
                self.commit(load.segment, offer.indices, values)
                elements += min(offer.indices.numel(), load.segment.numel)
        handle = self.comm.all_gather(received, message, name)
        return Pending(name, loads, control, handle, layout.size, elements, message, received, layout)

    def wait(self, pending: Pending) -> Control:
        pending.handle.wait(self.timeout)
        messages = pending.received.view(self.comm.size, -1)
        layout: Format = pending.extra
        return layout.read_headers(messages, pending.control, pending.name)

    def finish(self, pending: Pending) -> None:
        layout: Format = pending.extra
        messages = pending.received.view(self.comm.size, -1)
        for load, section in zip(pending.loads, layout.sections, strict=True):
            total = self.accumulator(load)
            if section.capacity is None:
                self._add_dense(total, [layout.values(message, section) for message in messages])
            else:
                total.zero_()
                for rank, message in enumerate(messages):
                    self._add_sparse(total, layout, message, section, f"{pending.name}: rank {rank}")
            if total is not load.update:
                load.update.copy_(total)

    def _add_dense(self, total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        total.copy_(parts[0]).mul_(self.scale)
        scaled = self.keep(("scaled",), total.numel(), total.dtype, total.device)
        for part in parts[1:]:
            # Not add_(part, alpha=scale): whether that rounds once or twice is up to the processor.
            total.add_(scaled.copy_(part).mul_(self.scale))

    def _add_sparse(
        self, total: torch.Tensor, layout: Format, message: torch.Tensor, section: Section, who: str
    ) -> None:
        indices = layout.indices(message, section)
        if indices.numel() and not indices.is_cuda:
            # index_add_ checks too, but one by one and after it has written the earlier ones.
            low, high = (int(bound) for bound in torch.aminmax(indices))
            if low < 0 or high >= total.numel():
                wrong = low if low < 0 else high
                raise MessageError(f"{who}: index {wrong} is outside 0 to {total.numel() - 1}")
        values = layout.values(message, section).to(total.dtype, copy=True).mul_(self.scale)
        # Unique within a rank but for padding, which adds 0: the same sum in any order the device takes.
        total.index_add_(0, indices, values)


def _chosen(work: torch.Tensor, offer: Selection, dtype: torch.dtype) -> torch.Tensor:
    """``work`` at the offered indices in ``dtype``, saturated; 0 in slots at and after the count."""
    values = work.index_select(0, offer.indices)
    if values.dtype != dtype:
        limit = torch.finfo(dtype).max
        values = values.clamp_(-limit, limit)
    if isinstance(offer.count, torch.Tensor):
        behind = torch.arange(values.numel(), device=values.device) >= offer.count
        values = values.masked_fill_(behind, 0.0)
    else:
        values[offer.count :] = 0.0
    return values.to(dtype)
