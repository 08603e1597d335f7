# SPDX-License-Identifier: Apache-2.0
"""Options of ``sync="updates"``: the optimizer's updates of parameters are exchanged, not gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

import merging
import sparsifiers
from agmerge.backends.handshake import Fact
from sparsifiers.memories import Decaying, HandBack, NoMemory, Residual

GRADIENTS, UPDATES = SYNCS = ("gradients", "updates")
APPLY, HOLD = CARRIES = ("apply", "hold")

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Updates:
    """Options of an exchange of updates: its schedule, the residual, and the outer optimizer."""

    carry: str  # "apply": the residual stays in this worker's parameters; "hold": beside the shared parameters
    every: int  # steps from one exchange of a parameter to the next
    fragments: int  # the merge buffers take turns, in so many groups
    overlap: int  # steps between sending and receiving
    decay: float  # of residuals, from one exchange to the next
    outer: Outer | None  # makes the optimizer that steps with the combined updates; None: they are taken as they are

    def fragment_at(self, step: int) -> int | None:
        """Return the number of the fragment that is exchanged after step ``step`` (1, 2, ...); None: none is."""
        phase = step % self.every
        return next((f for f in range(self.fragments) if f * self.every // self.fragments == phase), None)

    def merge_buffers_of(self, fragment: int) -> Callable[[int], Collection[int]] | None:
        """Return which merge buffers, of so many, are in a fragment; None: all are."""
        if self.fragments == 1:
            return None
        return lambda count: {buffer for buffer in range(count) if buffer * self.fragments // count == fragment}

    def memory_for(self, compressor: sparsifiers.Compressor, *, narrow: bool = False) -> sparsifiers.Memory:
        """Return the memory of the residuals of ``compressor``.

        With "apply" the parameters hold them, unless they are ``narrow``, of 16 bits: these could not.
        """
        if compressor.memory == "none":  # it drops nothing
            return NoMemory()
        if self.carry == APPLY:
            return Residual() if narrow else HandBack()
        return Residual() if self.decay == 1.0 else Decaying(self.decay)

    def facts(self) -> Iterator[Fact]:
        """Yield the facts that must be the same on every rank."""
        yield "carry", self.carry
        yield "every", str(self.every)
        yield "fragments", str(self.fragments)
        yield "overlap", str(self.overlap)
        yield "decay", str(self.decay)
        # Without addresses, which differ from process to process.
        yield "outer", re.sub(r" at 0x[0-9a-fA-F]+", "", str(getattr(self.outer, "__qualname__", repr(self.outer))))


def planner_for(updates: Updates, planner: merging.Planner | None, numel: int) -> merging.Planner | None:
    """Return the planner: where merge buffers take turns one by size, of about as many buffers as fragments.

    ``numel``: elements of all parameters. A planner without times stays.
    """
    if updates.fragments == 1 or planner is None or not planner.timed:
        return planner
    return merging.get("threshold", bytes=max(1, 4 * numel // updates.fragments))
