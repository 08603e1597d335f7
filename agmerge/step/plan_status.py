# SPDX-License-Identifier: Apache-2.0
"""Status of planning on one rank, for reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import merging
from agmerge.step.config import Config
from sparsifiers.quantising.choice import NONE

NO_AGREEMENT = "nothing has been sent: ranks agree on it in the first step"


class Activity(Enum):
    """Activity of planning: the values are those of ``stats()["planning"]``, and ``words`` those of ``summary()``."""

    FIXED = "fixed", "fixed"
    TIMING = "timing", "still measuring the first steps"
    KNOWN = "known", "from an earlier run"
    PROBING = "probing", "still measuring the network"
    TRYING = "trying", "still comparing plans"
    SETTLED = "settled", "chosen by measurements"

    words: str

    def __new__(cls, value: str, words: str) -> Activity:
        """Return a member with its words."""
        member = object.__new__(cls)
        member._value_, member.words = value, words
        return member

    @property
    def measures(self) -> bool:
        """Return whether measuring has not ended."""
        return self in (Activity.TIMING, Activity.PROBING, Activity.TRYING)


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
