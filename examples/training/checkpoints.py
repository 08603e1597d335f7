# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints, a file a worker or one for any number of them, and find the last one that all workers have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import agmerge

KEPT = 2
ALL = "all.pt"  # the file of all workers
State = dict[str, Any]


class Checkpoints:
    """Keep the last two checkpoints in ``FOLDER/STEP/``: ``RANK.pt`` of each worker, and ``all.pt`` if portable.

    Files appear under their names when they are complete, so that a worker which dies while it writes leaves the
    checkpoint before. The folder need not be shared by hosts, but for ``all.pt``, which all workers read.
    """

    def __init__(self, folder: Path, portable: bool = False) -> None:
        self.folder = folder
        self.portable = portable  # whether other numbers of workers can go on from it

    def save(self, step: int, state: State, shared: State | None) -> None:
        """Collective. Write this worker's ``state``, and on rank 0 what is ``shared`` by all; remove old ones.

        All workers come back when all have written theirs: only then an older one is removed. Raises ``OSError`` on
        all of them where one cannot write.
        """
        place, problem = self.folder / str(step), ""
        try:
            place.mkdir(parents=True, exist_ok=True)
            write(place / f"{agmerge.rank()}.pt", state)
            if shared is not None:
                write(place / ALL, shared)
        except Exception as error:  # all workers must hear of it: they wait in the next line
            problem = f"worker {agmerge.rank()} could not save step {step} in {self.folder}: {error}"
        _raise_together(problem, OSError)
        for old in self._steps(f"{agmerge.rank()}.pt")[:-KEPT]:
            self._remove(old)

    def newest(self) -> tuple[int, bool] | None:
        """Collective. Return the last step that all workers can load, and whether from ``all.pt``; None if none.

        A file a worker is preferred, of which there must be as many as workers were. Raises ``ValueError`` on all
        workers where one cannot read a file.
        """
        own, problem = set(), ""
        try:
            own = {step for step in self._steps(f"{agmerge.rank()}.pt") if self._workers(step) == agmerge.size()}
        except Exception as error:  # as above
            problem = f"worker {agmerge.rank()} cannot read a checkpoint in {self.folder}: {error!r}"
        _raise_together(problem, ValueError)
        rows = agmerge.allgather_object((own, set(self._steps(ALL))))
        by_rank, portable = (set.intersection(*kind) for kind in zip(*rows, strict=True))
        if not by_rank | portable:
            return None
        step = max(by_rank | portable)
        return step, step not in by_rank

    def load(self, step: int, portable: bool) -> State:
        """Return this worker's state of a step, or with ``portable`` what all share."""
        name = ALL if portable else f"{agmerge.rank()}.pt"
        return torch.load(self.folder / str(step) / name, weights_only=True, map_location="cpu")

    def steps(self) -> list[int]:
        """Return the steps of which any file lies in the folder."""
        return self._steps("*.pt")

    def describe(self) -> str:
        """Return what lies in the folder, for an error: steps, and how many workers have saved them."""
        steps = self.steps()
        if not steps:
            return f"{self.folder} has no checkpoint on worker {agmerge.rank()}, and others have some"
        found = ", ".join(f"step {step} of {self._workers(step) or 'other'} workers" for step in steps)
        return f"{self.folder} has {found}, and here are {agmerge.size()}: save with --portable for other numbers"

    def _steps(self, name: str) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted({int(file.parent.name) for file in self.folder.glob(f"*/{name}") if file.parent.name.isdigit()})

    def _workers(self, step: int) -> int | None:
        """Return how many workers have saved the step, by this worker's file; None without one."""
        file = self.folder / str(step) / f"{agmerge.rank()}.pt"
        if not file.exists():
            return None
        return int(torch.load(file, weights_only=True, map_location="cpu", mmap=True)["workers"])

    def _remove(self, step: int) -> None:
        place = self.folder / str(step)
        (place / f"{agmerge.rank()}.pt").unlink()
        if agmerge.rank() == 0:
            (place / ALL).unlink(missing_ok=True)
        try:
            place.rmdir()
        except OSError:  # another worker's file is still there; the last one to go takes the folder with it
            pass


def write(path: Path, state: State) -> None:
    """Write ``state`` so that the file is complete, or not there at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        torch.save(state, unfinished)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _raise_together(problem: str, kind: type[Exception]) -> None:
    """Collective. Raise an error of this ``kind`` on all workers if one of them has a ``problem``, the first one's."""
    first = next(filter(None, agmerge.allgather_object(problem)), "")
    if first:
        raise kind(first)
