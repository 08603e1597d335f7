# SPDX-License-Identifier: Apache-2.0
"""Exchange rows: every rank gives some to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agmerge.backends import Handle
from agmerge.backends.handshake import Fact
from agmerge.runtime.collectives.operation import (
    Operation,
    Pending,
    byte_view,
    described,
    plain,
    row_kind,
    run_all,
    start,
)
from agmerge.runtime.process_sets import share_numbers


class Alltoall(Operation):
    """Operation of :func:`alltoall`. Two results: the rows, and how many came from each rank."""

    kind = "alltoall"

    def __init__(self, call: str, tensor: torch.Tensor, splits: Any, *given: Any, **more: Any) -> None:
        super().__init__(call, tensor, *given, **more)
        if tensor.dim() == 0:
            raise ValueError(
                f"{self.label}: a tensor of no dimensions is not supported, because it has no rows to send"
            )
        self._like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
        self._splits = _checked(splits, len(tensor), self.comm.size, self.label)

    def facts(self) -> list[Fact]:
        """Return the dtype and all dimensions but the first."""
        (tensor,) = self.tensors
        return [("dtype", row_kind(tensor)), ("trailing dimensions", str(list(tensor.shape[1:])))]

    def begin(self, message: str) -> list[Handle]:
        """Collective. Start one message, when all ranks know the rows that each sends to each."""
        (tensor,) = self.tensors
        splits_of_ranks = share_numbers(self.comm, self.label, self._splits)
        self._received = [splits[self.comm.rank] for splits in splits_of_ranks]
        self._result = tensor.new_empty((sum(self._received), *tensor.shape[1:]))
        row = tensor.shape[1:].numel() * tensor.element_size()
        if not row or not any(map(sum, splits_of_ranks)):
            return []
        lengths = [row * n for n in self._received], [row * n for n in self._splits]
        return [self.comm.all_to_all(byte_view(self._result), byte_view(plain(tensor)), *lengths, message)]

    def end(self) -> list[torch.Tensor]:
        """Return a new tensor, and the numbers of rows as the script gave its own."""
        counts = torch.tensor(self._received, dtype=self._like.dtype, device=self._like.device)
        return [self._result, counts]

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Send every gradient back to where its row came from."""
        named = f"gradient of {self.label}"
        return run_all(Alltoall("alltoall", gradients[0], self._received, named, where=self.group))[:1]

    def shaped(self, results: list[torch.Tensor]) -> Any:
        """Return both results."""
        return tuple(results)


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Collective. Send rows of a tensor to every rank, and return the rows received, in rank order.

    It is differentiable: gradients go back to the ranks that the rows came from.

    Args:
        tensor (torch.Tensor): The rows to send, first those for rank 0.
        splits (list or torch.Tensor): Number of rows for each rank. They must add up to ``len(tensor)``. Default: equal
            shares.
        name (str): Name of the call in errors. Ranks compare it. Default: calls are matched by their order.
        process_set (ProcessSet, list or ProcessGroup): The ranks that take part. Default: all.

    Returns:
        The received rows. If you pass ``splits``, also the number of rows from each rank.
    """
    rows, received = run_all(Alltoall("alltoall", tensor, splits, name, process_set))
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Pending:
    """Collective. Start :func:`alltoall`. Return a handle for :func:`synchronize`.

    That call always returns rows and numbers of rows, as in Horovod. Do not change ``tensor`` before.
    """
    return start(Alltoall("alltoall_async", tensor, splits, name, process_set))


def _checked(splits: Any, rows: int, size: int, label: str) -> list[int]:
    """Return how many rows go to each rank, or raise ``ValueError`` unless they are all ``rows`` of the tensor."""
    if splits is None:
        if rows % size:
            raise ValueError(
                f"{label}: the number of rows, {rows}, must be divisible by the number of ranks, {size}. Otherwise "
                "pass splits."
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.is_floating_point() or splits.is_complex() or splits.dtype == torch.bool or splits.dim() != 1:
            raise ValueError(f"{label}: splits must be integers in one dimension, got {described(splits)}")
        splits = splits.tolist()
    lengths = list(splits)
    if not all(isinstance(length, int) and length >= 0 for length in lengths):
        raise ValueError(f"{label}: splits must be integers >= 0, got {lengths}")
    if len(lengths) != size or sum(lengths) != rows:
        raise ValueError(
            f"{label}: splits {lengths} must be {size} numbers whose sum is {rows}, the first dimension of the tensor"
        )
    return lengths
