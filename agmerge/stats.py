"""What the exchange has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from sparsifiers.proof import Proof


@dataclass
class Stats:
    """Running totals of one rank. Bytes are what it hands to collectives for gradients."""

    steps: int = 0
    buffers: int = 0
    bytes_sent: int = 0
    bytes_dense: int = 0
    elements_sent: int = 0
    elements: int = 0
    proof: Proof | None = None  # measures selections, where the script has asked for it

    def sent(self, size: int, elements: int) -> None:
        """A message of ``size`` bytes has left."""
        self.bytes_sent += size
        self.elements_sent += elements

    def stepped(self, buffers: int, elements: int) -> None:
        """A step of ``elements`` gradient elements in ``buffers`` merge buffers has ended."""
        self.steps += 1
        self.buffers = buffers
        self.elements += elements
        self.bytes_dense += 4 * elements

    @property
    def density(self) -> float:
        """Elements sent / elements, over all steps."""
        return self.elements_sent / self.elements if self.elements else 0.0
