# SPDX-License-Identifier: Apache-2.0
"""Add up gradients in a node and deal the sum out, so that each of its ranks owns one shard: ``two-level``.

A shard of every tensor lies on every rank of a node, the same one whatever the plan is. From there on the shards are
the tensors: residuals, selection, messages between nodes and updates are as large as they are. At the end of a step
the ranks of a node hand their updates round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from agmerge.backends import Handle
from agmerge.backends.topology import Nodes
from agmerge.exchanges.dense import decode, sum_in_rank_order, tail_length, tail_of
from agmerge.exchanges.message.format import RoundHeader
from agmerge.exchanges.routing import group_by_dtype
from agmerge.tensors.arena import Arena, HandedOut, move_to_update
from agmerge.tensors.layout import Layout, Segment, Slot, TensorClass


def shard_shape(shape: Sequence[int], places: int) -> tuple[int, ...]:
    """Return the shape of a tensor's shards, equal for all: whole rows where they divide evenly, else a flat slice.

    The last shards may end in padding, which is zero.
    """
    if places == 1:
        return tuple(shape)
    if shape and shape[0] % places == 0:
        return (shape[0] // places, *shape[1:])
    return (-(-math.prod(shape) // places),)


def sharded(whole: Layout, places: int) -> Layout:
    """Return where the shards of one rank lie, tensor by tensor; ``places``: ranks of a node."""
    return Layout([(slot.name, shard_shape(slot.shape, places), slot.tensor_class) for slot in whole.slots])


def deal(tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """Write ``tensor`` into ``rows``, (places, elements of a shard): row by row, zero behind the end."""
    places, length = rows.shape
    if tensor.numel() == rows.numel() and tensor.dim() and tensor.shape[0] % places == 0:
        # By its own strides: flattening would copy a tensor that is not in C order.
        rows.view(places, -1, *tensor.shape[1:]).copy_(tensor.view(places, -1, *tensor.shape[1:]))
        return
    flat = tensor.reshape(-1)
    for place, row in enumerate(rows):
        part = flat[place * length : (place + 1) * length]
        row[: part.numel()].copy_(part)
        row[part.numel() :] = 0.0


def collect(rows: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write ``tensor``, in C order, from ``rows``: the inverse of :func:`deal`."""
    flat, length = tensor.view(-1), rows.shape[1]
    for place, row in enumerate(rows):
        part = flat[place * length : (place + 1) * length]
        part.copy_(row[: part.numel()])


@dataclass
class _Message:
    """Message of a merge buffer's tensors of one device and dtype, inside a node."""

    name: str  # of its collectives
    rows: torch.Tensor  # (places, width): this rank's values for each rank of the node
    own: torch.Tensor  # (width,): this rank's row of the sum
    received: torch.Tensor | None  # in rank order: this rank's row of every rank
    tail: int  # where in a row the control numbers start
    offsets: dict[int, int] = field(default_factory=dict)  # by slot: where its shard starts in a row
    handle: Handle | None = None  # of the collective under way


