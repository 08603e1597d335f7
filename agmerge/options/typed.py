# SPDX-License-Identifier: Apache-2.0
"""Types of options, for editors and type checkers: words with fixed values, and the ``**options`` of each function.

A ``TypedDict`` has what its function passes on; what a function has as a parameter of its own is left out there. Types
are those of :class:`agmerge.DistributedOptimizer`, which has the defaults, too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, TypedDict

import torch

from agmerge.ops import ReduceOp

Sparsify = Literal["auto", "ahead", "behind"]
ExchangeName = Literal["auto", "fastest", "sparse", "oktopk", "masked", "two-level"]
Wire = Literal["auto", "fp32", "fp16", "bf16", "int8", "int4", "2bit", "sign"]
DenseSum = Literal["native", "ordered"]
Nonfinite = Literal["raise", "skip"]
Unused = Literal["none", "zero"]
Sync = Literal["gradients", "updates"]
Carry = Literal["apply", "hold"]


class _Common(TypedDict, total=False):
    """Options that every wrapper takes."""

    op: ReduceOp
    gradient_predivide_factor: float
    rank: Any
    warmup: Any
    memory: Any
    dense: Any
    merging: Any
    sparsify: Sparsify
    exchange: ExchangeName
    dense_sum: DenseSum
    nonfinite: Nonfinite | None
    check_every: int
    carry: Carry | None
    fragments: int
    overlap: int
    decay: float
    outer: Any


class SyncOptions(_Common, total=False):
    """Options of :class:`agmerge.LocalSync` beside its parameters."""

    backward_passes_per_step: int
    num_groups: int
    groups: Any
    sparse_as_dense: bool
    process_set: Any
    scaler: Any
    timeout: float | None
    unused: Unused


class LocalOptions(SyncOptions, total=False):
    """Options of :class:`agmerge.LocalOptimizer` beside its parameters."""

    model: torch.nn.Module | None


class _OfModel(_Common, total=False):
    """Options of exchanges in a DistributedDataParallel."""

    compression: Any
    density: Any
    wire: Wire
    sync: Sync
    every: int


class DDPOptions(_OfModel, total=False):
    """Options of :func:`agmerge.integrations.ddp.compress`, and of ``compress`` for a Trainer and an Accelerator."""

    timeout: float | None


class StrategyOptions(_OfModel, total=False):
    """Options of Lightning's ``CompressedDDPStrategy``: ours, then those of its ``DDPStrategy``."""

    timeout: float | timedelta | None  # seconds of ours, or the timeout of Lightning's process group
    accelerator: Any
    parallel_devices: Any
    cluster_environment: Any
    checkpoint_io: Any
    precision_plugin: Any
    model_averaging_period: int | None
    process_group_backend: str | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    broadcast_buffers: bool
    bucket_cap_mb: float
