# SPDX-License-Identifier: Apache-2.0
"""Chrome traces of real steps, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agmerge.metrics.step_times import StepTimes
from merging.storage import write

LINES = {"ready": 1, "select": 2, "exchange": 3, "wait": 4, "write": 5}  # one a row, in this order
BETWEEN = 6  # the row of events between steps, where there are any


class Trace:
    """Trace of the steps of one rank. ``process``: the name of its rows."""

    def __init__(self, rank: int, process: str) -> None:
        self._rank = rank
        self._tensors: tuple[str, ...] = ()  # names, in readiness order
        self._counts: tuple[int, ...] = ()  # tensors per merge buffer
        self.events: list[dict[str, Any]] = [self._name("process_name", 0, process)]  # as the file has them
        self.events += [self._name("thread_name", line, name) for name, line in LINES.items()]
        self.steps = 0  # collected so far

    def follow(self, tensors: Sequence[str], counts: Sequence[int]) -> None:
        """Use these names, in readiness order, and numbers of tensors per merge buffer from now on."""
        self._tensors, self._counts = tuple(tensors), tuple(counts)

    def add(self, began: float, times: StepTimes) -> None:
        """Append a step that began so many seconds after the epoch."""
        for name, line, start, stop, about in self._spans(times):
            event = {"name": name, "pid": self._rank, "tid": line, "ts": 1e6 * (began + start), "args": about}
            if line == LINES["ready"]:
                self.events.append({**event, "ph": "i", "s": "t"})
            else:
                self.events.append({**event, "ph": "X", "dur": 1e6 * max(0.0, stop - start)})
        self.steps += 1

    def note(self, name: str, began: float, seconds: float) -> None:
        """Append an event between two steps, which began ``began`` seconds after the epoch."""
        row = self._name("thread_name", BETWEEN, "between steps")
        if row not in self.events:
            self.events.append(row)
        event = {"name": name, "pid": self._rank, "tid": BETWEEN, "args": {"step": self.steps}}
        self.events.append({**event, "ph": "X", "ts": 1e6 * began, "dur": 1e6 * seconds})

    def _spans(self, times: StepTimes) -> Iterator[tuple[str, int, float, float, dict[str, Any]]]:
        """Yield the name, line, start and end (seconds since the step began) and facts of each event of a step."""
        about: dict[str, Any] = {"step": self.steps}
        for tensor, ready in zip(self._tensors, times.since.tolist(), strict=True):
            yield tensor, LINES["ready"], ready, ready, about
        columns = (times.complete, times.handed, times.waiting, times.received, times.written, times.arrived)
        free = 0.0
        for index, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            complete, handed, waiting, received, written, arrived = row
            buffer, about = f"buffer {index}", {"step": self.steps, "tensors": self._counts[index]}
            yield buffer, LINES["select"], complete, handed, about
            yield buffer, LINES["exchange"], max(free, handed), arrived, about
            yield buffer, LINES["wait"], waiting, received, about
            yield buffer, LINES["write"], received, written, about
            free = arrived

    def _name(self, kind: str, line: int, name: str) -> dict[str, Any]:
        """Return the event that names a process or a row."""
        return {"ph": "M", "name": kind, "pid": self._rank, "tid": line, "args": {"name": name}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON, atomically."""
        write(path, json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}))


def path_of(path: str | os.PathLike[str], rank: int, size: int) -> Path:
    """Return a file of this rank's own: ``trace.json`` becomes ``trace.rank0.json`` where there are several ranks."""
    whole = Path(path)
    return whole if size == 1 else whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")
