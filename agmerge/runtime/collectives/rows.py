# SPDX-License-Identifier: Apache-2.0
"""Rows of all ranks: gathered on all, combined and scattered, or sent from each to each; those of sparse layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from agmerge.backends import Handle
from agmerge.backends.handshake import Fact
from agmerge.ops import Average, Compression, Sum
from agmerge.runtime.collectives import operation
from agmerge.runtime.collectives.operation import (
    Compressor,
    Operation,
    Pending,
    byte_view,
    described,
    plain,
    row_kind,
    run,
    run_all,
    start,
)
from agmerge.runtime.collectives.reduce import Reduction, flat, reduced_gradients
from agmerge.runtime.process_sets import share_numbers

NONE = Compression.none

# All-gather: every rank gets the tensors of all, one after the other.


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


# Reduce-scatter: the tensors of all ranks are combined to one, of which every rank gets its rows.


class ReduceScatter(Reduction):
    """Operation of :func:`reducescatter`."""

    kind = "reducescatter"

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        if self.op not in (Average, Sum):
            raise ValueError(f"{self.label}: op must be agmerge.Average or agmerge.Sum, got {self.op.value}")
        for tensor in self.tensors:
            if tensor.dim() == 0:
                raise ValueError(f"{self.label}: a tensor of no dimensions has no rows to scatter. Use allreduce.")

    def begin(self, message: str) -> list[Handle]:
        """Collective. Start one message a tensor, of equal pieces: where rows do not divide, some end with padding."""
        self._dtypes = [tensor.dtype for tensor in self.tensors]
        self._pieces: list[torch.Tensor] = []
        handles = []
        for i, tensor in enumerate(self.tensors):
            whole = self._even(self.prepared(tensor))
            piece = whole.new_empty((len(whole) // self.comm.size, *whole.shape[1:]))
            self._pieces.append(piece[: self._rows(len(tensor))[self.comm.rank]])
            if piece.numel():
                name = f"{message}.{i}" if i else message
                handles.append(self.comm.reduce_scatter(flat(piece), flat(whole), name))
        return handles

    def _rows(self, rows: int) -> list[int]:
        """Return how many every rank gets, the first ones one more where they do not divide: as in Horovod."""
        least, more = divmod(rows, self.comm.size)
        return [least + (rank < more) for rank in range(self.comm.size)]

    def _even(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` with a row of zeros behind the shorter shares, so that all have as many rows."""
        counts = self._rows(len(tensor))
        if len(set(counts)) == 1:
            return tensor
        room = tensor.new_zeros((self.comm.size, counts[0], *tensor.shape[1:]))
        for place, part in zip(room, torch.split(tensor, counts), strict=True):
            place[: len(part)] = part
        return room.flatten(0, 1)

    def end(self) -> list[torch.Tensor]:
        """Return new tensors."""
        pieces, self._pieces = self._pieces, []
        return [self.finished(piece, dtype).contiguous() for piece, dtype in zip(pieces, self._dtypes, strict=True)]

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return the gradients of all rows, gathered; of a sum, times their number, as in Horovod."""
        factor = self.prescale * self.postscale * (self.comm.size if self.op is Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return run_all(Allgather("grouped_allgather", scaled, f"gradient of {self.label}", where=self.group))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = NONE,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Collective. Reduce the tensors of all ranks, and return this rank's share of the rows.

    Shares are equal. If the rows cannot be divided, the first ranks get one row more. It is differentiable: gradients
    are gathered, and multiplied by the number of ranks for a sum, as in Horovod.

    Args:
        tensor (torch.Tensor): This rank's tensor. Shape and dtype must be the same on all ranks.
        op (ReduceOp): ``agmerge.Average`` or ``Sum``. Default: ``Average``.

    The other arguments are those of :func:`allreduce`.
    """
    factors = prescale_factor, postscale_factor
    return run(ReduceScatter("reducescatter", tensor, None, name, op, *factors, process_set, compression))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Collective. Start :func:`reducescatter` of a copy of ``tensor``. Return a handle for :func:`synchronize`."""
    factors = prescale_factor, postscale_factor
    return start(ReduceScatter("reducescatter_async", tensor, None, name, op, *factors, process_set))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = NONE,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Collective. Reduce several tensors as :func:`reducescatter`, with one agreement for all. Return a list."""
    factors = prescale_factor, postscale_factor
    return run_all(ReduceScatter("grouped_reducescatter", tensors, None, name, op, *factors, process_set, compression))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Collective. Start :func:`grouped_reducescatter` on copies. Return a handle for :func:`synchronize`."""
    factors = prescale_factor, postscale_factor
    return start(ReduceScatter("grouped_reducescatter_async", tensors, None, name, op, *factors, process_set))


# All-to-all: every rank gives some rows to every rank.


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


# Tensors of sparse layout: rows with their indices are gathered, not reduced.


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Any = Average, process_set: Any = None
) -> Callable[[], torch.Tensor]:
    """Collective. Start to average or sum sparse tensors of all ranks. Call the result to get the tensor.

    Ranks may have different numbers of elements. If several ranks have the same element, it appears several times in
    the result, as in Horovod. ``to_dense()`` and ``coalesce()`` add these up.

    Args:
        tensor (torch.Tensor): A tensor of COO layout.
        name (str): Name of the call in errors.
        op (ReduceOp): ``agmerge.Average`` or ``Sum``. Default: ``Average``.
        process_set (ProcessSet, list or ProcessGroup): The ranks that take part. Default: all.

    Returns:
        A function without arguments that waits and returns the sparse tensor.
    """
    label = operation.label(name, "sparse_allreduce_async")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise TypeError(f"{label}: expected a tensor of layout torch.sparse_coo. Use allreduce for dense tensors.")
    combine = operation.reduction(op, None, label)
    if combine not in (Average, Sum):
        raise ValueError(f"{label}: op must be agmerge.Average or agmerge.Sum, got {combine.value}")
    bare = tensor.detach()
    gathering = Allgather("grouped_allgather", [bare._indices().t(), bare._values()], label, process_set)
    pending, size = start(gathering), gathering.comm.size

    def result() -> torch.Tensor:
        indices, values = pending.result()
        if combine is Average:
            values = values / size
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)

    return result
