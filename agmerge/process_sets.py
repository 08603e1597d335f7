"""Horovod's ``process_set=``: only some of the ranks exchange gradients, the others step by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agmerge.backends import Backend, horovod
from agmerge.errors import AGMergeError, RankMismatchError
from agmerge.handshake import gather_texts


@dataclass(frozen=True)
class ProcessSet:
    """The ranks of the world that exchange gradients; empty: all. ``horovod``: its own object, where it has one."""

    ranks: tuple[int, ...] = ()
    horovod: Any = None

    @property
    def members(self) -> list[int]:
        """Ranks of the world, in the order of their ranks here; empty: all."""
        return list(self.ranks if self.horovod is None else self.horovod.ranks)


def checked(given: Any) -> ProcessSet:
    """None, a process set of Horovod's, or ranks. ``TypeError`` or ``ValueError`` for anything else."""
    if given is None:
        return ProcessSet()
    if horovod.is_process_set(given):
        return ProcessSet() if given.process_set_id == 0 else ProcessSet(horovod=given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"process_set={given!r}: give a Horovod process set, or a list of ranks")
    ranks = list(given)
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise TypeError(f"process_set={ranks!r}: ranks are integers")
    if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise ValueError(f"process_set={ranks!r}: give at least one rank, each once, none below 0")
    return ProcessSet(tuple(sorted(ranks)))


def communicator(world: Backend, chosen: ProcessSet, timeout: float) -> Backend | None:
    """A communicator of one optimizer's own; None on a rank outside its set.

    Collective over all ranks of ``world``, but for a set of Horovod's, which it knows already: then over its
    members. Different ranks may name different sets. The same error on every rank if a set names a rank that
    does not exist, or one that names another set.
    """
    if chosen.horovod is not None:
        if not isinstance(world, horovod.HorovodBackend):
            raise AGMergeError(
                f"process_set={chosen.horovod} is Horovod's, but agmerge runs on {world.name!r}; give a list of ranks"
            )
        return world.over(chosen.horovod)
    said = [tuple(json.loads(text)) for text in gather_texts(world, json.dumps(chosen.ranks).encode(), "sets", timeout)]
    if not any(said):
        return world.duplicate("agmerge optimizer", timeout)
    for rank, ranks in enumerate(said):
        for other in ranks:
            if other >= world.size:
                raise ValueError(f"process_set={list(ranks)} on rank {rank}: there are ranks 0 to {world.size - 1}")
            if said[other] != ranks:
                raise RankMismatchError(
                    f"process_set={list(ranks)} on rank {rank} names rank {other}, whose own is "
                    f"{list(said[other]) or None}; give all members of a set the same one"
                )
    if not all(said):
        without = [rank for rank, ranks in enumerate(said) if not ranks]
        raise RankMismatchError(f"process_set: ranks {without} name none, the others do; give every rank one")
    mine = None
    for ranks in sorted(set(said)):
        made = world.subgroup(ranks, "agmerge optimizer", timeout)
        mine = made if made is not None else mine
    return mine
