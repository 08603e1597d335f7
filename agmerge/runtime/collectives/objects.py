# SPDX-License-Identifier: Apache-2.0
"""Collectives of Python objects, the barrier, and ``join()``."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from typing import Any

import torch

from agmerge.backends import Backend, timeouts
from agmerge.backends.handshake import broadcast_bytes
from agmerge.errors import AGMergeError
from agmerge.runtime import workers
from agmerge.runtime.collectives import operation
from agmerge.runtime.collectives.broadcasts import root_of
from agmerge.runtime.collectives.operation import count, run
from agmerge.runtime.collectives.reduce import TRAVELS, flat
from agmerge.runtime.collectives.rows import Allgather
from agmerge.runtime.process_sets import JOINED, agree, exchange_digests, exchange_texts, group, joinable, share_numbers

# ``join()``: a rank that makes no more calls of its own answers those of the others, until all have joined.

LABEL = "join() of agmerge's collectives; an optimizer has a separate join()"


def join(device: int | str = -1) -> int:
    """Collective. Take part with zeros in the sums and averages of other ranks, until all have joined.

    This is for ``agmerge.allreduce`` and similar calls over all ranks. For steps of an optimizer use
    ``optimizer.join()``. While a rank has joined, other collectives raise :class:`agmerge.AGMergeError`.

    Args:
        device (int or str): Device of the zeros: number of a GPU, or -1 for the CPU. Default: -1.

    Returns:
        The rank that joined last. If several ranks join at the same call, the highest one.
    """
    comm, answered = workers.world(), 0
    place = torch.device("cpu" if device == -1 else f"cuda:{device}" if isinstance(device, int) else device)
    while any(digest != JOINED for digest in exchange_digests(comm, LABEL, JOINED)):
        calls = [json.loads(text) for text in exchange_texts(comm, LABEL, b"") if text]
        if all(facts == calls[0] for facts in calls) and joinable(calls[0]):
            count(comm)
            _stand_in(comm, calls[0], place)
        answered += 1
    waited = [answers for (answers,) in share_numbers(comm, LABEL, [answered])]
    return max(rank for rank, answers in enumerate(waited) if answers == min(waited))


def _stand_in(comm: Backend, facts: Sequence[Sequence[str]], device: torch.device) -> None:
    """Collective. Make the messages of the all-reduce that ``facts`` describe, of zeros on ``device``."""
    message = dict((name, value) for name, value in facts)["name"]
    handles = []
    shapes = [value for name, value in facts if name.startswith("tensor")]
    for i, shape in enumerate(shapes):
        parsed = re.fullmatch(r"(\w+)(\[.*\])( on \w+)?", shape)
        assert parsed is not None
        dtype: torch.dtype = getattr(torch, parsed[1])
        travels = dtype if dtype in TRAVELS or dtype.is_complex else torch.int32
        zeros = torch.zeros(json.loads(parsed[2]), dtype=travels, device=device if parsed[3] else "cpu")
        if zeros.numel():
            handles.append(comm.all_reduce(flat(zeros), f"{message}.{i}" if i else message))
    for handle in handles:
        handle.wait(timeouts.default())


# Objects.


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
    label = operation.label(name, "broadcast_object")
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
    label = operation.label(name, "allgather_object")
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
