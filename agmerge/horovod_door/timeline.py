# SPDX-License-Identifier: Apache-2.0
"""Timeline of a script's collectives, a Chrome trace with the phases that Horovod's has: ``hvd.start_timeline``.

Each name has a row. ``NEGOTIATE_ALLREDUCE`` lasts until all ranks have made the call, ``ALLREDUCE`` until the call has
returned. An asynchronous call returns when its messages have left.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agmerge
from agmerge.runtime.collectives import operation

CYCLE = "CYCLE_START"


class Timeline:
    """Timeline that is being recorded. ``path``: of its file. ``marks_cycles``: agreements of ranks are events."""

    def __init__(self, path: str, marks_cycles: bool) -> None:
        self._path, self._marks_cycles = path, marks_cycles
        self._began, self._rows = time.monotonic(), {CYCLE: 0}  # numbers of rows, by what they are about
        about = {"name": "agmerge", "start_time_since_epoch_in_micros": int(1e6 * time.time())}
        self._events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": about}]
        self._agreed: list[float] = []  # when the ranks have agreed on calls, since the last look
        self._stop = operation.watch(lambda ranks, tensors: self._agreed.append(time.monotonic()))

    def add(self, kind: str, name: str, began: float, ended: float) -> None:
        """Record a call. ``began``, ``ended``: of ``time.monotonic``, in seconds."""
        agreed = min((one for one in self._agreed if began <= one <= ended), default=began)
        self._agreed.clear()
        if name not in self._rows:
            self._rows[name] = len(self._rows)
            self._event("thread_name", "M", name, args={"name": name})
        for phase, start, end in ((f"NEGOTIATE_{kind}", began, agreed), (kind, agreed, ended)):
            self._event(phase, "X", name, ts=1e6 * (start - self._began), dur=1e6 * (end - start))
        if self._marks_cycles:
            self._event(CYCLE, "i", CYCLE, ts=1e6 * (agreed - self._began), s="g")

    def _event(self, what: str, phase: str, row: str, **more: Any) -> None:
        self._events.append({"name": what, "ph": phase, "pid": 0, "tid": self._rows[row], **more})

    def end(self) -> None:
        """Write the file, on rank 0."""
        self._stop()
        if agmerge.rank() == 0:
            Path(self._path).write_text(json.dumps(self._events), encoding="utf-8")


_timeline: Timeline | None = None  # written by start_timeline and stop_timeline alone


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record collectives until :func:`stop_timeline` or ``shutdown()``; rank 0 then writes them to ``file_path``."""
    global _timeline
    stop_timeline()
    _timeline = Timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the recording, if there is one, and write its file on rank 0."""
    global _timeline
    ended, _timeline = _timeline, None
    if ended is not None and agmerge.is_initialized():
        ended.end()


def timed(kind: str, name: str | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, of which the timeline records how long it takes, if there is one."""
    timeline = _timeline
    if timeline is None:
        return call

    def recorded(*arguments: Any, **options: Any) -> Any:
        began = time.monotonic()
        result = call(*arguments, **options)
        timeline.add(kind.upper(), f"{kind}.{name or 'noname'}", began, time.monotonic())
        return result

    return recorded
