# SPDX-License-Identifier: Apache-2.0
"""Collectives of the module's own, for losses, metrics and set-up.

* ``operation``: one call, from arguments to result and gradient.
* ``reduce``: all-reduce. ``rows``: all-gather, reduce-scatter, all-to-all, sparse layout. ``broadcasts``: broadcast.
* ``objects``: Python objects, ``barrier`` and ``join``.

They use another communicator than the optimizers. Each first agrees on its arguments, so that a mistake is an error on
every rank and never a hang or a crash inside the backend. That costs one all-gather of 16 bytes; these calls are not
for the hot path.
"""

from __future__ import annotations

from agmerge.runtime.collectives.broadcasts import broadcast, broadcast_, broadcast_async, broadcast_async_, root_of
from agmerge.runtime.collectives.objects import allgather_object, barrier, broadcast_object, join
from agmerge.runtime.collectives.operation import as_bytes, poll, synchronize
from agmerge.runtime.collectives.reduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from agmerge.runtime.collectives.rows import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)

__all__ = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "as_bytes",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "root_of",
    "sparse_allreduce_async",
    "synchronize",
]
