"""The module's own collectives, for metrics and set-up. They use another communicator than the optimizers.

Each first agrees on its arguments, so that a mistake is an error on every rank and never a hang or a crash
inside the backend. That costs one all-gather of 16 bytes; these calls are not for the hot path.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from agmerge import deadline, runtime
from agmerge.backends import Backend
from agmerge.errors import AGMergeError
from agmerge.handshake import Fact, agree, broadcast_bytes, gather_texts
from agmerge.ops import Average, ReduceOp


def allreduce(tensor: torch.Tensor, name: str | None = None, op: ReduceOp = Average) -> torch.Tensor:
    """The average (or ``op=agmerge.Sum``) of every rank's ``tensor``, as a new tensor of its shape and dtype.

    An average of integers is cut towards zero, as in Horovod.
    """
    if not isinstance(op, ReduceOp):
        raise ValueError(f"allreduce: op must be agmerge.Average or agmerge.Sum, not {op!r}")
    comm, label = runtime.world(), _label(name, "allreduce")
    if tensor.dtype == torch.bool:
        raise ValueError(f"{label}: a tensor of bool has no sum; convert it to the integers that you mean")
    _agree(comm, "allreduce", label, [("op", op.value), ("tensor", _describe(tensor))])
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    comm.all_reduce(result, label).wait(deadline.default())
    if op is Average:
        if result.is_floating_point() or result.is_complex():
            result.mul_(op.scale(comm.size))
        else:
            result = torch.div(result, comm.size, rounding_mode="trunc").to(tensor.dtype)
    return result


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Every rank's ``tensor``, one after the other along the first dimension, whose length may differ."""
    comm, label = runtime.world(), _label(name, "allgather")
    if tensor.dim() == 0:
        raise ValueError(f"{label}: a tensor of no dimensions cannot be gathered; use tensor.reshape(1)")
    trailing = list(tensor.shape[1:])
    _agree(comm, "allgather", label, [("dtype", str(tensor.dtype)), ("trailing dimensions", str(trailing))])
    rows = len(tensor).to_bytes(8, "little")  # of no elements each, nothing else tells how many
    texts = gather_texts(comm, rows + as_bytes(tensor), label, deadline.default())
    counts = [int.from_bytes(text[:8], "little") for text in texts]
    parts = [from_bytes(text[8:], tensor.dtype) for text in texts]
    shaped = [part.reshape(count, *trailing) for part, count in zip(parts, counts, strict=True)]
    return torch.cat(shaped).to(tensor.device)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Rank ``root_rank``'s ``tensor``, as a new tensor. Shape and dtype must be the same on all ranks."""
    comm, label = runtime.world(), _label(name, "broadcast")
    check_root(comm, root_rank)
    _agree(comm, "broadcast", label, [("root_rank", str(root_rank)), ("tensor", _describe(tensor))])
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    comm.broadcast(result, root_rank, label).wait(deadline.default())
    return result


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Rank ``root_rank``'s ``obj`` (anything that pickles); it is returned as it is on the root itself."""
    comm, label = runtime.world(), _label(name, "broadcast_object")
    check_root(comm, root_rank)
    _agree(comm, "broadcast_object", label, [("root_rank", str(root_rank))])
    data, problem = b"", None
    if comm.rank == root_rank:
        try:
            data = pickle.dumps(obj)
        except Exception as error:
            problem = error  # the others wait: nothing (no pickle is that short) tells them
    received = broadcast_bytes(comm, data, root_rank, label, deadline.default())
    if not received:
        raise AGMergeError(f"{label}: what rank {root_rank} gave does not pickle") from problem
    return obj if comm.rank == root_rank else pickle.loads(received)


def barrier() -> None:
    """Return when every rank has called it."""
    _agree(runtime.world(), "barrier", "barrier", [])


def check_root(comm: Backend, root_rank: int) -> None:
    """Raise ``ValueError`` unless ``root_rank`` is a rank of ``comm``."""
    if not 0 <= root_rank < comm.size:
        raise ValueError(f"root_rank={root_rank}: there are {comm.size} ranks, 0 to {comm.size - 1}")


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of ``tensor`` in C order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """A new 1-D tensor on the CPU from what :func:`as_bytes` gave."""
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _agree(comm: Backend, call: str, label: str, facts: list[Fact]) -> None:
    facts = [("call", call), ("name", label), *facts]
    advice = "Every rank must make the same call."
    agree(comm, facts, what="collective", advice=advice, timeout=deadline.default(), name=label)


def _label(name: str | None, call: str) -> str:
    # Horovod's own takes allreduce(tensor, False) as "do not average": it must not pass for a name.
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{call}: name must be a string, not {name!r}; allreduce takes op=agmerge.Sum for a sum")
    return name or call


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
