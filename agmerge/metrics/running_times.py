# SPDX-License-Identifier: Apache-2.0
"""Medians of the steps of one rank since they were last read."""

from __future__ import annotations

import numpy as np

from agmerge.metrics.chrome_trace import Trace
from agmerge.metrics.step_times import Clock, Seconds, StepRecorder, StepTimes

KEEP = 50  # steps: the medians are of no more
ENOUGH = 10  # steps of each average that are measured by the clock of a device


class RunningStepTimes:
    """Times of the last steps under one plan, and their medians."""

    def __init__(self) -> None:
        self.exposed = 0.0  # seconds waited for messages, in all steps so far
        self.steps: list[StepTimes] = []  # of this average, the last ``KEEP``
        self.trace: Trace | None = None  # takes every step
        self._last: StepRecorder | None = None  # of the last step, with marks still to be read
        self._before: StepTimes | None = None  # the typical step when this average began

    def add_exposed(self, seconds: float) -> None:
        """Count seconds of waiting for messages that no recorder has measured."""
        self.exposed += seconds

    def measures_next(self, clock: Clock) -> bool:
        """Return whether the next step is measured by ``clock``.

        The clock of a device measures only the first steps of an average, and all steps that are traced.
        """
        measured = len(self.steps) + (self._last is not None)
        return not clock.on_device or self.trace is not None or measured < ENOUGH

    def observe(self, recorder: StepRecorder) -> None:
        """Add a step that has been received, if it was measured.

        Its marks are read one step later: by then every device has reached them.
        """
        if recorder.clock.measures:
            self.settle()
            self._last = recorder

    def settle(self) -> None:
        """Read the marks of the last step, if they were not read yet."""
        if self._last is not None:
            recorder, self._last = self._last, None
            times = recorder.times()
            self.exposed += float(times.exposed.sum())
            self.steps = [*self.steps[1 - KEEP :], times]
            if self.trace is not None:
                self.trace.add(recorder.began, times)

    def record(self, trace: Trace | None) -> None:
        """Write every step into ``trace`` from the next one on; None: no longer."""
        self.settle()
        self.trace = trace

    def restart(self) -> None:
        """Begin a new average under the same plan."""
        self._before = self.typical()
        self.steps = []

    def forget(self) -> None:
        """Begin a new average without the last one: plan, membership or compressor have changed."""
        self.settle()
        self.steps, self._before = [], None

    def ready(self) -> Seconds:
        """Return when each tensor was ready, seconds since the first, (n,): medians, never falling in the plan's order.

        Of the last average where this one has no step yet. Raises ``LookupError`` where there was none at all.
        """
        typical = self.typical()
        if typical is None:
            raise LookupError("no step has been averaged")
        return np.asarray(np.maximum.accumulate(typical.ready))

    def making(self) -> Seconds:
        """Return the seconds to make each merge buffer's message, (m,): medians, as :meth:`ready`."""
        return self._median("making")

    def travel(self) -> Seconds:
        """Return the seconds of each merge buffer's exchange, (m,): medians, as :meth:`ready`."""
        return self._median("travel")

    def _median(self, what: str) -> Seconds:
        """Return the medians of one figure of steps, (m,). Of the last average, and raises, as for :meth:`ready`."""
        self.settle()
        steps = self.steps or ([] if self._before is None else [self._before])
        if not steps:
            raise LookupError("no step has been averaged")
        return np.asarray(np.median([getattr(times, what) for times in steps], axis=0))

    def typical(self) -> StepTimes | None:
        """Return the median step, mark by mark; of the last average where this one has none yet; else None."""
        self.settle()
        if not self.steps:
            return self._before
        fields = StepTimes.__dataclass_fields__
        return StepTimes(*(np.median([getattr(times, name) for times in self.steps], axis=0) for name in fields))
