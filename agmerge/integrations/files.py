# SPDX-License-Identifier: Apache-2.0
"""Keep the state of every rank, in a file a rank beside a framework's checkpoint.

Frameworks write an optimizer's state on rank 0 alone, and load it on every rank. A rank's residual is its
own: so each of them writes ``agmerge-{rank}-of-{size}.pt`` into the checkpoint's folder. As many ranks read back their
own file; another number of them read all files, and deal the residuals out as
:mod:`agmerge.checkpoint.redistribute` says.

By default ranks keep nothing of their own. Then rank 0's file alone has all that there is: the steps and the plan.
Scripts save on one rank alone, too, so no rank waits for others here: each writes its file by itself.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agmerge.checkpoint import rank_state
from agmerge.errors import AGMergeError
from agmerge.integrations.ddp import Compressed
from agmerge.runtime import workers
from agmerge.runtime.collectives import allgather_object

Folder = str | os.PathLike[str]
File = tuple[int, int]  # (rank, of how many)

ALONE = (
    "AGM601: Only one process is training, so agmerge has no effect. Start the script with torchrun to use several. "
    "Residuals of a checkpoint are not loaded (`torchrun --nproc_per_node=1` loads them)."
)
NO_GROUP = (
    "AGM141: The launcher started {launched} processes, but the framework connected none of them, so each would train "
    "by itself. The model is not in DistributedDataParallel. Without GPUs, configure the framework for CPUs: {advice}"
)
_NAME = re.compile(r"agmerge-(\d+)-of-(\d+)\.pt")


def warn_alone(advice: str) -> None:
    """Warn that a process without others is left as it is.

    Raises ``ValueError`` where a launcher has started others too, and the framework has not made a group of them: each
    would train by itself. ``advice``: how the script has the framework make one.
    """
    launched = workers.launched()
    if launched > 1:
        raise ValueError(NO_GROUP.format(launched=launched, advice=advice))
    warnings.warn(ALONE, stacklevel=3)


def keeps_back(compressed: Compressed) -> bool:
    """Return whether ranks keep what is no other rank's: with the default they do not."""
    return rank_state.keeps_back(compressed._reducer.exchange.agreed.config)


def save(
    compressed: Compressed,
    folder: Folder,
    *,
    makes_folder: bool = False,
    flushes: bool = False,
    is_common: bool = False,
) -> None:
    """Collective. Write this rank's state into ``folder``; where ranks keep nothing of their own, on rank 0 alone.

    No rank waits for another's file. Rank 0 removes files of other numbers of ranks. Raises
    :class:`agmerge.AGMergeError` where this rank cannot write, and its older file stays as it was.

    Args:

        compressed: the object that exchanges for the framework.
        folder: of the checkpoint.
        makes_folder: make it, if it is not there. Else nothing is written then: the framework has removed the
            checkpoint again, to keep few.
        flushes: apply messages under way first, with ``overlap=``: all ranks save, and communicate. Else these messages
            count as not sent, so that one rank may save alone.
        is_common: ranks of one machine save into the same folder. If one of them writes nothing, a warning says so some
            steps later, on the rank that has saved.
    """
    rank, size = _place(compressed)
    if flushes:
        compressed.flush()
    section = rank_state.with_inner(compressed.state_dict())
    where, keeps = Path(folder), rank_state.has_own(section)
    if rank and not keeps:
        return
    part = where / f"{_name(rank, size)}.part"
    try:
        if makes_folder:
            where.mkdir(parents=True, exist_ok=True)
        if not where.is_dir():
            return
        torch.save(section, part)
        os.replace(part, where / _name(rank, size))
    except Exception as error:
        if not makes_folder and (isinstance(error, FileNotFoundError) or not where.is_dir()):
            return  # the framework removes the checkpoint on rank 0 at this moment
        with suppress(OSError):
            part.unlink(missing_ok=True)
        text = (
            f"AGM404: rank {rank} could not write its residuals to {os.fspath(folder)}: {type(error).__name__}: {error}"
        )
        raise AGMergeError(f"{text}. The other ranks did not wait, so the checkpoint is incomplete.") from error
    if rank == 0:
        _unlink(where, [file for file in _files(where) if file != (0, size) and (file[1] != size or not keeps)])
    if keeps and is_common:
        compressed.look_later(partial(_what_lacks, where, rank, size, section["steps"]))


