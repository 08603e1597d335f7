# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks that communicate by themselves: ``process_set=`` of an optimizer and of a single collective.

Before a collective of the module's own, the ranks of its group compare their next calls.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from agmerge.backends import Backend, timeouts, torch_objects
from agmerge.backends.base import Chosen
from agmerge.backends.handshake import Fact, first_difference, gather_bytes, gather_texts, ranks_of
from agmerge.errors import AGMergeError, RankMismatchError
from agmerge.runtime import workers

# Agreement on the ranks' next calls, before any tensor travels.
#
# All agreements of a communicator are one call to the backend, whatever they are about: ranks that make different calls
# meet here, and all of them get the same error.

JOINED = bytes(16)  # in the place of a digest: this rank makes no more calls
ADVICE = "Every rank must make the same call."


def agree(comm: Backend, label: str, facts: Sequence[Fact], what: str = "collective", advice: str = ADVICE) -> None:
    """Collective. Raise :class:`agmerge.RankMismatchError` on every rank unless all ranks state the same ``facts``.

    ``label``: the call's name in messages and errors. ``facts``: (name, value) in a fixed order. ``what``: the subject
    of the error; ``advice``: what to do. One all-gather of 16 bytes a rank, more on a mismatch or where a rank has
    joined: then :class:`agmerge.AGMergeError` is raised unless the call can do without it.
    """
    text = json.dumps(list(facts)).encode()
    digests = exchange_digests(comm, label, hashlib.blake2b(text, digest_size=16).digest())
    if len(set(digests)) == 1:
        return
    texts = exchange_texts(comm, label, text)
    stated = [json.loads(answer) if answer else None for answer in texts]
    making = next(facts for facts in stated if facts)
    assumed = [facts or making for facts in stated]  # one that has joined agrees to anything
    if any(facts != making for facts in assumed):
        raise RankMismatchError(f"AGM101: {what}: {first_difference(assumed)}. {advice}")
    if not joinable(making):
        gone = ranks_of(digests, JOINED)
        raise AGMergeError(
            f"AGM121: {label}: {gone} called join(), after which only sums and averages are supported. Make other "
            "calls before join()."
        )


def exchange_digests(comm: Backend, label: str, own: bytes) -> list[bytes]:
    """Collective. Return a digest of every rank's next call, 16 bytes each, by rank."""
    return gather_bytes(comm, own, f"agreement ({label})", timeouts.default())


def exchange_texts(comm: Backend, label: str, own: bytes) -> list[bytes]:
    """Collective. Return every rank's next call in full, by rank; b"" of one that has joined."""
    return gather_texts(comm, own, f"agreement ({label})", timeouts.default())


def joinable(facts: Sequence[Sequence[str]]) -> bool:
    """Return whether ranks that have joined can take part, with zeros, in the call that ``facts`` describe."""
    values = dict((name, value) for name, value in facts)
    return values.get("call") == "allreduce" and values.get("op") in ("sum", "average")


def share_numbers(comm: Backend, label: str, numbers: Sequence[int]) -> list[list[int]]:
    """Collective. Return every rank's ``numbers`` (int64), of which all have equally many, by rank."""
    own = np.asarray(numbers, dtype=np.int64).tobytes()
    gathered = gather_bytes(comm, own, f"numbers ({label})", timeouts.default())
    return [np.frombuffer(packed, dtype=np.int64).tolist() for packed in gathered]


# Objects of Horovod that scripts pass: its constants, its compressors and its process sets.
#
# They are known by where they come from, and Horovod is never imported: a script that passes one of its objects has
# imported it already.


def horovod_reduction(op: object) -> str | None:
    """Return the meaning of a constant of Horovod's ("average", "sum", "adasum", ...); None for anything else."""
    hvd = sys.modules.get("horovod.torch")
    if hvd is None or type(op) is not int:
        return None
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    return next((name.lower() for name in names if getattr(hvd, name, None) == op), None)


