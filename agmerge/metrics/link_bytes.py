# SPDX-License-Identifier: Apache-2.0
"""Compute the bytes that leave a rank in each collective, by its usual algorithm: pure functions.

Bytes are those of the whole tensor that is handed over, the same on all ranks. A lone rank sends nothing.

* An all-reduce is a ring, or halves that are exchanged and then doubled, which move as much: ``2 (W-1)/W`` of it.
* A gather is a ring: each rank passes on W - 1 messages. By doubling it is as much.
* An all-to-all goes straight to its destinations, and a rank's own piece goes nowhere.
* A reduce-scatter is the first half of a ring. Where a backend has none of its own it is a whole all-reduce.
* A broadcast is a chain from the root on: all ranks but the last send it once, and so do those of a tree on average.

Counted by the kernel's packets Gloo moves that much with 2, 3 and 4 workers, and 0.1 to 1 % more, which are headers.
"""

from __future__ import annotations

from collections.abc import Sequence


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
