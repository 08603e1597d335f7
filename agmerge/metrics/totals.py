# SPDX-License-Identifier: Apache-2.0
"""Totals of the exchange so far, and the bytes that collectives make a rank send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agmerge.metrics.step_times import WholeSteps

# Bytes that leave a rank in each collective, by its usual algorithm.
#
# Bytes are those of the whole tensor that is handed over, the same on all ranks. A lone rank sends nothing.
#
# * An all-reduce is a ring, or halves that are exchanged and then doubled, which move as much: ``2 (W-1)/W`` of it.
# * A gather is a ring: each rank passes on W - 1 messages. By doubling it is as much.
# * An all-to-all goes straight to its destinations, and a rank's own piece goes nowhere.
# * A reduce-scatter is the first half of a ring. Where a backend has none of its own it is a whole all-reduce.
# * A broadcast is a chain from the root on: all ranks but the last send it once, and so do those of a tree on average.
#
# Counted by the kernel's packets Gloo moves that much with 2, 3 and 4 workers, and 0.1 to 1 % more, which are headers.


def all_reduce_bytes(size: int, workers: int) -> int:
    """Return the bytes that a rank sends to add up ``size`` bytes over all ranks; fractions are rounded up."""
    return -(-2 * (workers - 1) * size // workers)


def all_gather_bytes(size: int, workers: int) -> int:
    """Return the bytes that a rank sends so that every rank gets every other one's ``size`` bytes."""
    return (workers - 1) * size


def all_to_all_bytes(sizes: Sequence[int], rank: int) -> int:
    """Return the bytes that ``rank`` sends of ``sizes``, those for each rank: all but its own."""
    return sum(sizes) - sizes[rank]


def reduce_scatter_bytes(size: int, workers: int) -> int:
    """Return the bytes that a rank sends so that each gets a W-th of the sum of ``size`` bytes; rounded up."""
    return -(-(workers - 1) * size // workers)


def broadcast_bytes(size: int, workers: int, rank: int, root: int) -> int:
    """Return the bytes that ``rank`` sends so that every rank gets the ``size`` bytes of ``root``, along a chain."""
    return 0 if (rank + 1) % workers == root else size


# One collective: which of these functions tells its bytes, and its arguments.
Collective = tuple[Callable[..., int], tuple[int | Sequence[int], ...]]


class Message(Protocol):
    """Message under way, which may still grow."""

    bytes: int  # handed to collectives so far
    elements: int  # in it
    codecs: Mapping[str, int]  # `bytes` by codec; empty: not known


@dataclass
class Totals:
    """Totals of one rank.

    Bytes are those that it hands to collectives for gradients; link bytes those that leave it then, see
    :mod:`agmerge.metrics.totals`.
    """

    steps: int = 0  # that ended with an update
    steps_skipped: int = 0  # that came to nothing
    skipped_in_a_row: int = 0  # of these, the last ones
    buffers: int = 0  # merge buffers of the last step
    bytes_dense: int = 0  # that dense fp32 gradients would have been
    link_bytes_dense: int = 0  # of `bytes_dense`, those that would have left it in a ring
    workers: int = 1  # among which gradients are exchanged now
    elements: int = 0  # that they were selected from
    under_way: dict[int, Message] = field(default_factory=dict)  # messages that have not arrived, by `id`
    whole: WholeSteps = field(default_factory=WholeSteps, compare=False)  # times from step to step
    collectives: list[Collective] = field(default_factory=list)  # of which the bytes are not in `_left` yet
    _left: int = 0  # bytes that have left this rank
    _wire: Counter[str] = field(default_factory=Counter)  # bytes of messages that have arrived, by codec
    _elements: int = 0  # in these

    def sent(self, size: int, elements: int, codecs: Mapping[str, int] | None = None) -> None:
        """Count a message of ``size`` bytes; ``codecs``: these by codec, if codecs have made them."""
        self._wire.update(codecs or {"plain": size})
        self._elements += elements

    def arrived(self, message: Message) -> None:
        """Count a message that was under way: it does not grow any more."""
        self._wire.update(_by_codec(message))
        self._elements += message.elements
        self.under_way.pop(id(message), None)

    @property
    def wire(self) -> Counter[str]:
        """Return the bytes that were handed to collectives, by codec."""
        return sum((Counter(_by_codec(message)) for message in self.under_way.values()), self._wire.copy())

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that were handed to collectives."""
        return self.wire.total()

    @property
    def elements_sent(self) -> int:
        """Return the elements in messages."""
        return self._elements + sum(message.elements for message in self.under_way.values())

    @property
    def link_bytes(self) -> int:
        """Return the bytes of ``bytes_sent`` that have left this rank."""
        self._count_collectives()
        return self._left

    def _count_collectives(self) -> None:
        """Add the bytes of all collectives that were noted."""
        while self.collectives:
            bytes_of, arguments = self.collectives.pop()
            self._left += bytes_of(*arguments)

    def among(self, workers: int) -> None:
        """Set the number of workers for the bytes that dense gradients would have moved from now on."""
        self.workers = workers

    def stepped(self, buffers: int, elements: int, tensors: int) -> None:
        """Count a step in ``buffers`` merge buffers.

        ``elements``: those that this rank selects from; ``tensors``: the elements of all gradients, which are as many
        unless ranks have shards.
        """
        self.steps += 1
        self.skipped_in_a_row = 0
        self.buffers = buffers
        self.elements += elements
        self._dense(tensors)

    def passed(self, tensors: int) -> None:
        """Count a step after which nothing is exchanged. ``tensors``: the elements of all gradients."""
        self.elements += tensors
        self._dense(tensors)

    def skipped(self, elements: int, tensors: int) -> None:
        """Count a step that came to nothing, after its messages had left."""
        self.steps_skipped += 1
        self.skipped_in_a_row += 1
        self.elements += elements
        self._dense(tensors)

    def _dense(self, tensors: int) -> None:
        """Count a step of fp32 gradients of so many elements: its bytes, and the time since the one before."""
        if self.bytes_dense:
            self.whole.end()
        self.whole.begin()
        self._count_collectives()  # else there would be more and more of them
        self.bytes_dense += 4 * tensors
        self.link_bytes_dense += all_reduce_bytes(4 * tensors, self.workers)

    @property
    def reduction(self) -> float:
        """Return how many times less traffic there was than with uncompressed gradients; 1.0 before any traffic."""
        return self.link_bytes_dense / self.link_bytes if self.link_bytes else 1.0

    @property
    def density(self) -> float:
        """Return elements sent / elements, over all steps."""
        return self.elements_sent / self.elements if self.elements else 0.0


def _by_codec(message: Message) -> Mapping[str, int]:
    """Return the bytes of a message by codec; all are "plain" if codecs have not made all of them."""
    return message.codecs if sum(message.codecs.values()) == message.bytes else {"plain": message.bytes}
