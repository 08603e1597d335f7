# SPDX-License-Identifier: Apache-2.0
"""Layout of tensors in flat buffers: a pure function of the tensors and their readiness order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sparsifiers import Kind

# Elements. 64 bytes of a 2-byte dtype, so that a tensor never shares a cache line with its neighbour.
ALIGNMENT = 32


@dataclass(frozen=True)
class TensorClass:
    """Tensor class: tensors of the same device, dtype and treatment, which share one arena."""

    device: torch.device
    dtype: torch.dtype  # of the gradients
    kind: Kind  # how the ranks combine their messages
    density: float | None = None  # None: the compressor's own

    @property
    def sparse(self) -> bool:
        """Return whether a sparsifier selects from the tensors of this class."""
        return self.kind is Kind.SPARSE

    @cached_property
    def on_device(self) -> bool:
        """Return whether the tensors lie outside the host's memory."""
        return self.device.type != "cpu"

    @property
    def storage(self) -> torch.dtype:
        """Return the dtype of residual and work: float32 for 16-bit gradients, else the gradient's own."""
        return torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype

    def __str__(self) -> str:
        kind = self.kind.value
        kind += "" if self.density is None else f"@{self.density:g}"
        return f"{kind}/{str(self.dtype).removeprefix('torch.')}/{self.device.type}"


@dataclass(frozen=True)
class Slot:
    """One tensor's place in the flat buffer of its tensor class."""

    index: int  # in readiness order
    name: str
    shape: tuple[int, ...]
    tensor_class: TensorClass
    offset: int  # of its first element in the flat buffer, in elements

    @cached_property
    def numel(self) -> int:
        """Return the number of elements of the tensor, without padding."""
        return math.prod(self.shape)

    @cached_property
    def end(self) -> int:
        """Return the offset where the next tensor of the class starts."""
        return self.offset + padded(self.numel)


@dataclass(frozen=True)
class Segment:
    """Slice of the flat buffer of a tensor class that belongs to one merge buffer, or to one message of it."""

    tensor_class: TensorClass
    slots: tuple[Slot, ...]  # the tensors that lie in it, the first and the last perhaps not whole
    span: tuple[int, int] | None = None  # (start, stop) in the buffer, multiples of ALIGNMENT; None: tensors are whole

    @cached_property
    def key(self) -> str:
        """Return the key of a sparsifier's state for this vector: the same while the segment has the same slices.

        Slices of tensors are counted from their first tensor, which other plans do not move.
        """
        first, last = self.slots[0].name, self.slots[-1].name
        part = ""
        if self.span is not None:
            part = "[{}:{}]".format(*(place - self.slots[0].offset for place in self.span))
        return f"{first if len(self.slots) == 1 else f'{first} to {last}'}{part}/{self.tensor_class}"

    @cached_property
    def start(self) -> int:
        """Return the offset of the first element, in the class's flat buffer."""
        return self.slots[0].offset if self.span is None else self.span[0]

    @cached_property
    def stop(self) -> int:
        """Return one past the last element, in the class's flat buffer, padding included."""
        return self.slots[-1].end if self.span is None else self.span[1]

    @cached_property
    def length(self) -> int:
        """Return the number of elements, padding included."""
        return self.stop - self.start

    @cached_property
    def numel(self) -> int:
        """Return the number of tensor elements in it, without padding: a density is a share of these."""
        return sum(stop - start for start, stop in map(self.inside, self.slots))

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of its elements in the gradients' dtype, padding included."""
        return self.length * self.tensor_class.dtype.itemsize

    @cached_property
    def vector_length(self) -> int:
        """Return the number of elements that a sparsifier is given: without padding where there is one tensor."""
        return self.numel if len(self.slots) == 1 else self.length

    def inside(self, slot: Slot) -> tuple[int, int]:
        """Return (start, stop) of the elements of a tensor that lie in the segment, without padding."""
        return max(self.start - slot.offset, 0), min(self.stop - slot.offset, slot.numel)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the segment concatenates; padding is a 1-D shape of its own.

        A tensor that is cut appears as whole rows, if the slice consists of whole rows, else as a 1-D shape.
        """
        shapes: list[tuple[int, ...]] = []
        for slot in self.slots:
            start, stop = self.inside(slot)
            shapes.append(slot.shape if stop - start == slot.numel else _piece(slot.shape, start, stop))
            padding = min(slot.end, self.stop) - slot.offset - stop
            if padding:
                shapes.append((padding,))
        return tuple(shapes)


def aligned(size: int, grain: int) -> int:
    """Round ``size`` up to a multiple of ``grain``."""
    return -(-size // grain) * grain


def padded(numel: int) -> int:
    """Round ``numel`` up to whole alignment units."""
    return aligned(numel, ALIGNMENT)


def _piece(shape: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
    """Return the shape of elements ``start`` to ``stop`` of a tensor: whole rows if they align to rows, else 1-D."""
    row = math.prod(shape[1:])
    if len(shape) > 1 and start % row == stop % row == 0:
        return ((stop - start) // row, *shape[1:])
    return (stop - start,)


class Layout:
    """Slots of all tensors in readiness order, and the length of each class's flat buffer."""

    def __init__(self, tensors: Sequence[tuple[str, tuple[int, ...], TensorClass]]) -> None:
        """Lay out ``tensors``, (name, shape, tensor class) in readiness order."""
        self.lengths: dict[TensorClass, int] = {}  # elements of each tensor class, padding included
        slots = []
        for index, (name, shape, tensor_class) in enumerate(tensors):
            slot = Slot(index, name, shape, tensor_class, self.lengths.get(tensor_class, 0))
            self.lengths[tensor_class] = slot.end
            slots.append(slot)
        self.slots = tuple(slots)

    @cached_property
    def numel(self) -> int:
        """Return the elements of all tensors, padding not counted."""
        return sum(slot.numel for slot in self.slots)

    def segments(self, start: int, stop: int) -> list[Segment]:
        """Return the segments of a merge buffer of tensors ``start`` to ``stop``: one for each tensor class."""
        by_class: dict[TensorClass, list[Slot]] = {}
        for slot in self.slots[start:stop]:
            if slot.numel:
                by_class.setdefault(slot.tensor_class, []).append(slot)
        return [Segment(tensor_class, tuple(slots)) for tensor_class, slots in by_class.items()]
