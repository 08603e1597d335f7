# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: the tensors of all ranks are combined to one, of which every rank gets its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agmerge.backends import Handle
from agmerge.ops import Average, Compression, Sum
from agmerge.runtime.collectives.gather import Allgather
from agmerge.runtime.collectives.operation import Compressor, Pending, run, run_all, start
from agmerge.runtime.collectives.reduce import Reduction, flat

NONE = Compression.none


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
