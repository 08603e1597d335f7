# SPDX-License-Identifier: Apache-2.0
"""Status of planning on one rank, for reports."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum

import merging
from agmerge.metrics.totals import Totals
from agmerge.step.config import Config
from agmerge.step.merge_buffers import MergeBuffers
from sparsifiers.quantising.base import NONE

NO_AGREEMENT = "nothing has been sent: ranks agree on it in the first step"


class Activity(Enum):
    """Activity of planning: the values are those of ``stats()["planning"]``, and ``words`` those of ``summary()``."""

    FIXED = "fixed"
    TIMING = "timing"
    PROBING = "probing"
    TRYING = "trying"
    SETTLED = "settled"

    @property
    def words(self) -> str:
        """Return what planning does, in words."""
        return _WORDS[self]

    @property
    def measures(self) -> bool:
        """Return whether measuring has not ended."""
        return self in (Activity.TIMING, Activity.PROBING, Activity.TRYING)


_WORDS = {
    Activity.FIXED: "fixed",
    Activity.TIMING: "still measuring the first steps",
    Activity.PROBING: "still measuring the network",
    Activity.TRYING: "still comparing plans",
    Activity.SETTLED: "chosen by measurements",
}


@dataclass(frozen=True)
class PlanStatus:
    """Activity of planning, and the codec, exchange and quantiser in use, each with the reason for it."""

    wire: str  # the value codec of selected values; "auto": the gradient's own dtype
    exchange: str  # of sparse merge buffers
    wire_why: str = NO_AGREEMENT
    exchange_why: str = NO_AGREEMENT
    quantiser: str = NONE  # also where every merge buffer is sent dense
    bits: float | None = None  # of the quantiser, a coordinate
    quantiser_why: str = NO_AGREEMENT
    activity: Activity = Activity.FIXED
    bytes_probed: int = 0  # since the agreement
    measured: merging.Measurements | None = None  # behind the plan in use; None: nothing was measured


def unplanned(config: Config) -> PlanStatus:
    """Return the status of an exchange with ``config`` that makes no plans from times."""
    return PlanStatus(config.compression.wire, config.merging.exchange)


# Announce what planning has chosen to send, once, on standard error.

QUANTIZED = "{what} from {step} on: {times:.1f}x less traffic than DDP ({why})"
UNCOMPRESSED = "uncompressed {tensors} from {step} on, as DDP sends them ({why})"
DENSE = (
    "compression={name!r} sends {share} uncompressed from {step} on, because that is faster here ({why}). To compare "
    "compressors, add exchange='sparse'"
)
COMPRESSED = "compression={name!r} compresses all {tensors} from {step} on ({why})"


class Announcer:
    """Announcer of what one optimizer sends. It stays silent where the script leaves no choice."""

    def __init__(self) -> None:
        self._plan: merging.Plan | None = None  # the one that was looked at last
        self._chosen = ""  # that plan's choice, as text; "": there was none, or a named compressor as it is
        self._since: tuple[int, int, int] | None = None  # the choice's first step, and link bytes before it
        self._said: set[str] = set()  # choices that have had their line

    def look(self, buffers: MergeBuffers, status: PlanStatus, step: int, totals: Totals) -> None:
        """Announce a choice after the first step with it, of which the traffic is known. ``step``: the one to come."""
        if buffers.plan is not self._plan:
            self._plan, chosen = buffers.plan, _choice(buffers)
            if chosen != self._chosen:
                self._chosen, self._since = chosen, (step, totals.link_bytes, totals.link_bytes_dense)
                return
        if self._since is None or totals.link_bytes == self._since[1]:
            return
        (step, *before), self._since = self._since, None
        again = self._chosen in self._said and not buffers.config.quantisers  # selections may come and go with times
        if again or (not self._chosen and not self._said):
            return
        self._said.add(self._chosen)
        sent, dense = totals.link_bytes - before[0], totals.link_bytes_dense - before[1]
        if buffers.comm.rank == 0:
            sys.stderr.write(f"agmerge: {_line(buffers, status, step, dense / sent)}\n")

    def is_quiet(self, plan: merging.Plan) -> bool:
        """Return whether there is nothing to announce while this plan is in use: the quick answer of most steps."""
        return plan is self._plan and self._since is None


def _choice(buffers: MergeBuffers) -> str:
    """Return what the plan sends, if that is a choice: a quantizer, "none", or the share that is uncompressed."""
    if buffers.config.quantisers:
        assert buffers.quantiser is not None
        return NONE if all(buffers.plan.dense) else buffers.quantiser.name
    if not buffers.config.chooses_dense or buffers.config.quantises:
        return ""
    dense, count = _compressible(buffers)
    return "" if not dense else "all" if dense == count else "part"


def _compressible(buffers: MergeBuffers) -> tuple[int, int]:
    """Return how many compressible elements the plan sends uncompressed, and how many there are."""
    kinds = buffers.config.compression.compressor.kinds
    slots = [slot for slot in buffers.layout.slots if slot.tensor_class.kind in kinds]
    return sum(slot.numel for slot in slots if buffers.goes_dense(slot)), sum(slot.numel for slot in slots)


def _line(buffers: MergeBuffers, status: PlanStatus, step: int, times: float) -> str:
    """Return the line about what is sent. ``times``: the traffic of dense float32 gradients / that of a step now."""
    is_updates = buffers.config.sync.updates is not None
    tensors, when = ("updates", f"exchange {step + 1}") if is_updates else ("gradients", f"step {step + 1}")
    choice = _choice(buffers)
    if not buffers.config.quantisers:
        dense, count = _compressible(buffers)
        part = f"tensors with {dense / max(count, 1):.0%} of the values"
        share = f"all of the {tensors}" if choice == "all" else part
        text, name = DENSE if choice else COMPRESSED, buffers.config.compression.compressor.name
        return text.format(name=name, share=share, tensors=tensors, step=when, why=status.exchange_why)
    if choice == NONE:
        return UNCOMPRESSED.format(tensors=tensors, step=when, why=status.quantiser_why)
    what = f"{status.quantiser} ({status.bits:g} bits)"
    return QUANTIZED.format(what=what, step=when, times=times, why=status.quantiser_why)
