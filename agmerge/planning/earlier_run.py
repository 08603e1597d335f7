"""Recall the plan of an earlier run like this one, and keep this run's plan for the next."""

from __future__ import annotations

import socket
from pathlib import Path

from agmerge.backends.handshake import gather_texts
from agmerge.planning import known_plans
from agmerge.planning.known_plans import KnownPlan
from agmerge.planning.measuring import number_of_rank_0
from agmerge.step.agreement import decide_on_rank_0
from agmerge.step.merge_buffers import MergeBuffers


class EarlierRun:
    """Earlier runs, of one agreement. Rank 0 reads and writes files, and tells the others."""

    def __init__(self, buffers: MergeBuffers) -> None:
        self._buffers = buffers
        self._file: Path | None = None  # rank 0's, for the plan of this run; None: it is kept already, or nowhere

    def recall(self) -> KnownPlan | None:
        """Collective. Return the plan that an earlier run like this one has kept; None: there is none."""
        buffers, where = self._buffers, known_plans.folder()
        if not number_of_rank_0(buffers, where is not None):
            return None
        hosts = gather_texts(buffers.comm, socket.gethostname().encode(), "hosts", buffers.config.guards.timeout)
        if buffers.comm.rank == 0 and where is not None:
            self._file = known_plans.path_of(where, buffers, [host.decode() for host in hosts])

        def decide() -> dict[str, str]:
            return {"known": "" if self._file is None else known_plans.recall(self._file, buffers)}

        text = decide_on_rank_0(buffers.comm, decide, None, buffers.config.guards.timeout)["known"]
        return KnownPlan.loads(text) if text else None

    def keep(self, known: KnownPlan) -> None:
        """Keep a plan for later runs, on rank 0; once, and only where :meth:`recall` has asked for one."""
        if self._file is not None:
            known_plans.keep(self._file, known)
            self._file = None
