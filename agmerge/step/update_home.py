# SPDX-License-Identifier: Apache-2.0
"""Places of the updates of whole tensors: in the arenas, or over gradients, where every rank has whole tensors.

With ``exchange="two-level"`` a :class:`agmerge.exchanges.node_shards.NodeShards` takes the place of :class:`InArenas`:
there a rank's arenas have shards, and whole updates are gathered inside the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from agmerge.step.gradients_in_place import GradientsInPlace
from agmerge.tensors.arena import Arena
from agmerge.tensors.layout import Slot, TensorClass


class InArenas:
    """Updates that are found where they were written.

    ``arena_of``: the arena of each slot; ``in_place``: gradients and updates that lie in no arena.
    """

    def __init__(self, arena_of: Sequence[Arena], in_place: GradientsInPlace) -> None:
        self._arena_of, self._in_place = arena_of, in_place

    def rebuild(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Do nothing: unlike those of :class:`NodeShards`, these updates do not depend on the plan's merge buffers."""

    def let_updates_go(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Do nothing: the arenas do it."""

    def of(self, slot: Slot) -> torch.Tensor:
        """Return the update of a tensor, in C order: a view."""
        if slot.index in self._in_place:
            return self._in_place.of(slot)
        return self._arena_of[slot.index].gradients[slot.index]

    def gather(self, arenas: Mapping[TensorClass, Arena]) -> int:
        """Return 0, the bytes sent: updates are whole already."""
        return 0