def _what_lacks(folder: Path, rank: int, size: int, steps: int) -> dict[str, Any]:
    """Return what fills ``unsaved.SAVED_ALONE`` if other ranks of this machine have written nothing at ``steps``.

    Another machine may have a folder of its own. Only the first rank that has saved warns.
    """
    begin = rank - workers.local_rank() if workers.local_size() < size else 0
    near = [other for other in range(begin, min(begin + workers.local_size(), size)) if other != rank]
    lost = [other for other in near if not _is_of(folder, (other, size), steps)]
    if not lost or any(other < rank and other not in lost for other in near) or not folder.is_dir():
        return {}
    words = "has" if len(lost) == 1 else "have"
    saved = [other for other in (rank, *near) if other not in lost]
    return {"folder": folder, "saved": _ranks(saved), "missing": f"{_ranks(lost)} {words}", "size": size}


def _is_of(folder: Path, file: File, steps: int) -> bool:
    """Return whether a rank's file is there, and was saved after so many steps."""
    try:
        return bool(_read(folder, file)["steps"] == steps)
    except Exception:  # missing, or about to be written anew
        return False


def _ranks(numbers: Sequence[int]) -> str:
    """Return ranks as text."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def load(compressed: Compressed, folder: Folder) -> bool:
    """Collective. Load the states that ranks have saved in ``folder``: all of them, or none. Return whether they have.

    As many ranks go on to the bit, by the plan that was saved. Another number of them reads all files, and no residual
    is lost. Where files are missing rank 0 warns which, and every rank starts anew, see :func:`restart`. Raises
    :class:`agmerge.AGMergeError` on every rank where one cannot read a file, or files are of different steps.

    Where ranks keep nothing of their own, each reads by itself what it finds, and nothing communicates.
    """
    rank, size = _place(compressed)
    where = Path(folder)
    if not keeps_back(compressed):
        return _load_alone(compressed, where)
    seen = _files(where)
    saved = allgather_object((seen, _without_own(where, seen, size) if rank == 0 else None), "integrations/files")
    alike: int | None = saved[0][1]
    saved_by = alike or _complete([files for files, _ in saved])
    if saved_by is None:
        if rank == 0:
            warnings.warn(
                f"AGM404: {os.fspath(folder)} does not have all files {_name(0, size)} to {_name(size - 1, size)}, so "
                "residuals are reset to zero. Without a folder that all machines share, each rank needs its own file. "
                "With another number of ranks, all saved files are needed.",
                stacklevel=2,
            )
        restart(compressed)
        return False
    sections: list[dict[str, Any]] = []
    problem = ""
    try:
        if alike:
            wanted = [(0, alike)] if (0, alike) in seen else []
        else:
            wanted = [(one, saved_by) for one in (range(saved_by) if saved_by != size else [rank])]
        sections = [_read(where, file) for file in wanted]
    except Exception as error:  # all ranks must hear of it: they wait in the next line
        problem = (
            f"AGM406: rank {rank} cannot read its residuals from {os.fspath(folder)}: {type(error).__name__}: {error}"
        )
    said = allgather_object((problem, {section["steps"] for section in sections}), "integrations/files/steps")
    problem = next((text for text, _ in said if text), "")
    steps = sorted(set().union(*(numbers for _, numbers in said)))
    if not problem and len(steps) > 1:
        problem = (
            f"AGM406: Files of ranks in {os.fspath(folder)} are from different steps ({', '.join(map(str, steps))}), "
            "because saving was interrupted. Load another checkpoint, or delete the files to start with zero "
            "residuals."
        )
    if problem:
        raise AGMergeError(problem)
    _load_sections(compressed, sections, each=alike is None and saved_by != size)
    return True


def _load_alone(compressed: Compressed, folder: Path) -> bool:
    """Load, by itself, what this rank finds: its own file, those of another number of ranks, or rank 0's.

    Returns whether there was one. Without any, nothing is lost: the training goes on as it is.
    """
    (rank, size), seen = _place(compressed), _files(folder)
    whole = _whole(seen)
    first = _without_own(folder, seen, size)
    if first is not None:
        wanted = [(0, first)]
    elif (rank, size) in seen:
        wanted = [(rank, size)]
    elif whole:
        wanted = [(one, max(whole)) for one in range(max(whole))]
    else:
        wanted = [file for file in seen if file[0] == 0][-1:]
    try:
        sections = [_read(folder, file) for file in wanted]
    except Exception as error:
        text = f"AGM406: rank {rank} cannot read its residuals from {folder}: {type(error).__name__}: {error}"
        raise AGMergeError(text) from error
    if sections:
        _load_sections(compressed, sections, each=len(sections) > 1)
    return bool(sections)


def _load_sections(compressed: Compressed, sections: Sequence[dict[str, Any]], *, each: bool) -> None:
    """Collective. Load one rank's section, or those of all ranks (``each``) as one; none: start anew."""
    if not sections:
        restart(compressed)
        return
    one = {"version": sections[0]["version"], rank_state.RANKS: [*sections]} if each else sections[0]
    compressed.load_state_dict({rank_state.SECTION: one})


