# SPDX-License-Identifier: Apache-2.0
"""Status of planning on one rank, for reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import merging
from agmerge.step.config import Config
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
