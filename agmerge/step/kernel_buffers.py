# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of kernels for merge buffers, kept from step to step while the plan stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, compress

import torch

from agmerge.exchanges.routing import Message
from agmerge.tensors.arena import table_of
from agmerge.tensors.layout import Segment, Slot, TensorClass
from sparsifiers import Compressor, Kind, kernel
from sparsifiers.candidates import Candidates, TensorNotes
from sparsifiers.gpu import LargestKey, Scratch, TensorTable, is_fused


class KernelBuffers:
    """Scratch memory of segments that are selected from, and largest written keys, both made when first needed.

    ``messages``: of each merge buffer, by the plan. ``compressor``: its sparsifier may have kernels.
    """

    def __init__(self, messages: Sequence[Sequence[Message]], compressor: Compressor) -> None:
        sparsifier = compressor.part(Kind.SPARSE)
        self._has_kernels = sparsifier is not None and sparsifier.has_kernels
        self._takes_candidates = sparsifier is not None and sparsifier.takes_candidates
        self._messages = messages
        self._scratch: dict[str, Scratch] = {}  # by the key of a segment on a device
        self._candidates: dict[str, Candidates] = {}  # by the key of a segment on the host
        self._notes: dict[int, TensorNotes] | None = None  # by slot, of those that are large enough; None: not yet made
        self._largest: dict[tuple[int, torch.device], LargestKey] = {}  # by merge buffer and device
        self._tables: dict[tuple[int, ...], TensorTable] = {}  # of tensors that are accumulated together, by slot

    def scratch(self, segment: Segment) -> Scratch | Candidates | None:
        """Return the scratch memory of a segment that is selected from; None: no kernel selects from it."""
        return self._scratch_on_device(segment) if segment.tensor_class.on_device else self._candidates_on_host(segment)

    def _scratch_on_device(self, segment: Segment) -> Scratch | None:
        tensor_class, key = segment.tensor_class, segment.key
        if not self._has_kernels or not is_fused(tensor_class.device) or tensor_class.storage != torch.float32:
            return None
        if key not in self._scratch:
            self._scratch[key] = Scratch(segment.vector_length, tensor_class.device)
        return self._scratch[key]

    def _candidates_on_host(self, segment: Segment) -> Candidates | None:
        tensor_class, key = segment.tensor_class, segment.key
        if (
            not self._takes_candidates
            or tensor_class.on_device
            or not kernel.available()
            or tensor_class.storage != torch.float32
        ):
            return None
        if key not in self._candidates:
            self._candidates[key] = Candidates(segment.vector_length)
        return self._candidates[key]

    def notes(self, slot: Slot) -> TensorNotes | None:
        """Return the notes of a tensor's largest elements, written along with ``work`` on the host; None: no notes.

        A tensor may lie in several segments.
        """
        if self._notes is None:
            self._notes = dict(self._make_notes())
        return self._notes.get(slot.index)

    def _make_notes(self) -> Iterator[tuple[int, TensorNotes]]:
        parts: dict[Slot, list[tuple[Candidates, int, int]]] = {}  # in the order of messages, which is theirs
        for message in chain.from_iterable(self._messages):
            for segment in compress(message.segments, message.selected):
                candidates = self._candidates_on_host(segment)
                if candidates is None:
                    continue
                for slot in segment.slots:
                    start, stop = segment.inside(slot)
                    parts.setdefault(slot, []).append((candidates, slot.offset + start - segment.start, stop - start))
        for slot, found in parts.items():
            if slot.numel >= kernel.STREAMED and sum(elements for _, _, elements in found) == slot.numel:
                yield slot.index, TensorNotes(found)

    def scratch_of(self, buffer: int, tensor_class: TensorClass) -> Scratch | None:
        """Return :meth:`scratch` of a merge buffer's tensors of a class; None, too, if these are several segments."""
        parts = [
            (segment, selected)
            for message in self._messages[buffer]
            for segment, selected in zip(message.segments, message.selected, strict=True)
            if segment.tensor_class == tensor_class
        ]
        return self._scratch_on_device(parts[0][0]) if len(parts) == 1 and parts[0][1] else None

    def largest(self, buffer: int, device: torch.device) -> LargestKey:
        """Return the largest key of a merge buffer on a device, raised by the kernels that write its tensors."""
        if (buffer, device) not in self._largest:
            self._largest[buffer, device] = LargestKey(device)
        return self._largest[buffer, device]

    def table(self, slots: Sequence[Slot]) -> TensorTable:
        """Return the places of adjacent tensors that are accumulated together."""
        key = tuple(slot.index for slot in slots)
        if key not in self._tables:
            self._tables[key] = table_of(slots)
        return self._tables[key]
