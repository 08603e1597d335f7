"""Recording the steps of a training script, for as long as a ``with`` lasts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from agmerge.engine import Engine
from agmerge.errors import AGMergeError
from agmerge.trace import Trace, path_of


@contextmanager
def traced(engine: Engine, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the steps inside, and write them to a file of this rank's."""
    averages = engine.averages
    if averages.trace is not None:
        raise AGMergeError("trace(): a trace is being recorded already; end that one first")
    rank, size = (engine.comm.rank, engine.comm.size) if engine.comm is not None else (0, 1)
    averages.settle()
    trace = averages.trace = Trace(rank, f"rank {rank}")
    engine.tell(trace)
    try:
        yield
    finally:
        averages.settle()
        averages.trace = None
        trace.save(path_of(path, rank, size))