def _without_own(folder: Path, seen: Sequence[File], size: int) -> int | None:
    """Return the number of ranks of the first file that says that they kept nothing of their own; None: none does.

    ``seen``: the files in ``folder``. That of ``size`` ranks comes first.
    """
    for file in sorted((file for file in seen if file[0] == 0), key=lambda file: (file[1] != size, -file[1])):
        with suppress(Exception):  # damaged: an error of those who need it
            if not rank_state.has_own(_read(folder, file)):
                return file[1]
    return None


def forget(compressed: Compressed, folder: Folder) -> None:
    """Remove this rank's file from ``folder``, and on rank 0 those of other numbers of ranks."""
    rank, size = _place(compressed)
    where = Path(folder)
    _unlink(where, [file for file in _files(where) if file == (rank, size) or (rank == 0 and file[1] != size)])


def remove(folder: Folder) -> None:
    """Remove the files of all ranks from ``folder``, and the folder if nothing else is in it. It need not be there."""
    where = Path(folder)
    _unlink(where, _files(where))
    with suppress(OSError):  # something else is in it, or there is none
        where.rmdir()


def restart(compressed: Compressed) -> None:
    """Collective. Drop residuals; with ``sync="updates"`` parameters as they are become the shared ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="AGM401")
        compressed.load_state_dict({})


def _place(compressed: Compressed) -> File:
    """Return this rank's number among all ranks. Raises ``ValueError`` where these do not all exchange gradients."""
    if compressed._reducer.exchange.agreed.config.sync.process_set.members:
        raise ValueError(
            "files next to a checkpoint require all ranks, but this model's process_group has only some of them. Save "
            "state_dict() on each rank instead."
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
    return max(_whole(set.intersection(*map(set, found))), default=None)


def _whole(files: Iterable[File]) -> set[int]:
    """Return the numbers of ranks of which all have a file."""
    there = {*files}
    return {of for _, of in there if all((rank, of) in there for rank in range(of))}


def _read(folder: Path, file: File) -> dict[str, Any]:
    """Return a rank's section, mapped into memory: of another rank's little is read."""
    section: dict[str, Any] = torch.load(folder / _name(*file), map_location="cpu", weights_only=True, mmap=True)
    return section


def _unlink(folder: Path, files: Sequence[File]) -> None:
    """Remove ``files`` from ``folder``."""
    for file in files:
        (folder / _name(*file)).unlink(missing_ok=True)