def horovod_compression(given: object) -> str | None:
    """Return the name of one of Horovod's own compressors ("none", "fp16"); None for anything else."""
    if getattr(given, "__module__", None) != "horovod.torch.compression":
        return None
    return {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(getattr(given, "__name__", ""))


def is_process_set(given: object) -> bool:
    """Return whether ``given`` is a process set of Horovod's, as opposed to a :class:`agmerge.ProcessSet` or ranks.

    Such a set has ``ranks``, ``process_set_id`` (0: all ranks; None: not registered) and ``included()``; a backend
    makes a communicator over it by :meth:`agmerge.backends.Backend.over`.
    """
    return type(given).__module__ == "horovod.common.process_sets"


# Process sets.


def _checked_ranks(given: Any) -> list[int]:
    """Return ranks in ascending order, or raise ``TypeError`` or ``ValueError`` if ``given`` is no set of ranks."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(
            f"process_set={given!r}: expected a process set, a list of ranks, or torch's ProcessGroup or DeviceMesh "
            "of one dimension"
        )
    ranks = list(given)
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise TypeError(f"process_set={ranks!r}: ranks must be integers")
    if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise ValueError(f"process_set={ranks!r}: expected at least one rank, each once, none below 0")
    return sorted(ranks)


class ProcessSet:
    """Name some ranks of the world, for collectives among themselves. Register it with :func:`add_process_set`.

    Args:
        ranks (list of int): The ranks, in any order.

    Raises:
        TypeError: If a rank is not an integer.
        ValueError: If there is no rank, a rank is repeated, or a rank is negative.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = _checked_ranks(ranks)

    @property
    def ranks(self) -> list[int]:
        """Return the ranks of the world in this set, in ascending order."""
        return list(self._ranks)

    def size(self) -> int:
        """Return the number of ranks in this set."""
        return len(self.ranks)

    def included(self) -> bool:
        """Return whether this rank is in this set."""
        return workers.rank() in self.ranks

    def rank(self) -> int | None:
        """Return this rank's number in this set, from 0. None outside of it."""
        return self.ranks.index(workers.rank()) if self.included() else None

    def __repr__(self) -> str:
        return f"ProcessSet({self._ranks})"


class _AllRanks(ProcessSet):
    """Set of all ranks of the world, at the time when it is used."""

    def __init__(self) -> None:
        super().__init__([0])  # rank 0 is in every world

    @property
    def ranks(self) -> list[int]:
        """Return all ranks of the world, ascending."""
        return list(range(workers.size()))

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _AllRanks()


@dataclass(frozen=True)
class Group:
    """Communicator, and the ranks of the world in it."""

    comm: Backend
    ranks: Sequence[int]  # of the world, by their ranks in `comm`


@dataclass
class _Known:
    """Communicators of one world's sets."""

    # By the ranks of the world that a set of ours names; None: this rank is outside of it.
    by_ranks: dict[tuple[int, ...], Backend | None] = field(default_factory=dict)
    # By the objects of Horovod's sets, of which a script may drop the last reference.
    by_object: WeakKeyDictionary[Any, Backend | None] = field(default_factory=WeakKeyDictionary)
    # By the ranks of a group of torch's that this rank is in.
    by_group: dict[tuple[int, ...], Backend] = field(default_factory=dict)


# Communicators of add_process_set() and group(), by world: after shutdown() and init() there is another one.
_known: WeakKeyDictionary[Backend, _Known] = WeakKeyDictionary()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Collective. Connect the ranks of a process set, for collectives among themselves.

    All ranks of the world call it with the same ranks, including those that are not in the set.

    Args:
        process_set (ProcessSet or list of int): The ranks.

    Returns:
        The :class:`ProcessSet`, for the argument ``process_set=`` of collectives.

    Raises:
        agmerge.RankMismatchError: On all ranks, if they pass different ranks.
        ValueError: If a rank does not exist, or a set of these ranks exists already.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    world, ranks = workers.world(), tuple(made.ranks)
    agree(world, "add_process_set", [("call", "add_process_set"), ("ranks", str(list(ranks)))])
    if ranks[-1] >= world.size:
        raise ValueError(f"{made}: ranks must be in 0 to {world.size - 1}")
    known = _known.setdefault(world, _Known())
    if made is global_process_set or ranks in known.by_ranks:
        raise ValueError(f"{made}: a process set of these ranks already exists. Use it, or remove it first.")
    known.by_ranks[ranks] = world.subgroup(ranks, "agmerge process set", timeouts.default())
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Collective. Close the connections of a process set. All ranks of the world call it.

    Args:
        process_set (ProcessSet): A set of :func:`add_process_set`.

    Returns:
        Whether there was such a set.
    """
    known = _known.setdefault(workers.world(), _Known())
    if process_set is global_process_set or tuple(process_set.ranks) not in known.by_ranks:
        return False
    comm = known.by_ranks.pop(tuple(process_set.ranks))
    if comm is not None:
        comm.close()
    return True


def group(given: Any, call: str) -> Group:
    """Collective. Return the ranks that take part in a call: all, or the members of ``given``, with this rank.

    ``given``: None, a :class:`ProcessSet` that was added or its ranks, a process set of Horovod's, or torch's
    ``ProcessGroup`` or ``DeviceMesh``. Ranks communicate only where one of torch's is used first: then all ranks of the
    world make the call, each with a group that it is in. ``call``: the collective's name, for errors. Raises
    ``ValueError`` for a set that is not known, and on ranks outside of it.
    """
    world = workers.world()
    if given is None or given is global_process_set:
        return Group(world, range(world.size))
    if is_process_set(given):
        return _of_horovod(world, given, call)
    of_torch = torch_objects.ranks_of(given)
    if of_torch is not None:
        return _of_torch(world, tuple(_checked_ranks(of_torch)), call)
    ranks = tuple(given.ranks) if isinstance(given, ProcessSet) else tuple(_checked_ranks(given))
    known = _known.setdefault(world, _Known())
    if ranks not in known.by_ranks:
        if ranks == tuple(range(world.size)):
            return Group(world, ranks)
        raise ValueError(f"{call}: process_set={list(ranks)} is unknown. Call add_process_set() on all ranks first.")
    return _member(known.by_ranks[ranks], ranks, world, call)


def _member(comm: Backend | None, ranks: Sequence[int], world: Backend, call: str) -> Group:
    """Return the group of a set, or raise ``ValueError`` on a rank outside of it."""
    if comm is None:
        raise ValueError(
            f"{call}: process_set={list(ranks)} does not contain this rank, {world.rank}. Call it on its members only."
        )
    return Group(comm, ranks)


def _of_horovod(world: Backend, given: Any, call: str) -> Group:
    """Return the group of one of Horovod's process sets."""
    if given.process_set_id == 0:
        return Group(world, range(world.size))
    known = _known.setdefault(world, _Known()).by_object
    if given.process_set_id is None or given not in known:
        known[given] = world.over(given)
    return _member(known[given], given.ranks, world, call)


def _of_torch(world: Backend, ranks: tuple[int, ...], call: str) -> Group:
    """Return the group of these ranks, which one of torch's has named; with a communicator of its own, made once."""
    known = _known.setdefault(world, _Known()).by_group
    if ranks not in known:
        made = communicator(world, Chosen(ranks), timeouts.default())
        if made is None:
            return _member(None, ranks, world, call)
        known[ranks] = made
    return Group(known[ranks], ranks)


# -- of an optimizer ------------------------------------------------------------------------------------------------


def by_ranks(given: Any) -> Any:
    """Return the ranks of a group of torch's, which does not pickle; anything else as it is."""
    ranks = None if given is None else torch_objects.ranks_of(given)
    return given if ranks is None else ranks


def parse_process_set(given: Any) -> Chosen:
    """Return the ranks of an optimizer's ``process_set=``: None, a set of ours, Horovod's or torch's, or ranks.

    Raises ``TypeError`` or ``ValueError`` for anything else.
    """
    if given is None or given is global_process_set:
        return Chosen()
    if is_process_set(given):
        return Chosen() if given.process_set_id == 0 else Chosen(horovod=given)
    return Chosen(tuple(given.ranks if isinstance(given, ProcessSet) else _checked_ranks(by_ranks(given))))


class Pair(NamedTuple):
    """Communicators of one optimizer."""

    comm: Backend | None  # None on a rank outside of its set
    second: Backend | None  # of the same ranks, for later phases of messages; None: not wanted


def communicator(world: Backend, chosen: Chosen, timeout: float) -> Backend | None:
    """Collective. Return a communicator of one optimizer's own; None on a rank outside its set: see the next one."""
    return communicators(world, chosen, timeout, wants_second=False).comm


def communicators(world: Backend, chosen: Chosen, timeout: float, *, wants_second: bool) -> Pair:
    """Collective. Return communicators of one optimizer's own.

    All ranks of ``world`` call it, but for a set of Horovod's, which Horovod knows already: then its members do.
    Different ranks may name different sets. The same error on every rank if a set names a rank that
    does not exist, or one that names another set. ``timeout``: seconds, for each message. ``wants_second``: ranks that
    share a set may differ; then all have one.
    """
    if chosen.horovod is not None:
        return Pair(world.over(chosen.horovod), world.over(chosen.horovod) if wants_second else None)
    said = json.dumps([chosen.ranks, wants_second]).encode()
    answers = [json.loads(text) for text in gather_texts(world, said, "sets", timeout)]
    sets = [tuple(ranks) for ranks, _ in answers]
    if not any(sets):
        wanted = any(wants for _, wants in answers)
        comm = world.duplicate("agmerge optimizer", timeout)
        return Pair(comm, world.duplicate("agmerge optimizer, second phases", timeout) if wanted else None)
    _check_sets(world, sets)
    own = Pair(None, None)
    for ranks in sorted(set(sets)):
        wanted = any(wants for of_rank, wants in answers if tuple(of_rank) == ranks)
        made = world.subgroup(ranks, "agmerge optimizer", timeout)
        second = world.subgroup(ranks, "agmerge optimizer, second phases", timeout) if wanted else None
        own = Pair(made, second) if made is not None else own
    return own


def _check_sets(world: Backend, sets: Sequence[tuple[int, ...]]) -> None:
    """Raise for ``sets``, by the rank that names it, which do not divide all ranks."""
    for rank, ranks in enumerate(sets):
        for other in ranks:
            if other >= world.size:
                raise ValueError(f"process_set={list(ranks)} on rank {rank}: ranks must be in 0 to {world.size - 1}")
            if sets[other] != ranks:
                raise RankMismatchError(
                    f"AGM101: process_set={list(ranks)} on rank {rank} contains rank {other}, which passed "
                    f"{list(sets[other]) or None}. Pass the same set on all its members."
                )
    if not all(sets):
        without = [rank for rank, ranks in enumerate(sets) if not ranks]
        raise RankMismatchError(
            f"AGM101: process_set: ranks {without} pass none, but the others do. Pass one on every rank."
        )
