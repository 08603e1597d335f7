# SPDX-License-Identifier: Apache-2.0
"""All-gather: every rank gets the tensors of all, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agmerge.backends import Handle
from agmerge.backends.handshake import Fact
from agmerge.ops import Average
from agmerge.runtime.collectives.operation import Operation, Pending, byte_view, plain, row_kind, run, run_all, start
from agmerge.runtime.collectives.reduce import reduced_gradients
from agmerge.runtime.process_sets import share_numbers


class Allgather(Operation):
    """Operation of :func:`allgather`."""

    kind = "allgather"

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        for tensor in self.tensors:
            if tensor.dim() == 0:
                raise ValueError(f"{self.label}: a tensor of no dimensions cannot be gathered. Use tensor.reshape(1).")

    def facts(self) -> list[Fact]:
        """Return every tensor's dtype and all dimensions but the first."""
        facts: list[Fact] = []
        for tensor in self.tensors:
            facts += [("dtype", row_kind(tensor)), ("trailing dimensions", str(list(tensor.shape[1:])))]
        return facts

    def begin(self, message: str) -> list[Handle]:
        """Collective. Start messages straight into the results: one a tensor, or one a rank where lengths differ."""
        lengths = share_numbers(self.comm, self.label, [len(tensor) for tensor in self.tensors])
        self.rows = [list(rows) for rows in zip(*lengths, strict=True)]  # of every tensor, by ranks
        given = list(zip(self.tensors, self.rows, strict=True))
        self._results = [tensor.new_empty((sum(rows), *tensor.shape[1:])) for tensor, rows in given]
        handles: list[Handle] = []
        for i, (out, (tensor, rows)) in enumerate(zip(self._results, given, strict=True)):
            if out.numel():
                handles += self._started(out, plain(tensor), rows, f"{message}.{i}" if i else message)
        return handles

    def _started(self, out: torch.Tensor, own: torch.Tensor, rows: list[int], name: str) -> list[Handle]:
        """Collective. Start to gather ``own`` from every rank into ``out``, of which rank r gives ``rows[r]`` rows."""
        if len(set(rows)) == 1:
            return [self.comm.all_gather(byte_view(out), byte_view(own), name)]
        places = torch.split(out, rows)
        places[self.comm.rank].copy_(own)
        return [
            self.comm.broadcast(byte_view(place), rank, f"{name} of {rank}")
            for rank, place in enumerate(places)
            if place.numel()
        ]

    def end(self) -> list[torch.Tensor]:
        """Return the results, which are new tensors."""
        results, self._results = self._results, []
        return results

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return the average over the ranks of the gradients of this rank's rows, as in Horovod."""
        rank, wholes = self.comm.rank, reduced_gradients(self, gradients, Average)
        return [whole.narrow(0, sum(rows[:rank]), rows[rank]) for whole, rows in zip(wholes, self.rows, strict=True)]


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Collective. Concatenate the tensors of all ranks along the first dimension, in rank order.

    It is differentiable. The gradient is the *average* over the ranks of the gradients of this rank's rows, as in
    Horovod (docs/from_horovod.md).

    Args:
        tensor (torch.Tensor): This rank's tensor, of any dtype. Only the first dimension may differ between ranks.
        name (str): Name of the call in errors. Ranks compare it. Default: calls are matched by their order.
        process_set (ProcessSet, list or ProcessGroup): The ranks that take part. Default: all.

    Returns:
        A new tensor, equal on all ranks.
    """
    return run(Allgather("allgather", tensor, name, process_set))


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Pending:
    """Collective. Start :func:`allgather`. Return a handle for :func:`synchronize`.

    Do not change ``tensor`` before that call.
    """
    return start(Allgather("allgather_async", tensor, name, process_set))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> list[torch.Tensor]:
    """Collective. Gather several tensors as :func:`allgather`, with one agreement for all. Return a list."""
    return run_all(Allgather("grouped_allgather", tensors, name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> Pending:
    """Collective. Start :func:`grouped_allgather`. Return a handle for :func:`synchronize`.

    Do not change the tensors before that call.
    """
    return start(Allgather("grouped_allgather_async", tensors, name, process_set))
