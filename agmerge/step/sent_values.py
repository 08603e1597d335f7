# SPDX-License-Identifier: Apache-2.0
"""Log of what a round sends and receives of flat buffers: subtracted at once, or recorded for the caller."""

from __future__ import annotations

import torch

from agmerge.exchanges.message.sample import ValueSample, ZeroCount
from agmerge.exchanges.store import Store
from agmerge.step.flat_buffers import FlatBuffers
from agmerge.tensors.arena import Unwritten, Write
from agmerge.tensors.layout import Segment, Slot
from sparsifiers import kernel_updates
from sparsifiers.quantising.blocks import block_size

# Of a segment: indices (None: all elements) and values that were sent (None: exactly those of `work`).
Sent = tuple[Segment, "torch.Tensor | None", "torch.Tensor | None"]
# Of a segment: the indices and values of each rank, and the factor of the values.
Received = tuple[Segment, "list[tuple[torch.Tensor, torch.Tensor]]", float]


class SentValues(Store):
    """Store of the exchanges of one agreement, and the log of the round under way.

    Sent values are subtracted from ``work``, which becomes the residual. With a memory that hands back they are
    recorded in ``sent`` instead, and all ranks' selections in ``received`` where these take the place of an update.
    """

    def __init__(self, flat: FlatBuffers) -> None:
        self._flat, self.bases = flat, flat.bases
        self.has_residual = any(arena.memory.has_residual for arena in flat.arenas.values())
        self.sent: list[Sent] = []
        self.received: list[Received] = []
        self._sample: ValueSample | None = None  # of selected values; None: not asked for
        self._zeros: ZeroCount | None = None  # of quantised tensors; None: not asked for

    def subtract_sent(
        self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor | Unwritten | None
    ) -> None:
        """Subtract sent values from ``work``, as :meth:`Arena.subtract_sent`, or record them, to hand others back."""
        arena = self._flat.arena_with(segment)
        if not arena.memory.hands_back:
            arena.subtract_sent(segment, indices, sent)
            return
        if indices is not None:  # copies: the buffers of a message are written again
            # As many as there are are all, unless a codec without a 0 has moved them up. A device is not asked.
            full = indices.numel() == segment.length and indices.device.type == "cpu"
            everything = full and int(indices[-1]) == segment.length - 1
            indices = None if everything else indices.clone()
        if isinstance(sent, torch.Tensor):
            sent = sent.to(arena.work.dtype, copy=True)
        elif sent is not None:
            sent = sent.tensor().view(-1)
        self.sent.append((segment, indices, sent))

    def write_and_subtract(self, segment: Segment, write: Write) -> bool:
        """Write sent values to their message and subtract them in one pass: :meth:`Arena.write_and_subtract`."""
        return self._flat.arena_with(segment).write_and_subtract(segment, write)

    def add_unsent(self, segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Add unsent values of sums to ``work``, as :meth:`Arena.add_unsent`, or record them in ``sent``, negated."""
        arena = self._flat.arena_with(segment)
        if arena.memory.hands_back:
            self.subtract_sent(segment, indices, -values)
        else:
            arena.add_unsent(segment, indices, values)

    def takes_selections(
        self, segment: Segment, selections: list[tuple[torch.Tensor, torch.Tensor]], factor: float
    ) -> bool:
        """Record all ranks' selections, and return True, if they are few and one pass can apply them."""
        tensor_class, arena = segment.tensor_class, self._flat.arena_with(segment)
        if sum(len(indices) for indices, _ in selections) > segment.length // 2 or not (
            arena.memory.hands_back and kernel_updates.takes_in(tensor_class.dtype, tensor_class.device)
        ):
            return False
        self.received.append((segment, selections, factor))
        return True

    def update_of(self, slot: Slot) -> torch.Tensor:
        """Return where the update of a tensor, or of this rank's shard of it, is written, in its shape, contiguous."""
        if slot.index in self._flat.in_place:
            return self._flat.in_place.of(slot)
        return self._flat.arena_of[slot.index].gradients[slot.index]

    def forget(self) -> None:
        """Forget the values of a round: it has been applied, or comes to nothing."""
        self.sent.clear()
        self.received.clear()
        if self.bases is not None:
            self.bases.forget()

    # -- a sample of values, for the choice of codecs -------------------------------------------------------------

    def start_sample(self, elements: int) -> None:
        """Copy some of the values of the next step, which selects so many ``elements``, for :meth:`end_sample`."""
        self._sample = ValueSample(elements)

    def observe(self, values: torch.Tensor, count: int | torch.Tensor) -> None:
        """Copy some of the values that a message has of a segment, in a step that is asked for a sample."""
        if self._sample is not None:
            self._sample.take(values, count)

    def end_sample(self) -> torch.Tensor | None:
        """Return the sample, as :meth:`ValueSample.values` does, and stop sampling; None: none was asked for."""
        sample, self._sample = self._sample, None
        return None if sample is None else sample.values()

    # -- zeros beside other values, for the choice of quantisers --------------------------------------------------

    @property
    def counts_zeros(self) -> bool:
        """Return whether zeros of the step under way are counted."""
        return self._zeros is not None

    def start_zeros(self) -> None:
        """Count zeros in the blocks of the next step, for :meth:`end_zeros`."""
        self._zeros = ZeroCount()

    def count_zeros(self, slot: Slot, values: torch.Tensor | None) -> None:
        """Count zeros in the blocks of a tensor, in a step that is asked for it."""
        if self._zeros is not None:
            self._zeros.take(values, slot.numel, block_size(slot.shape))

    def end_zeros(self) -> tuple[int, int]:
        """Return the coordinates in mixed blocks, and all that were counted; stop counting."""
        count, self._zeros = self._zeros, None
        return (0, 0) if count is None else count.counts()
