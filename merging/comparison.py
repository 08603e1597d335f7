# SPDX-License-Identifier: Apache-2.0
"""Comparison of all planners on the same measurements, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merging.measured import Measurements, forward_after, step_end
from merging.plan import Plan
from merging.planners.agmerge import BUDGET
from merging.registry import get, names
from merging.timeline import predict

_HEADS = ("planner", "mode", "finish (ms)", "finish / best", "exposed (ms)", "merge buffers", "uncompressed")


@dataclass(frozen=True)
class Row:
    """Prediction for one planner in one mode.

    finish: seconds from the start of backward to the end of the last exchange. Where mode "dear" is among the
        modes of the measurements, to the end of the next forward pass, in every row.
    ratio: finish over the smallest finish of all rows; 1.0 is the best.
    exposed: exposed time, in seconds: finish less the last merge buffer's ready, that is less backward and the
        selection of this plan, and less forward where finish has it. Selection is no communication, so a plan
        that selects for longer may be exposed for less time and yet finish later.
    """

    planner: str
    mode: str
    plan: Plan
    finish: float
    ratio: float
    exposed: float

    @property
    def buffers(self) -> int:
        """Return the number of merge buffers."""
        return len(self.plan.counts)


def compare(measurements: Measurements) -> tuple[Row, ...]:
    """Return a row per planner, with its defaults, and mode of the measurements that it plans for; best first.

    Of rows that finish together, the one with fewer merge buffers comes first, then the order of `names()` and
    of the modes. Only dear plans for mode "dear". exact has ten times the work of agmerge before it
    settles for the best plan so far, some ten seconds instead of minutes. agtf keeps to its limit
    on noise only where the profile has noise.
    """
    profile, costs = measurements.profile, measurements.costs
    predicted = []
    for name in names():
        planner = get(name, budget=10 * BUDGET) if name == "exact" else get(name)
        for mode in measurements.modes:
            if mode in planner.modes:
                plan = planner.plan(profile, costs, mode)
                ready = predict(plan, profile, costs, mode).spans[-1].ready
                finish = step_end(plan, measurements, mode)
                predicted.append((finish, plan, name, mode, max(finish - ready - forward_after(measurements), 0.0)))
    best = min(finish for finish, *_ in predicted)
    predicted.sort(key=lambda row: (row[0], len(row[1].counts)))
    return tuple(
        Row(name, mode, plan, finish, finish / best if best else 1.0, exposed)
        for finish, plan, name, mode, exposed in predicted
    )


def comparison_table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned lines of text, in their order, under a line of headings; times in ms."""
    lines = [_HEADS]
    for row in rows:
        times = f"{1e3 * row.finish:.3f}", f"{row.ratio:.3f}", f"{1e3 * row.exposed:.3f}"
        lines.append((row.planner, row.mode, *times, str(row.buffers), str(sum(row.plan.dense))))
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADS))]
    text = []
    for line in lines:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        text.append("  ".join((*left, *right)))
    return "\n".join(text)
