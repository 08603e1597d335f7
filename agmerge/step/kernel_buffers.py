"""Hold what kernels of devices keep beside merge buffers, from step to step, while the plan stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmerge.exchanges.routing import Message
from agmerge.tensors.layout import Lane, Segment
from sparsifiers import Compressor, Kind, Sparsifier
from sparsifiers.gpu import LargestKey, Scratch, is_fused


class KernelBuffers:
    """Hold scratch for what is selected from, and the largest keys that were written, both made when first asked for.

    ``messages``: of each merge buffer, by the plan. ``compressor``: whose sparsifier may have kernels.
    """

    def __init__(self, messages: Sequence[Sequence[Message]], compressor: Compressor) -> None:
        sparsifier = compressor.part(Kind.SPARSE)
        self._selects = isinstance(sparsifier, Sparsifier) and sparsifier.has_kernels
        self._messages = messages
        self._scratch: dict[str, Scratch] = {}  # by the key of a segment
        self._largest: dict[tuple[int, torch.device], LargestKey] = {}  # by merge buffer and device

    def scratch(self, segment: Segment) -> Scratch | None:
        """Return what kernels keep beside a segment that is selected from; None: kernels do not select from it."""
        lane = segment.lane
        if not (self._selects and lane.on_device and is_fused(lane.device) and lane.storage == torch.float32):
            return None
        if segment.key not in self._scratch:
            self._scratch[segment.key] = Scratch(segment.vector_length, lane.device)
        return self._scratch[segment.key]

    def scratch_of(self, buffer: int, lane: Lane) -> Scratch | None:
        """Return what :meth:`scratch` does of all that a merge buffer has of a lane; None, too, if that is in parts."""
        parts = [
            (segment, selected)
            for message in self._messages[buffer]
            for segment, selected in zip(message.segments, message.selected, strict=True)
            if segment.lane == lane
        ]
        return self.scratch(parts[0][0]) if len(parts) == 1 and parts[0][1] else None

    def largest(self, buffer: int, device: torch.device) -> LargestKey:
        """Return what kernels raise that write the tensors of a merge buffer on a device."""
        if (buffer, device) not in self._largest:
            self._largest[buffer, device] = LargestKey(device)
        return self._largest[buffer, device]
