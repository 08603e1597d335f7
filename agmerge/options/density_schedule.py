# SPDX-License-Identifier: Apache-2.0
"""Change the density by step: warm-up, and schedules of the script's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agmerge.options.arguments import is_whole
from agmerge.step.density_policy import Schedule

START = 0.25  # density at which every warm-up begins
RUNGS = (0.25, 0.0625, 0.015625, 0.004, 0.001)  # Lin et al., ICLR 2018, section 4.1
RUNG_STEPS = 200  # of "dgc", which does not know how long an epoch is


def ladder(steps: int) -> Callable[[int], float]:
    """Return the warm-up schedule of the DGC paper, for ``warmup=``.

    The density is 25, 6.25, 1.5625, 0.4 and then 0.1 %, where it stays.

    Args:
        steps (int): Number of steps at each density, for example the steps of one epoch.

    Raises:
        ValueError: For fewer than one step.
    """
    if not is_whole(steps, 1):
        raise ValueError(f"ladder: the steps of a rung must be a whole number of at least 1, got {steps!r}")
    return lambda step: RUNGS[min(step // steps, len(RUNGS) - 1)]


def parse_warmup(warmup: Any, by_pattern: bool) -> Schedule | None:
    """Return the schedule of ``warmup=``: ``None``, ``"dgc"``, a number of steps, or ``callable(step)``.

    ``by_pattern``: densities differ by parameter, so that a callable has no meaning. Raises ``ValueError`` for that and
    for anything else.
    """
    if warmup is None:
        return None
    if warmup == "dgc":
        rungs = ladder(RUNG_STEPS)
        last = RUNG_STEPS * len(RUNGS)
        return Schedule("dgc", lambda step, target: target if step >= last else max(target, rungs(step)))
    if is_whole(warmup, 1):
        return Schedule(str(warmup), lambda step, target: _geometric(step / warmup, target))
    if not callable(warmup):
        raise ValueError(
            f"warmup={warmup!r}: expected None, 'dgc', a number of steps > 0, or a callable step -> density"
        )
    if by_pattern:
        raise ValueError(
            "warmup= as a callable is not supported with density= by pattern. Pass a number as one of them."
        )
    schedule = Schedule("", lambda step, target: warmup(step))
    # Ranks cannot compare code, so they compare what it says.
    samples = ", ".join(f"{schedule(step, 1.0)!r} at {step}" for step in (0, 1, 10, 100, 1000))
    return Schedule(f"callable: {samples}", schedule.density)


def _geometric(part: float, target: float) -> float:
    """Return the density from START to ``target``, by a constant factor a step, as ``part`` goes from 0 to 1."""
    return target if part >= 1.0 or target >= START else START * (target / START) ** part
