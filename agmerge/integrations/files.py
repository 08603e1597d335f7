# SPDX-License-Identifier: Apache-2.0
"""Keep the state of every rank, in a file a rank beside a framework's checkpoint.

Frameworks write an optimizer's state on rank 0 alone, and load it on every rank. A rank's residual is its
own: so each of them writes ``agmerge-{rank}-of-{size}.pt`` into the checkpoint's folder. As many ranks read back their
own file; another number of them read all files, and deal the residuals out as
:mod:`agmerge.checkpoint.redistribute` says.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from agmerge.checkpoint import rank_state
from agmerge.errors import AGMergeError
from agmerge.integrations.ddp import Compressed
from agmerge.runtime import workers
from agmerge.runtime.collectives import allgather_object, barrier

Folder = str | os.PathLike[str]
File = tuple[int, int]  # (rank, of how many)

ALONE = (
    "one process trains, without a launcher: it exchanges nothing, nothing is compressed, and what ranks have kept "
    "beside a checkpoint is not loaded (`torchrun --nproc_per_node=1` loads it)"
)
_NAME = re.compile(r"agmerge-(\d+)-of-(\d+)\.pt")


def warn_alone() -> None:
    """Warn that a process without others is left as it is."""
    warnings.warn(ALONE, stacklevel=3)


def save(compressed: Compressed, folder: Folder) -> None:
    """Collective. Write this rank's state into ``folder``, from which files of other numbers of ranks are removed.

    Messages under way (``overlap=``) are applied first. Where there is no such folder nothing is written: the framework
    has removed the checkpoint again, to keep few. Returns when all ranks have written. Where one of them cannot, all
    raise :class:`agmerge.AGMergeError`, and older files in ``folder`` stay as they were.
    """
    rank, size = _place(compressed)
    compressed.flush()
    section = rank_state.with_inner(compressed.state_dict())
    where = Path(folder)
    barrier()  # rank 0 of the framework has removed old checkpoints by now
    part, there = where / f"{_name(rank, size)}.part", where.is_dir()
    with _together(f"write what it keeps into {os.fspath(folder)}", part):
        if there:
            torch.save(section, part)
    with _together(f"name what it has written in {os.fspath(folder)}", part):
        if there:
            os.replace(part, where / _name(rank, size))
    if there and rank == 0:
        _unlink(where, [file for file in _files(where) if file[1] != size])
    barrier()


@contextmanager
def _together(what: str, part: Path) -> Iterator[None]:
    """Collective. Raise :class:`agmerge.AGMergeError` on all ranks where one of them has raised inside.

    ``what``: the failed action, for the error. ``part``: a file of this rank alone, which is removed then.
    """
    problem = ""
    try:
        yield
    except Exception as error:  # all ranks must hear of it: they wait in the next line
        problem = f"rank {workers.rank()} could not {what}: {type(error).__name__}: {error}"
    said = [text for text in allgather_object(problem, "integrations/files/saved") if text]
    if said:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        others = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
        raise AGMergeError(f"{said[0]}{others}. Other ranks have given up, too: what is to be saved is not complete")


def load(compressed: Compressed, folder: Folder) -> bool:
    """Collective. Load the states that ranks have saved in ``folder``: all of them, or none. Return whether they have.

    As many ranks go on to the bit, by the plan that was saved. Another number of them reads all files, and no residual
    is lost. Where files are missing rank 0 warns which, and every rank starts anew, see :func:`restart`. Raises
    :class:`agmerge.AGMergeError` on every rank where one cannot read a file, or files are of different steps.
    """
    rank, size = _place(compressed)
    saved_by = _complete(allgather_object(_files(Path(folder)), "integrations/files"))
    if saved_by is None:
        if rank == 0:
            warnings.warn(
                f"{os.fspath(folder)} has no {_name(0, size)} to {_name(size - 1, size)} that every rank can read: "
                "what was not sent yet when it was saved is lost, and starts from zero. On several machines without a "
                "common folder each rank needs its own file; another number of ranks needs all files that were saved",
                stacklevel=2,
            )
        restart(compressed)
        return False
    sections: list[dict[str, Any]] = []
    problem = ""
    try:
        mine = range(saved_by) if saved_by != size else [rank]
        sections = [_read(Path(folder), (one, saved_by)) for one in mine]
    except Exception as error:  # all ranks must hear of it: they wait in the next line
        problem = f"rank {rank} cannot read what was saved in {os.fspath(folder)}: {type(error).__name__}: {error}"
    said = allgather_object((problem, {section["steps"] for section in sections}), "integrations/files/steps")
    problem = next((text for text, _ in said if text), "")
    steps = sorted(set().union(*(numbers for _, numbers in said)))
    if not problem and len(steps) > 1:
        problem = (
            f"files of ranks in {os.fspath(folder)} are of different steps ({', '.join(map(str, steps))}): saving was "
            "interrupted. Load another checkpoint, or remove the files to start from zero"
        )
    if problem:
        raise AGMergeError(problem)
    section = sections[0] if saved_by == size else {"version": sections[0]["version"], rank_state.RANKS: sections}
    compressed.load_state_dict({rank_state.SECTION: section})
    return True


def remove(folder: Folder) -> None:
    """Remove the files of all ranks from ``folder``, and the folder if nothing else is in it. It need not be there."""
    where = Path(folder)
    _unlink(where, _files(where))
    with suppress(OSError):  # something else is in it, or there is none
        where.rmdir()


def restart(compressed: Compressed) -> None:
    """Collective. Drop residuals; with ``sync="updates"`` parameters as they are become the shared ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the checkpoint has no residuals")
        compressed.load_state_dict({})


def _place(compressed: Compressed) -> File:
    """Return this rank's number among all ranks. Raises ``ValueError`` where these do not all exchange gradients."""
    if compressed._reducer.exchange.agreed.config.sync.process_set.members:
        raise ValueError(
            "files beside a checkpoint are of all ranks, and this model's process_group has some of them only: save "
            "state_dict() by rank"
        )
    world = workers.world()
    return world.rank, world.size


def _name(rank: int, size: int) -> str:
    """Return the name of a rank's file."""
    return f"agmerge-{rank}-of-{size}.pt"


def _files(folder: Path) -> list[File]:
    """Return the ranks that have files in ``folder``, in order; none where there is no such folder."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    found = filter(None, map(_NAME.fullmatch, names))
    return sorted((int(match[1]), int(match[2])) for match in found)


def _complete(found: Sequence[Sequence[File]]) -> int | None:
    """Return the number of ranks that saved a complete set which all ranks can read; None if there is none.

    ``found``: by rank, the files that it sees. As many as there are now need one each, others need all.
    """
    size = len(found)
    if all((rank, size) in files for rank, files in enumerate(found)):
        return size
    everywhere = set.intersection(*map(set, found))
    whole = {of for _, of in everywhere if all((rank, of) in everywhere for rank in range(of))}
    return max(whole, default=None)


def _read(folder: Path, file: File) -> dict[str, Any]:
    """Return a rank's section, mapped into memory: of another rank's little is read."""
    section: dict[str, Any] = torch.load(folder / _name(*file), map_location="cpu", weights_only=True, mmap=True)
    return section


def _unlink(folder: Path, files: Sequence[File]) -> None:
    """Remove ``files`` from ``folder``."""
    for file in files:
        (folder / _name(*file)).unlink(missing_ok=True)
