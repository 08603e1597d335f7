# SPDX-License-Identifier: Apache-2.0
"""Combine tensors of sparse layout: rows with their indices are gathered, not reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from agmerge.ops import Average, Sum
from agmerge.runtime.collectives import operation
from agmerge.runtime.collectives.gather import Allgather
from agmerge.runtime.collectives.operation import start


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
