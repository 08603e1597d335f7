"""Data-parallel training that stays fast on slow or busy networks.

    import agmerge
    agmerge.init()
    optimizer = agmerge.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agmerge import testing
from agmerge.broadcasting import broadcast_optimizer_state, broadcast_parameters
from agmerge.collectives import allgather, allreduce, barrier, broadcast, broadcast_object
from agmerge.distributed_checkpoint import ResidualState
from agmerge.errors import (
    AGMergeError,
    CollectiveTimeout,
    DivergenceError,
    MessageError,
    NoAnswer,
    NonFiniteError,
    PeerLost,
    RankMismatchError,
)
from agmerge.gathering import gather_state
from agmerge.ops import Average, Compression, ReduceOp, Sum
from agmerge.optimizer import DistributedOptimizer
from agmerge.runtime import (
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
from agmerge.warmup import ladder

__all__ = [
    "AGMergeError",
    "Average",
    "CollectiveTimeout",
    "Compression",
    "DistributedOptimizer",
    "DivergenceError",
    "MessageError",
    "NoAnswer",
    "NonFiniteError",
    "PeerLost",
    "RankMismatchError",
    "ReduceOp",
    "ResidualState",
    "Sum",
    "__version__",
    "allgather",
    "allreduce",
    "backend_name",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "gather_state",
    "init",
    "is_initialized",
    "ladder",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "testing",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in ("Adasum", "Max", "Min", "Product"):
            raise AttributeError(f"agmerge has no {name}: gradients are combined by op=agmerge.Average or agmerge.Sum")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
