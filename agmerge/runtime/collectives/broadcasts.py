# SPDX-License-Identifier: Apache-2.0
"""Broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agmerge.backends import Backend, Handle
from agmerge.backends.handshake import Fact
from agmerge.ops import Average
from agmerge.runtime.collectives.operation import Operation, Pending, byte_view, copied, described, expanded, run, start
from agmerge.runtime.collectives.reduce import reduced_gradients


class Broadcast(Operation):
    """Operation of :func:`broadcast`."""

    kind = "broadcast"

    def __init__(self, call: str, tensor: torch.Tensor, root_rank: int, name: Any, process_set: Any) -> None:
        super().__init__(call, tensor, name, process_set)
        self.root = root_rank
        self._index = root_of(self.comm, self.group.ranks, root_rank)

    def facts(self) -> list[Fact]:
        """Return the root, and the tensor's dtype and shape."""
        tensor = self.tensors[0]
        written = expanded(tensor) if self.in_place else ""
        return [("root_rank", str(self.root)), ("tensor", described(tensor) + written)]

    def begin(self, message: str) -> list[Handle]:
        """Collective. Start one message, into the tensor itself where that can be."""
        self._given = self.tensors[0]
        straight = self.in_place and self._given.is_contiguous() and not self._given.is_neg()
        self._result = self._given.detach() if straight else copied(self._given)
        return [self.comm.broadcast(byte_view(self._result), self._index, message)] if self._result.numel() else []

    def end(self) -> list[torch.Tensor]:
        """Return a new tensor, or the given one, overwritten."""
        if not self.in_place:
            return [self._result]
        with torch.no_grad():
            if self._result.data_ptr() != self._given.data_ptr():
                self._given.copy_(self._result)
            else:
                torch.autograd.graph.increment_version(self._given)
        return [self._given]

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return the average of all gradients on the root, zeros on the others, as in Horovod."""
        (mean,) = reduced_gradients(self, gradients, Average)
        return [mean if self.comm.rank == self._index else mean * 0]


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Collective. Return the tensor of one rank on all ranks, as a new tensor.

    It is differentiable: the root gets the average of all ranks' gradients, the others zeros, as in Horovod.

    Args:
        tensor (torch.Tensor): Shape and dtype must be the same on all ranks. Any dtype.
        root_rank (int): The root, a rank of the world, also with ``process_set``.
        name (str): Name of the call in errors. Ranks compare it. Default: calls are matched by their order.
        process_set (ProcessSet, list or ProcessGroup): The ranks that take part. Default: all.
    """
    return run(Broadcast("broadcast", tensor, root_rank, name, process_set))


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Collective. Overwrite ``tensor`` with that of the root. Return it. It is not differentiable.

    The arguments are those of :func:`broadcast`.
    """
    return run(Broadcast("broadcast_", tensor, root_rank, name, process_set))


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Pending:
    """Collective. Start :func:`broadcast` of a copy of ``tensor``. Return a handle for :func:`synchronize`."""
    return start(Broadcast("broadcast_async", tensor, root_rank, name, process_set))


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Pending:
    """Collective. Start :func:`broadcast_`. Return a handle for :func:`synchronize`.

    Do not use ``tensor`` before that call.
    """
    return start(Broadcast("broadcast_async_", tensor, root_rank, name, process_set))


def root_of(comm: Backend, ranks: Sequence[int], root_rank: Any) -> int:
    """Return the place among ``ranks`` (of the world) of rank ``root_rank``. ``ValueError`` if it has none."""
    if root_rank not in ranks:
        there = f"there are {len(ranks)} ranks, " if len(ranks) == comm.size and ranks[-1] == comm.size - 1 else ""
        named = f"0 to {comm.size - 1}" if there else f"the process set has ranks {list(ranks)}"
        raise ValueError(f"root_rank={root_rank}: {there}{named}")
    return list(ranks).index(root_rank)
