# SPDX-License-Identifier: Apache-2.0
"""Result of one round of an exchange, as its callers read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from agmerge.step.gradient_norm import GradientNorm
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.round import Round
from agmerge.tensors.layout import Slot


class Combined:
    """Result of one round. Tensors are views, valid until the next round begins.

    ``is_part``: the merge buffers that had been received when a worker was lost. The others are exchanged in a round of
    their own, once this one is committed and the exchange is connected to the survivors. ``follows``: such a part.
    """

    def __init__(
        self,
        attempt: Round,
        zero_unused: bool,
        norm: GradientNorm | None = None,
        *,
        is_part: bool = False,
        follows: bool = False,
    ) -> None:
        self._round, self._zero_unused, self._norm = attempt, zero_unused, norm
        self.is_part, self.follows = is_part, follows
        self.is_whole = attempt.is_complete  # has all tensors
        self.buffers: MergeBuffers = attempt.buffers
        self.skipped = attempt.nonfinite  # the step comes to nothing: a rank has found an infinity or NaN
        self.used: Sequence[bool] = attempt.used  # by slot: whether any rank had a tensor
        self.flags = attempt.flags_of_all  # flags of all ranks, see Flag
        # Once computed. A cached_property would do, but before Python 3.12 one lock is for all ranks that are threads.
        self._updates: Mapping[str, torch.Tensor | None] | None = None

    @property
    def updates(self) -> Mapping[str, torch.Tensor | None]:
        """Return the combined tensor of each name, in the shape and strides of the table's.

        None: no rank had one, and no residual of it was sent. All are infinite in a skipped step. Nothing is computed
        in a step in which this is not read. Tensors in ``buffers.store.received`` are missing.
        """
        if self._updates is None:
            self._updates = self._computed()
        return self._updates

    def _computed(self) -> Mapping[str, torch.Tensor | None]:
        """Return the combined tensors, see :attr:`updates`."""
        if self.skipped:
            for slot in self._round.slots():
                if slot.index in self.buffers.flat.in_place:
                    self.buffers.flat.updates.of(slot).fill_(torch.inf)
        received = {slot.name for segment, *_ in self.buffers.store.received for slot in segment.slots}
        updates = {
            slot.name: self.buffers.flat.update(slot) if self._zero_unused or self._round.has_update(slot) else None
            for slot in self._round.slots()
            if slot.name not in received
        }
        if self._norm is not None:
            self._look_at([slot for slot in self._round.slots() if updates.get(slot.name) is not None], self._norm)
        self.buffers.flat.in_place.let_go()  # else gradients would be held until the next backward pass
        return updates

    def _look_at(self, slots: Sequence[Slot], norm: GradientNorm) -> None:
        """Give the updates of ``slots``, which exist, to ``norm``."""
        of, noises = self.buffers.flat.updates.of, self._round.noises
        noisy = {slot.index for slot in slots if noises and self.buffers.is_quantised(slot)}
        norm.take(
            lambda: (of(slot) for slot in slots if slot.index not in noisy),
            (of(slot) for slot in slots if slot.index in noisy),
            noises,
            may_hold=not any(slot.index in self.buffers.flat.in_place for slot in slots),
            adds=self.follows,
        )
