"""Running averages of the steps of one rank: what has been seen since the last look."""

from __future__ import annotations

import numpy as np

from agmerge.metrics.chrome_trace import Trace
from agmerge.metrics.step_times import Seconds, StepRecorder, StepTimes

KEEP = 50  # steps


class RunningStepTimes:
    """The times of the last steps under one plan. ``exposed``: seconds waited in all steps so far."""

    def __init__(self) -> None:
        self.exposed = 0.0
        self.steps: list[StepTimes] = []
        self.trace: Trace | None = None  # is told of every step
        self._last: StepRecorder | None = None
        self._before: StepTimes | None = None  # what was typical up to the last look

    def observe(self, recorder: StepRecorder) -> None:
        """A step has been received. Its marks are read one step later: by then every device has got there."""
        self.settle()
        self._last = recorder

    def settle(self) -> None:
        """Read the marks that are still to be read."""
        if self._last is not None:
            recorder, self._last = self._last, None
            times = recorder.times()
            self.exposed += float(times.exposed.sum())
            self.steps = [*self.steps[1 - KEEP :], times]
            if self.trace is not None:
                self.trace.add(recorder.began, times)

    def restart(self) -> None:
        """Begin a new average under the same plan."""
        self._before = self.typical()
        self.steps = []

    def forget(self) -> None:
        """Begin anew: plan, membership or compressor are other ones."""
        self.settle()
        self.steps, self._before = [], None

    def ready(self) -> Seconds:
        """When each tensor was ready, seconds since the first, (n,): medians, never falling in the plan's order.

        Of the last average where this one has no step yet. ``LookupError`` where there was none at all.
        """
        typical = self.typical()
        if typical is None:
            raise LookupError("no step has been averaged")
        return np.asarray(np.maximum.accumulate(typical.ready))

    def travel(self) -> Seconds:
        """Seconds of each merge buffer's exchange, (m,): medians."""
        self.settle()
        return np.asarray(np.median([times.travel for times in self.steps], axis=0))

    def typical(self) -> StepTimes | None:
        """The median of everything, mark by mark; of the last average where this one has none yet; else None."""
        self.settle()
        if not self.steps:
            return self._before
        fields = StepTimes.__dataclass_fields__
        return StepTimes(*(np.median([getattr(times, name) for times in self.steps], axis=0) for name in fields))
