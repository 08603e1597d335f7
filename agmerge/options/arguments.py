# SPDX-License-Identifier: Apache-2.0
"""Arguments of a wrapper as a script gave them, before they are checked; and checks of single values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch

from agmerge.ops import Average


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """Options of a :class:`agmerge.DistributedOptimizer`; its docstring says what they mean.

    :func:`agmerge.options.resolve.resolve` checks them. They are in the order of the constructor's arguments, with
    its defaults; the optimizer and the names of its parameters are no options.
    """

    compression: Any = "auto"  # a name, {regex: name}, a sparsifiers.Compressor, agmerge.Compression or Horovod's
    backward_passes_per_step: Any = 1
    op: Any = Average  # a ReduceOp, or a constant of Horovod's
    gradient_predivide_factor: float = 1.0
    num_groups: Any = 0  # Horovod's old name of groups
    groups: Any = None  # a number, lists of parameters, or None
    sparse_as_dense: bool = False
    process_set: Any = None
    density: Any = None  # a number, {regex: number} or "importance"; None: the default
    rank: Any = None  # a number, or {regex: number}; None: the default
    warmup: Any = None
    memory: Any = None  # a name, a sparsifiers.Memory, or None: the compressor's own
    dense: Any = None  # regular expressions, a callable, "partial", or None: small parameters
    merging: Any = "agmerge"  # a planner, a plan, the name of the one or the path of the other
    sparsify: str = "auto"
    exchange: str = "auto"
    wire: str = "auto"
    dense_sum: str = "native"
    scaler: Any = None  # a torch.amp.GradScaler, or None
    nonfinite: Any = None  # a name of tensors.nonfinite.POLICIES; None: as the scaler makes it
    timeout: float | None = None  # seconds; None: the default
    check_every: Any = 100  # steps
    unused: str = "none"
    model: torch.nn.Module | None = None  # of merging="dear"
    sync: str = "gradients"  # or "updates", of which the others are
    carry: Any = "apply"  # or "hold"; None: the default
    every: Any = 1  # steps
    fragments: Any = 1
    overlap: Any = 0  # steps
    decay: float = 1.0
    outer: Any = None  # a function of parameters that makes an optimizer of them, or None

    def __post_init__(self) -> None:
        """Read iterators, and copy lists and dictionaries: later changes of the script's have no effect."""
        for field in fields(self):
            object.__setattr__(self, field.name, _read(getattr(self, field.name)))

    @classmethod
    def from_saved(cls, arguments: Mapping[str, Any]) -> Options:
        """Return the options of a pickled wrapper, by name.

        Options that this release has no more are left out; those that the older one lacked are as by default.
        """
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in known})


def _read(value: Any) -> Any:
    """Return an iterator as a list of what it gives, a list or dictionary as a copy; within them likewise."""
    if isinstance(value, Iterator):
        return [_read(each) for each in value]
    if type(value) in (list, tuple):
        return type(value)(map(_read, value))
    if type(value) is dict:
        return {key: _read(each) for key, each in value.items()}
    return value


def check_choice(name: str, value: Any, allowed: tuple[str, ...], hint: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` is ``allowed``. ``hint``: the value that may be meant, after "; "."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"AGM302: {name}={value!r} is unknown. Choose from: {', '.join(map(repr, allowed))}{hint}")


def is_number(value: Any) -> bool:
    """Return whether this is a real number, of Python's or numpy's; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any, least: float = -math.inf) -> bool:
    """Return whether this is an int that is not below ``least``; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
