"""Hold the arguments of a wrapper as a script gave them, before anything is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """Hold the options of a :class:`agmerge.DistributedOptimizer`, whose docstring says what they mean.

    :func:`agmerge.options.resolve.resolve` checks them. They are in the order of the constructor's arguments, which has
    the defaults; the optimizer and the names of its parameters are no options.
    """

    compression: Any  # a name, a sparsifiers.Sparsifier, agmerge.Compression or Horovod's
    backward_passes_per_step: Any
    op: Any  # a ReduceOp, or a constant of Horovod's
    gradient_predivide_factor: float
    num_groups: Any  # Horovod's old name of groups
    groups: Any  # a number, lists of parameters, or None
    sparse_as_dense: bool
    process_set: Any
    density: Any  # a number, {pattern: number} or "importance"
    warmup: Any
    memory: Any  # a name, a sparsifiers.Memory, or None: the compressor's own
    dense: Any  # patterns, a callable, "partial", or None: small parameters
    merging: Any  # a planner, a plan, the name of the one or the path of the other
    sparsify: str
    exchange: str
    wire: str
    dense_sum: str
    scaler: Any  # a torch.amp.GradScaler, or None
    nonfinite: Any  # a name of tensors.nonfinite.POLICIES; None: as the scaler makes it
    timeout: float | None  # seconds; None: the default
    check_every: Any  # steps
    unused: str
    model: torch.nn.Module | None  # of merging="dear"

    @classmethod
    def from_saved(cls, arguments: Mapping[str, Any]) -> Options:
        """Return the options of a pickled wrapper, by name. What an older release had and this one has not is left out.

        Raises ``TypeError`` if one is missing.
        """
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in known})