class NodeShards:
    """Sums of gradients in a node, before compensation: gradients in, this rank's shard of their sum out.

    1. ``put`` deals each gradient out into rows, one for each rank of the node.
    2. ``start`` adds a merge buffer up by a reduce-scatter in the node; after ``wait`` every rank has ``shard``s of the
       sum. From there they are exchanged between nodes as tensors are.
    3. ``hand_round`` gathers the updates of all shards in the node at the end of the step.

    ``whole``: the layout of the tensors; ``parts``: that of their shards, slot by slot the same order. ``ordered``: add
    in the order of the ranks of the node. Sums in a node have the gradient's dtype.
    """

    def __init__(self, nodes: Nodes, whole: Layout, parts: Layout, timeout: float, *, ordered: bool) -> None:
        self.nodes, self.whole, self.parts, self.timeout, self.ordered = nodes, whole, parts, timeout, ordered
        self._updates = {tensor_class: self._handed_out(tensor_class) for tensor_class in whole.lengths}  # whole ones
        self._collected = {
            tensor_class: _memory(tensor_class, nodes.places * length) for tensor_class, length in parts.lengths.items()
        }
        self._messages: list[list[_Message]] = []  # by merge buffer
        self._tensors: list[list[int]] = []  # by merge buffer: slots, in the order of their used bits
        self._place_of: dict[int, _Message] = {}  # by slot

    def _handed_out(self, tensor_class: TensorClass) -> HandedOut:
        slots = [slot for slot in self.whole.slots if slot.tensor_class == tensor_class]
        return HandedOut(_memory(tensor_class, self.whole.lengths[tensor_class]), slots)

    def let_updates_go(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Write the next updates elsewhere, if the script still refers to the last ones: as an arena does."""
        for tensor_class, updates in self._updates.items():
            if updates.is_kept(parameters):
                self._updates[tensor_class] = self._handed_out(tensor_class)

    def rebuild(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Gather by a plan: each of its merge buffers has tensors ``start`` to ``stop``. Nothing may be in flight."""
        self._tensors = [list(range(start, stop)) for start, stop in bounds]
        self._messages = []
        for buffer, (start, stop) in enumerate(bounds):
            groups = group_by_dtype(self.parts.segments(start, stop))
            made = [self._message(buffer, number, group) for number, group in enumerate(groups)]
            self._messages.append(made)
            self._place_of |= {index: message for message in made for index in message.offsets}

    def _message(self, buffer: int, number: int, segments: Sequence[Segment]) -> _Message:
        """Make the message of the ``segments`` of one device and dtype, the ``number``-th of its merge buffer."""
        tensor_class, places, tail = (
            segments[0].tensor_class,
            self.nodes.places,
            sum(segment.length for segment in segments),
        )
        width = tail + tail_length(RoundHeader(0, 0, 0, 0, (False,) * len(self._tensors[buffer])))
        name = f"buffer {buffer}/node" if number == 0 else f"buffer {buffer}.{number}/node"
        received = _memory(tensor_class, places * width) if self.ordered else None
        rows = _memory(tensor_class, places * width).view(places, width)
        message = _Message(name, rows, _memory(tensor_class, width), received, tail)
        at = 0
        for segment in segments:
            for slot in segment.slots:
                message.offsets[slot.index] = at + slot.offset - segment.start
            at += segment.length
        return message

    def put(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Take this rank's gradient of a whole tensor (None: it has none)."""
        message = self._place_of[slot.index]
        start = message.offsets[slot.index]
        rows = message.rows[:, start : start + slot.numel]
        if gradient is None:
            rows.zero_()
        else:
            deal(gradient, rows)

    def start(self, buffer: int, control: RoundHeader) -> int:
        """Collective. Start to add up a merge buffer in the node; return the bytes handed over.

        ``control``: this rank's header, with the used bits of all tensors of the merge buffer.
        """
        size = 0
        for message in self._messages[buffer]:
            message.rows[:, message.tail :] = tail_of(control, message.rows.dtype, message.rows.device)
            inside, flat, width = self.nodes.inside, message.rows.view(-1), message.own.numel()
            if message.received is None:
                message.handle = inside.reduce_scatter(message.own, flat, message.name)
            else:
                row = [width] * inside.size
                message.handle = inside.all_to_all(message.received, flat, row, row, message.name)
            size += flat.numel() * flat.element_size()
        return size

    def arrived(self, buffer: int) -> bool:
        """Return whether :meth:`wait` would return at once."""
        return all(message.handle is not None and message.handle.done() for message in self._messages[buffer])

    def wait(self, buffer: int, control: RoundHeader) -> RoundHeader:
        """Collective. Wait for this rank's shards, and return the merged header of the node's ranks."""
        headers = []
        for message in self._messages[buffer]:
            assert message.handle is not None
            message.handle.wait(self.timeout)
            message.handle = None
            if message.received is not None:
                message.own.copy_(sum_in_rank_order(message.received.view(self.nodes.places, -1)))
            headers.append(decode(message.own[message.tail :].tolist(), control, message.name))
        return control.merged(headers)

    def shard(self, slot: Slot) -> torch.Tensor:
        """Return this rank's shard of a tensor's gradient, summed over the node: a view, in the shape of the slot."""
        message = self._place_of[slot.index]
        start = message.offsets[slot.index]
        return message.own[start : start + slot.numel].view(slot.shape)

    def of(self, slot: Slot) -> torch.Tensor:
        """Return the update of a whole tensor, in C order: a view. ``slot``: of the tensor or of its shards."""
        return self._updates[self.whole.slots[slot.index].tensor_class].views[slot.index]

    def set_aside(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Return the tensor for ``p.grad`` from the time its gradient was dealt out until the exchange has ended."""
        return move_to_update(self.of(slot), gradient)

    def gather(self, arenas: Mapping[TensorClass, Arena]) -> int:
        """Collective. Make the whole update of every tensor from the shards' updates; return the bytes handed over."""
        inside, size, handles = self.nodes.inside, 0, []
        for number, (tensor_class, arena) in enumerate(arenas.items()):
            handles.append(inside.all_gather(self._collected[tensor_class], arena.update, f"updates {number}/node"))
            size += arena.update.numel() * arena.update.element_size()
        for handle in handles:
            handle.wait(self.timeout)
        for whole, part in zip(self.whole.slots, self.parts.slots, strict=True):
            rows = self._collected[whole.tensor_class].view(inside.size, -1)[:, part.offset : part.offset + part.numel]
            collect(rows, self.of(whole))
        return size

    def add_up(self, figure: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Collective. Return the sum of ``figure``, 1-D, over the node, in rank order, and the bytes handed over."""
        rows = figure.new_empty(self.nodes.places * figure.numel())
        self.nodes.inside.all_gather(rows, figure, "figures/node").wait(self.timeout)
        return sum_in_rank_order(rows.view(self.nodes.places, -1)), figure.nbytes


def _memory(tensor_class: TensorClass, length: int) -> torch.Tensor:
    """Return zeros of a tensor class's dtype, on its device: (length,)."""
    return torch.zeros(length, dtype=tensor_class.dtype, device=tensor_class.device)
