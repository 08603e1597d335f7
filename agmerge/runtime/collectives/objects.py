# SPDX-License-Identifier: Apache-2.0
"""Collectives of Python objects, and the barrier."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from agmerge.backends import timeouts
from agmerge.backends.handshake import broadcast_bytes
from agmerge.errors import AGMergeError
from agmerge.runtime.call_agreement import agree
from agmerge.runtime.collectives import arguments
from agmerge.runtime.collectives.broadcasts import root_of
from agmerge.runtime.collectives.gather import Allgather
from agmerge.runtime.collectives.operation import run
from agmerge.runtime.process_sets import group


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """Collective. Return rank ``root_rank``'s ``obj``, anything that pickles; on the root itself as it is.

    ``root_rank`` is a rank of the world, also with ``process_set`` (as in :func:`agmerge.allreduce`). Raises
    :class:`agmerge.AGMergeError` on every rank if it does not pickle.
    """
    label = arguments.label(name, "broadcast_object")
    where = group(process_set, label)
    root, comm = root_of(where.comm, where.ranks, root_rank), where.comm
    agree(comm, label, [("call", "broadcast_object"), ("name", label), ("root_rank", str(root_rank))])
    data, problem = _pickled(obj) if comm.rank == root else (b"", None)
    received = broadcast_bytes(comm, data, root, label.replace(" (", " ["), timeouts.default())
    if not received:
        raise AGMergeError(f"AGM304: {label}: the object of rank {root_rank} cannot be pickled") from problem
    return obj if comm.rank == root else pickle.loads(received)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Collective. Return every rank's ``obj``, anything that pickles, in the order of ranks.

    ``process_set``: as in :func:`agmerge.allreduce`. Raises :class:`agmerge.AGMergeError` on every rank if one does not
    pickle.
    """
    label = arguments.label(name, "allgather_object")
    data, problem = _pickled(obj)
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    gathering = Allgather("allgather", own, label, process_set)
    parts = torch.split(run(gathering), gathering.rows[0])
    failed = [rank for rank, part in zip(gathering.group.ranks, parts, strict=True) if not len(part)]
    if failed:
        raise AGMergeError(f"AGM304: {label}: the object of rank {failed[0]} cannot be pickled") from problem
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def barrier(process_set: Any = None) -> None:
    """Collective. Return when every rank has called it. ``process_set``: as in :func:`agmerge.allreduce`."""
    agree(group(process_set, "barrier").comm, "barrier", [("call", "barrier")])


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    """Return the pickle of ``obj``; nothing where it fails, and why: the others wait, and no pickle is that short."""
    try:
        return pickle.dumps(obj), None
    except Exception as error:
        return b"", error
