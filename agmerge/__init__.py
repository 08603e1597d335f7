# SPDX-License-Identifier: Apache-2.0
"""Train data-parallel, fast also on slow or busy networks.

import agmerge
agmerge.init()
optimizer = agmerge.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from agmerge import siblings  # noqa: F401 - first: it says where Python finds another's packages in place of ours

# isort: split
import merging
import sparsifiers
from agmerge import testing
from agmerge.checkpoint import elastic
from agmerge.checkpoint.dcp import ResidualState, gather_state
from agmerge.errors import (
    AGMergeError,
    CollectiveTimeout,
    DivergenceError,
    MessageError,
    NoAnswer,
    NonFiniteError,
    PeerLost,
    RankMismatchError,
    TooFewWorkers,
)
from agmerge.ops import Adasum, Average, Compression, Max, Min, Product, ReduceOp, Sum
from agmerge.optimizer import DistributedOptimizer, LocalOptimizer, LocalSync, Nesterov
from agmerge.options.compressors import ladder
from agmerge.options.from_params import from_params, grace
from agmerge.runtime.broadcast import broadcast_optimizer_state, broadcast_parameters
from agmerge.runtime.collectives import (
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from agmerge.runtime.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from agmerge.runtime.workers import (
    Elastic,
    backend_name,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from agmerge.version import __version__

__all__ = [
    "AGMergeError",
    "Adasum",
    "Average",
    "CollectiveTimeout",
    "Compression",
    "DistributedOptimizer",
    "DivergenceError",
    "Elastic",
    "LocalOptimizer",
    "LocalSync",
    "Max",
    "MessageError",
    "Min",
    "Nesterov",
    "NoAnswer",
    "NonFiniteError",
    "PeerLost",
    "ProcessSet",
    "Product",
    "RankMismatchError",
    "ReduceOp",
    "ResidualState",
    "Sum",
    "TooFewWorkers",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "backend_name",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "from_params",
    "gather_state",
    "global_process_set",
    "grace",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "ladder",
    "local_rank",
    "local_size",
    "merging",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "sparsifiers",
    "synchronize",
    "testing",
]

# Modules under the names that scripts know: `from agmerge.elastic import State` works, as horovod.torch.elastic's does.
sys.modules.update({"agmerge.elastic": elastic, "agmerge.merging": merging, "agmerge.sparsifiers": sparsifiers})

_HOROVODS = {
    "HorovodInternalError": "catch agmerge.AGMergeError",
    "SyncBatchNorm": "use torch.nn's with torchrun, or horovod.torch's with horovodrun",
    "is_homogeneous": "len(set(allgather_object(local_size()))) == 1",
    **dict.fromkeys(("start_timeline", "stop_timeline"), "optimizer.trace(path) records agmerge's steps"),
    **dict.fromkeys(
        (
            *("mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_built", "gloo_enabled"),
            *("nccl_built", "cuda_built", "rocm_built", "ccl_built", "ddl_built"),
        ),
        "backend_name() returns the backend in use, and `python -m agmerge doctor` the available ones",
    ),
    **dict.fromkeys(("cross_rank", "cross_size"), "rank() // local_size() is the same for machines of equal size"),
}


def __getattr__(name: str) -> Any:
    if name == "integrations":  # each file of it needs a framework, which a script has that asks for it
        return importlib.import_module("agmerge.integrations")
    hint = f": it belongs to Horovod. Instead: {_HOROVODS[name]}" if name in _HOROVODS else ""
    raise AttributeError(f"module 'agmerge' has no attribute {name!r}{hint}")
