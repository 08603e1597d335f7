# SPDX-License-Identifier: Apache-2.0
"""Times of forward passes, and DeAR plans made from them: its all-gathers travel while the next forward runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

import merging
from agmerge.engine.dear_modules import Parameters
from agmerge.metrics.running_times import KEEP, RunningStepTimes
from agmerge.metrics.step_times import Clock, Seconds
from agmerge.planning.cost_probe import MeasuredCosts
from agmerge.planning.measurer import Look, Measurer
from agmerge.planning.measuring import gather_seconds
from agmerge.planning.seen_messages import SeenMessages
from agmerge.step.merge_buffers import MergeBuffers


class ForwardTimed(Protocol):
    """Interface of the :class:`agmerge.engine.dear.DearReducer` that is planned for, which imports this file."""

    def flush(self) -> None:
        """Collective. Apply every pending update."""

    def forward_seconds(self) -> Seconds:
        """Return the seconds of forward of each tensor, (n,), as measured on this rank."""


class DearMeasurer(Measurer):
    """Measurer for mode ``"dear"``: backward, forward and exchanges. ``reducer`` is held weakly."""

    def __init__(self, buffers: MergeBuffers, times: RunningStepTimes, reducer: ForwardTimed) -> None:
        super().__init__(buffers, times)
        self._reducer = weakref.proxy(reducer)

    def measure(
        self, step: int, look: Look | None = None, *, at_once: bool = False
    ) -> Iterator[merging.Measurements | None]:
        """Collective. Measure. Pending updates are applied first: nothing is in flight while exchanges are timed."""
        self._reducer.flush()
        for part in super().measure(step, look, at_once=at_once):
            yield part
            self._reducer.flush()

    def seen(self, step: int, look: Look) -> SeenMessages | None:
        """Return None: messages in backward are only one half of each exchange."""
        return None

    def with_costs(self, step: int, ready: Seconds, costs: MeasuredCosts) -> merging.Measurements:
        """Collective. Return the measurements for planning, with seconds of forward."""
        (forward,) = gather_seconds(self.buffers, self._reducer.forward_seconds())
        measured = super().with_costs(step, ready, costs)
        profile = measured.profile
        with_forward = merging.Profile(**{**profile.plain(), "forward": forward.max(axis=0)})
        return replace(measured, profile=with_forward, modes=("dear",))


class Visit(NamedTuple):
    """Marks of one run of a module's forward; only the clock can read a mark."""

    reader: int  # the module's number
    reached: Any  # mark of the moment when its forward was about to begin
    received: Any  # mark of the moment when its messages had arrived


class ForwardTimes:
    """Durations of the forward of each reader: up to the next reader's, for the last one up to the first gradient.

    A reader is a module that reads parameters by itself. The update of its parameters counts as its forward, waiting
    for messages does not.
    """

    def __init__(self, clock: Clock, readers: Sequence[Parameters]) -> None:
        self._clock, self._readers = clock, readers
        self.open = False  # between a step and the first gradient after it
        self._visits: list[Visit] = []  # of the pass under way
        self._ended: tuple[list[Visit], Any] | None = None  # a pass that is over and not read, with the mark of its end
        self._passes: list[Seconds] = []  # the last ones, seconds by reader

    def begin(self) -> None:
        """Begin to measure the next forward pass: a step has ended."""
        self._visits, self.open = [], True

    def mark(self) -> Any:
        """Return a mark of now; None outside a measured forward pass."""
        return self._clock.mark() if self.open else None

    def reached(self, reader: int, mark: Any) -> None:
        """Record that a reader, reached at ``mark``, has its messages now."""
        if self.open and mark is not None:
            self._visits.append(Visit(reader, mark, self._clock.mark()))

    def end(self) -> None:
        """End the pass: the first gradient is ready.

        Marks are read one pass later, when every device has reached them.
        """
        if self.open:
            self._read_marks()
            self.open, self._ended = False, (self._visits, self._clock.mark())

    def of(self, parameters: Iterable[torch.Tensor]) -> Seconds:
        """Return the seconds of forward for each of ``parameters``, (n,): medians, a reader's divided equally."""
        self._read_marks()
        index_of = {parameter: i for i, parameter in enumerate(parameters)}
        seconds = np.zeros(len(index_of))
        typical = np.median(self._passes, axis=0) if self._passes else np.zeros(len(self._readers))
        for reader, duration in zip(self._readers, typical.tolist(), strict=True):
            indices = [index_of[parameter] for parameter in reader if parameter in index_of]
            for index in indices:
                seconds[index] += duration / len(indices)
        return seconds

    def _read_marks(self) -> None:
        """Convert the marks of the pass that has ended into seconds by reader."""
        if self._ended is None:
            return
        (visits, end), self._ended = self._ended, None
        if not visits:
            return
        origin = visits[0].reached
        reached = self._clock.since(origin, [*(visit.reached for visit in visits), end])
        received = self._clock.since(origin, [visit.received for visit in visits])
        seconds = np.zeros(len(self._readers))
        np.add.at(seconds, [visit.reader for visit in visits], np.maximum(reached[1:] - received, 0.0))
        self._passes = [*self._passes[1 - KEEP :], seconds]
