# SPDX-License-Identifier: Apache-2.0
"""Plans of which gradients share a message, and predictions of when each message leaves.

Planners partition the tensors of a model, in readiness order, into merge buffers; `predict` returns when
each is sent and when the last has arrived. Pure functions of their arguments; standard library and
numpy only.

    planner = merging.get("threshold", bytes=8 << 20)
    plan = planner.plan(profile, costs, mode="behind")
    merging.predict(plan, profile, costs, "behind").finish
"""

from __future__ import annotations

from merging.costs import Cost, Costs
from merging.curve import Curve
from merging.measured import Measurements, best
from merging.message_split import divide
from merging.pieces import Pieces, in_pieces
from merging.plan import Plan
from merging.planner import Planner
from merging.profile import Profile
from merging.registry import get, names, register
from merging.timeline import MODES, Span, Timeline, predict

__all__ = [
    "MODES",
    "Cost",
    "Costs",
    "Curve",
    "Measurements",
    "Pieces",
    "Plan",
    "Planner",
    "Profile",
    "Span",
    "Timeline",
    "best",
    "divide",
    "get",
    "in_pieces",
    "names",
    "predict",
    "register",
]
