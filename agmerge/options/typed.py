# SPDX-License-Identifier: Apache-2.0
"""Arguments of a wrapper as a script gives them, keywords that are unknown, and types for editors and type checkers.

A ``TypedDict`` has what its function passes on; what a function has as a parameter of its own is left out there. Types
are those of :class:`agmerge.DistributedOptimizer`, which has the defaults, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from numbers import Real
from typing import Any, Literal, TypedDict

import torch

from agmerge.ops import Average, ReduceOp
from sparsifiers.catalogue import alike
from sparsifiers.custom import adapted

# Arguments before they are checked, and checks of single values.


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
    diverged: Any = "raise"  # or "warn"
    unused: str = "none"
    model: torch.nn.Module | None = None  # of merging="dear"
    sync: str = "gradients"  # or "updates", of which the others are
    carry: Any = "apply"  # or "hold"; None: the default
    every: Any = None  # steps; None: 2 with updates in few bits, else 1
    fragments: Any = None  # likewise
    overlap: Any = None  # steps; None: 1 with quantizers, else 0
    decay: float = 1.0
    outer: Any = None  # a function of parameters that makes an optimizer of them, or None
    moments: Any = None  # or "mean", or "own"; None: "mean" with quantizers and few steps between exchanges

    def __post_init__(self) -> None:
        """Read iterators, and copy lists and dictionaries: later changes of the script's have no effect."""
        for field in fields(self):
            object.__setattr__(self, field.name, _read(getattr(self, field.name)))
        object.__setattr__(self, "compression", _adapted(self.compression))

    @classmethod
    def from_saved(cls, arguments: Mapping[str, Any]) -> Options:
        """Return the options of a pickled wrapper, by name.

        Options that this release has no more are left out; those that the older one lacked are as by default.
        """
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in known})


def _adapted(compression: Any) -> Any:
    """Return ``compression`` with compressors of a script's own class, by pattern too, as :class:`Custom`."""
    if isinstance(compression, dict):
        return {pattern: adapted(part) for pattern, part in compression.items()}
    return adapted(compression)


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


# Unknown keywords: those of other projects are answered with the line to write, slips with the right name.

KNOWN = ("optimizer", "named_parameters", *(field.name for field in fields(Options)))
_PLANNER = 'merging=merging.get("threshold", bytes={} * 2**20)'
_ELEMENTS = 'merging=merging.get("threshold", bytes=4 * {value})'
_NEEDLESS = "leave it out: "
_MEASURED = _NEEDLESS + "agmerge measures times during training"
_FROM = "agmerge.from_params reads this dictionary: pass **agmerge.from_params({name})"
# By keyword, what to write: {value} is the given value, {name} the keyword.
_MEANT = {
    # ACP-SGD's and DeAR's are MB, those of MG-WFBP, OMGS-SGD and FGBuff elements.
    "threshold": f"pass {_PLANNER.format('{value}')} for MB, or for elements {_ELEMENTS}",
    "fusion_threshold": 'pass merging=merging.get("threshold", bytes={value})',
    "fusion_threshold_mb": f"pass {_PLANNER.format('{value}')}",
    "bucket_cap_mb": f"pass {_PLANNER.format('{value}')}",
    "bucket_size_mb": f"pass {_PLANNER.format('{value}')}",
    "num_nearby_layers": 'pass merging=merging.get("count", tensors={value})',
    "mgwfbp": 'pass merging="mgwfbp"',
    "asc": 'pass merging=merging.get("mgwfbp", asc=True)',
    "planner": "pass merging={value}",
    # GRACE, ADTopk and FGBuff
    "comm_params": _FROM,
    "grace": f"pass compression={{name}} if it is an object with compress() and decompress(); {_FROM}",
    "params": _FROM,
    "compressor": "pass compression={value}",
    "compression_name": "pass compression={value}",
    "compress_ratio": "pass density={value}",
    "ratio": "pass density={value}",
    "rho": "pass density={value}",
    "sparsity": "pass density=, the share of values that is sent (not the share that is left out)",
    "communicator": "pass exchange=: 'sparse' gathers the values that each rank selects",
    "comm_mode": "pass exchange=: 'sparse' gathers the values that each rank selects",
    "model_named_parameters": "pass named_parameters={value}",
    "compress_rank": "pass rank={value}",
    "matrix_approximation_rank": "pass rank={value}",
    "use_error_feedback": "error feedback is on by default: pass memory='none' to turn it off",
    "error_feedback": "error feedback is on by default: pass memory='none' to turn it off",
    # OMGS-SGD and its family
    "is_sparse": "pass compression='topk', or 'none' for uncompressed gradients",
    "fp16": "pass compression='fp16'",
    "norm_clip": "call optimizer.clip_grad_norm_(max_norm) between backward() and step()",
    "layerwise_times": _MEASURED,
    "seq_layernames": _MEASURED,
    "rdma": _MEASURED,
    "sigma_scale": _NEEDLESS + "gaussiank adjusts its threshold automatically",
    "err_handler": _NEEDLESS + "errors are always raised, the same on all ranks",
    "gradient_path": _NEEDLESS + "optimizer.stats() has figures",
    "writer": _NEEDLESS + "optimizer.stats() has figures",
    "multi_job_scheduling": _NEEDLESS + "agmerge has no state that jobs share",
    # Horovod, torch and torchft
    "use_adasum": _NEEDLESS + "not supported, because residuals would change the update",
    "gradient_accumulation_steps": "pass backward_passes_per_step={value}",
    "process_group": "pass process_set={value}",
    "comm_hook": "pass compression=, by name",
    "sync_every": "pass every={value} to LocalOptimizer",
    "H": "pass every={value} to LocalOptimizer",
    "outer_optimizer": "pass outer=, a function that creates it from the parameters, such as agmerge.Nesterov()",
}


def refuse_unknown(what: str, given: Mapping[str, Any], known: Iterable[str] = KNOWN) -> None:
    """Raise ``TypeError`` for the first keyword of ``given`` that is not ``known``, with advice.

    ``what``: the function that was called, for the error.
    """
    known = set(known)
    for name, value in given.items():
        if name in known:
            continue
        advice = _MEANT.get(name, "")
        if not advice and (near := alike(name, sorted(known))):
            advice = f"did you mean {near!r}?"
        text = advice.format(name=name, value=_text(value))
        raise TypeError(f"AGM302: {what}() got an unexpected keyword argument {name!r}{f': {text}' if text else ''}")


def _text(value: Any) -> str:
    """Return a value as a script may write it; an ellipsis for a long one."""
    text = repr(value)
    return text if len(text) <= 40 and "<" not in text else "..."


# Types: words with fixed values, and the ``**options`` of each function.

Sparsify = Literal["auto", "ahead", "behind"]
ExchangeName = Literal["auto", "fastest", "sparse", "oktopk", "masked", "two-level"]
Wire = Literal["auto", "fp32", "fp16", "bf16", "int8", "int4", "2bit", "sign"]
DenseSum = Literal["native", "ordered"]
Nonfinite = Literal["raise", "skip", "keep"]
Diverged = Literal["raise", "warn"]
Unused = Literal["none", "zero"]
Sync = Literal["gradients", "updates"]
Carry = Literal["apply", "hold"]
Moments = Literal["mean", "own"]


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
    diverged: Diverged
    carry: Carry | None
    fragments: int | None
    overlap: int | None
    decay: float
    outer: Any
    moments: Moments | None


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
    every: int | None


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
