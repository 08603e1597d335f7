# SPDX-License-Identifier: Apache-2.0
"""Plan which gradients share a message, and predict when each message is sent.

    planner = merging.get("threshold", bytes=8 << 20)
    plan = planner.plan(profile, costs, mode="behind")
    merging.predict(plan, profile, costs, "behind").finish

Planners assign the tensors of a model, in the order in which gradients become ready, to merge buffers. :func:`predict`
returns when each is sent, and when the last one has arrived. The results depend only on the arguments. This package
needs only the standard library and NumPy.
"""

# Files, for those who read on:
#
# * plan: the partition. costs: profiles and costs. measured: measurements of a run. storage: all of them in files.
# * timeline: predicted times of a plan. dense_cutoff: budgets, and which tensors go dense.
# * planner: the base of planners. planners/: all of them. pieces: planning that can be interrupted. registry: by name.
# * drawing: plans side by side, as a table and a picture.

from __future__ import annotations

from merging.costs import Cost, Costs, Profile
from merging.measured import Curve, Measurements, best
from merging.pieces import Pieces, in_pieces
from merging.plan import Plan
from merging.planner import Planner
from merging.registry import get, names, register
from merging.timeline import MODES, Span, Timeline, divide, predict

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
