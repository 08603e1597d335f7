# SPDX-License-Identifier: Apache-2.0
"""Costs of every possible merge buffer on both clocks, as edges of a graph that can be walked in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from merging.checks import Reals
from merging.pieces import Pieces
from merging.planners.search.tables import Flags, Tables

Indices = NDArray[np.int64]
FEW = 32  # tensors up to which clocks are compared to the bit
_GRAIN = 1e-13  # of the time of a simple plan: for more tensors, added to each merge buffer, so that fewer are better
NEVER = 1e300  # seconds: of an edge that does not exist, where infinity times a weight of 0 would be no number


@dataclass(frozen=True)
class Edges:
    """Edges: at [i, o, j] with i <= j, the merge buffer of the tensors i to j, sent by option o of the tables.

    It takes a state (t, E) of the prefix i to t + clock, max(E, t + clock) + channel of the prefix j + 1. The edges of
    prefix i are numbered o n + j. Both arrays have the shape (n, o, n).
    """

    clock: Reals
    channel: Reals
    grain: float  # seconds that are added to each of both

    @property
    def n(self) -> int:
        """Return the number of tensors."""
        return len(self.clock)

    @property
    def options(self) -> int:
        """Return the number of send modes of a merge buffer."""
        return self.clock.shape[1]

    def all_open(self) -> Flags:
        """Return the numbers at each prefix of edges below the size limit, as flags, (n, o n)."""
        return np.tile(np.tri(self.n, dtype=bool).T, self.options) & (self.channel.reshape(self.n, -1) < NEVER)

    def reversed(self) -> Edges:
        """Return the same problem from its end: the first tensor is the last, and both clocks change places.

        A plan ends with the longest path that follows the compute clock to one of its merge buffers and the channel
        from there. That is the same path in both directions (of flow shops of two machines: Muth, 1979).
        """
        return Edges(_turned(self.channel), _turned(self.clock), self.grain)


def edges_of(tables: Tables) -> Pieces[Edges]:
    """Return, in pieces, the edges of the tables. Beyond 32 tensors each has the grain added on both clocks."""
    n = tables.n
    clock, channel = np.empty((2, n, len(tables.options), n))
    upto = np.concatenate([np.zeros((len(tables.steps), 1)), np.cumsum(tables.steps, axis=1)], axis=1)
    for number, option in enumerate(tables.options):
        yield
        run = upto[option.clock]
        np.subtract(run[None, 1:], run[:-1, None], out=clock[:, number])
        if option.select is not None:
            clock[:, number] += option.select.T
        np.minimum(option.channel.T, NEVER, out=channel[:, number])
    single = float((clock[0, :, -1] + channel[0, :, -1]).min())
    each = clock[0, :, -1].min() + np.einsum("ioi->io", channel).min(axis=1).sum()
    grain = _GRAIN * min(single, float(each)) if n > FEW else 0.0
    clock += grain
    channel += grain
    return Edges(clock, channel, grain)


def turned(opened: Flags) -> Flags:
    """Return the same edges of the reversed problem."""
    n = len(opened)
    return _turned(opened.reshape(n, -1, n)).reshape(n, -1)


def _turned(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values with that of [n - 1 - j, o, n - 1 - i] at [i, o, j]."""
    return np.ascontiguousarray(values[::-1, :, ::-1].transpose(2, 1, 0))
