"""What the exchange has done so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Totals:
    """Running totals of one rank. Bytes are what it hands to collectives for gradients."""

    steps: int = 0
    steps_skipped: int = 0
    skipped_in_a_row: int = 0
    buffers: int = 0
    bytes_sent: int = 0
    bytes_dense: int = 0
    elements_sent: int = 0
    elements: int = 0
    wire: Counter[str] = field(default_factory=Counter)  # bytes_sent by what they are

    def sent(self, size: int, elements: int, codecs: Mapping[str, int] | None = None) -> None:
        """A message of ``size`` bytes has left; ``codecs``: these by what they are, if codecs have made them."""
        self.wire.update(codecs or {"plain": size})
        self.bytes_sent += size
        self.elements_sent += elements

    def stepped(self, buffers: int, elements: int, tensors: int) -> None:
        """A step in ``buffers`` merge buffers has ended. ``elements``: that this rank selects from; ``tensors``: of all
        gradients, which is as many unless ranks have shards."""
        self.steps += 1
        self.skipped_in_a_row = 0
        self.buffers = buffers
        self.elements += elements
        self.bytes_dense += 4 * tensors

    def skipped(self, elements: int, tensors: int) -> None:
        """A step came to nothing, after its messages had left."""
        self.steps_skipped += 1
        self.skipped_in_a_row += 1
        self.elements += elements
        self.bytes_dense += 4 * tensors

    @property
    def density(self) -> float:
        """Elements sent / elements, over all steps."""
        return self.elements_sent / self.elements if self.elements else 0.0
