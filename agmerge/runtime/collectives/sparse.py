# SPDX-License-Identifier: Apache-2.0
"""Combine tensors of sparse layout: rows with their indices are gathered, not reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from agmerge.ops import Average, Sum
from agmerge.runtime.collectives import arguments
from agmerge.runtime.collectives.gather import Allgather
from agmerge.runtime.collectives.operation import start


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Any = Average, process_set: Any = None
) -> Callable[[], torch.Tensor]:
    """Collective. Start the average or sum of every rank's ``tensor``, of COO layout; call the result for it.

    Ranks may hold different numbers of elements. An element that several hold stands several times in the result,
    as in Horovod: it adds up in ``to_dense()`` and ``coalesce()``. ``name``, ``op`` (``Average`` or ``Sum``) and
    ``process_set``: as in :func:`allreduce`.
    """
    label = arguments.label(name, "sparse_allreduce_async")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise TypeError(f"{label}: expected a tensor of layout torch.sparse_coo. Use allreduce for dense tensors.")
    combine = arguments.reduction(op, None, label)
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
