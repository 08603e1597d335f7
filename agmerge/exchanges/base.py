"""What an exchange is: ``start`` sends, ``wait`` receives, ``finish`` writes the update.

An exchange never touches a residual. It calls ``commit`` with this rank's part of the update as soon as that
part is known: at the start where what is sent is what counts (dense, sparse), in ``finish`` where the ranks
decide together (a global threshold, an agreed mask, low-rank factors). Conservation holds for every exchange
by construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from agmerge.backends import Backend, Handle
from agmerge.exchanges.message.format import RoundHeader
from agmerge.ops import ReduceOp
from agmerge.tensors.layout import Segment
from sparsifiers import Selection

# (segment, indices or None for all of it, sent): take `sent` (None: all there is, as it is) off the segment's work.
Commit = Callable[[Segment, "torch.Tensor | None", "torch.Tensor | None"], None]


@dataclass(frozen=True)
class SegmentBuffers:
    """One segment with its memory, 1-D of ``segment.length``: ``work`` goes out, ``update`` is written."""

    segment: Segment
    work: torch.Tensor
    update: torch.Tensor


@dataclass
class InFlight:
    """A message under way: started, not finished.

    ``bytes``: handed to collectives so far. ``codecs``: those by what they are, see
    :meth:`agmerge.exchanges.message.format.Format.by_codec`; empty where they are elements sent whole.
    """

    name: str
    loads: Sequence[SegmentBuffers]
    control: RoundHeader
    handle: Handle
    bytes: int
    elements: int
    message: torch.Tensor
    received: torch.Tensor
    extra: Any = None
    codecs: Mapping[str, int] = field(default_factory=dict)


class Exchange(ABC):
    """Combines the messages of all ranks. Its buffers are kept from step to step.

    ``selects``: whether it sends what a sparsifier offers of sparse segments; else it sends all of them. ``rides``:
    whether dense segments may come along.
    """

    sparse: ClassVar[bool] = True
    carries_dense: ClassVar[bool] = True
    mixes_lanes: ClassVar[bool] = True  # whether a message may have segments of several lanes
    pipelines_parts: ClassVar[bool] = False  # whether a merge buffer in several messages overlaps their ways

    def __init__(self, comm: Backend, op: ReduceOp, commit: Commit, timeout: float) -> None:
        self.comm, self.scale, self.commit, self.timeout = comm, op.scale(comm.size), commit, timeout
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}

    @abstractmethod
    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Send the message of one merge buffer; returns at once. An offer is what the compressor chose."""

    @property
    def can_poll(self) -> bool:
        """Whether :meth:`arrived` can tell that a whole exchange has ended."""
        return True

    def arrived(self, pending: InFlight) -> bool:
        """Whether the exchange is known to have ended."""
        return self.can_poll and pending.handle.done()

    @abstractmethod
    def wait(self, pending: InFlight) -> RoundHeader:
        """Collective. Return what all ranks say together, once every message is here and checked. Writes nothing."""

    @abstractmethod
    def finish(self, pending: InFlight) -> None:
        """Write the update of every load. Called after ``wait``, in plan order."""

    def keep(self, key: tuple[object, ...], length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D buffer of this exchange's own, the same one at every step."""
        full = (*key, dtype, device)
        buffer = self._kept.get(full)
        if buffer is None or buffer.numel() < length:
            # Zeroed, so that gaps between sections never send what happened to lie in memory.
            buffer = self._kept[full] = torch.zeros(length, dtype=dtype, device=device)
        return buffer[:length]

    def accumulator(self, load: SegmentBuffers) -> torch.Tensor:
        """Where contributions to ``load`` are added up: its update, or float32 scratch for 16 bits."""
        if load.update.dtype == load.work.dtype:
            return load.update
        return self.keep(("accumulator",), load.update.numel(), load.work.dtype, load.update.device)
