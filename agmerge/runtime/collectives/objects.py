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
    """Collective. Return the object of one rank on all ranks. The root gets the same object, others a copy.

    Args:
        obj (object): On the root: anything that can be pickled. Other ranks may pass None.
        root_rank (int): The root, a rank of the world, also with ``process_set``. Default: 0.
        name (str): Name of the call in errors. Ranks compare it. Default: calls are matched by their order.
        process_set (ProcessSet, list or ProcessGroup): The ranks that take part. Default: all.

    Raises:
        agmerge.AGMergeError: On all ranks, if the object cannot be pickled.
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
    """Collective. Return a list of the objects of all ranks, in rank order.

    Args:
        obj (object): Anything that can be pickled.
        name (str): Name of the call in errors. Ranks compare it. Default: calls are matched by their order.
        process_set (ProcessSet, list or ProcessGroup): The ranks that take part. Default: all.

    Raises:
        agmerge.AGMergeError: On all ranks, if one object cannot be pickled.
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
    """Collective. Wait until every rank has called it.

    Args:
        process_set (ProcessSet, list or ProcessGroup): The ranks that take part. Default: all.
    """
    agree(group(process_set, "barrier").comm, "barrier", [("call", "barrier")])


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    """Return the pickle of ``obj``; nothing where it fails, and why: the others wait, and no pickle is that short."""
    try:
        return pickle.dumps(obj), None
    except Exception as error:
        return b"", error
