# SPDX-License-Identifier: Apache-2.0
"""The four records of :class:`agmerge.step.config.Config`: compression, merging, synchronisation and guards.

``resolve`` makes them of what a script says, each in one function. A field's name occurs in one of them alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

import merging
import sparsifiers
from agmerge.backends.base import Chosen
from agmerge.ops import ReduceOp
from agmerge.step import dense_cutoff, momentum
from agmerge.step.density_policy import DensityPolicy
from agmerge.step.groups import Groups
from agmerge.step.updates import Updates

DenseRule = Callable[[str, torch.Tensor], bool]


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What is sent of which tensor, and the error feedback of what is not sent."""

    compressor: sparsifiers.Compressor  # of every tensor that `dense` does not exempt
    memory: sparsifiers.Memory  # the rule of its residuals
    density: DensityPolicy
    wire: str  # the value codec of sparse tensors
    dense: DenseRule  # which parameters are always sent uncompressed
    partial: dense_cutoff.DenseCutoff | None  # dense="partial": `dense` goes dense whatever the cut
    patterns: tuple[re.Pattern[str], ...]  # those that `dense` was made from, if it was
    rates: momentum.Rates | None = None  # where the memory takes the optimizer's momentum from, if it does


@dataclass(frozen=True, kw_only=True)
class Merging:
    """Which gradients share a message, and how messages are exchanged."""

    sparsify: str  # "ahead" of merging, "behind" it, or "auto"
    exchange: str  # of sparse tensors, a name of exchanges.table.EXCHANGES
    planner: merging.Planner | None  # None: there is a plan
    plan: merging.Plan | None
    groups: Groups | None  # plans by themselves; the planner is then not asked


@dataclass(frozen=True, kw_only=True)
class Sync:
    """What is combined, over which ranks and passes, and who applies it."""

    process_set: Chosen
    op: ReduceOp  # Average or Sum
    passes: int  # backward passes per step
    predivide: float  # dense sums are of gradient / predivide
    sparse_as_dense: bool  # gradients of sparse layout are made dense
    ordered: bool  # sums in rank order, whatever the plan
    zero_unused: bool  # a parameter that no rank has used gets a gradient of zeros
    model: torch.nn.Module | None  # merging="dear": its forward takes the updates
    updates: Updates | None  # sync="updates": the optimizer's updates are exchanged; None: gradients are


@dataclass(frozen=True, kw_only=True)
class Guards:
    """When a step is given up, skipped or refused."""

    timeout: float  # seconds, for every wait
    check_every: int  # steps between two comparisons of replicas; 0: after the first step alone
    nonfinite: str  # policy for a step in which a rank has a gradient that is infinite or NaN
    scaled: bool  # by an attached GradScaler
