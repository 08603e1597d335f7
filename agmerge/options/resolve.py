# SPDX-License-Identifier: Apache-2.0
"""Check every option of :class:`agmerge.DistributedOptimizer`, and make the config of a step out of them.

Mistakes and combinations without meaning are refused; nothing is accepted and ignored.
"""

from __future__ import annotations

from typing import Any

import torch

import sparsifiers
from agmerge.backends import timeouts
from agmerge.exchanges.low_rank.exchange import WIRES as LOW_RANK_WIRES
from agmerge.exchanges.message import VALUES
from agmerge.exchanges.table import EXCHANGES
from agmerge.ops import Average, ReduceOp
from agmerge.options import density_schedule, published
from agmerge.options.arguments import Options, check_choice, is_number, is_whole
from agmerge.options.compressors import compressor_of, densities_of, memory_for
from agmerge.options.defaults import default_density, density_of, nonfinite_of, timeout_of, wire_of
from agmerge.options.dense import parse_dense
from agmerge.options.plans import check_dear, check_send_mode, parse_groups, planner_or_plan
from agmerge.options.updates import parse_updates
from agmerge.runtime import horovod_names, process_sets
from agmerge.step.config import MERGING, TWO_LEVEL, WIRES, Config
from agmerge.step.density_policy import IMPORTANCE, DensityPolicy
from agmerge.step.records import Compression, Guards, Merging, Sync
from agmerge.step.updates import HOLD, UPDATES, Updates
from agmerge.tensors.nonfinite import POLICIES
from sparsifiers import Kind


def resolve(options: Options) -> Config:
    """Check every option and return the config of a step.

    Raises ``ValueError`` or ``TypeError`` that says which option is wrong, and why. ``rates`` of the config are not
    set: they are the optimizer's, see :func:`agmerge.options.prepare.with_momentum_of`.
    """
    _check_choices(options)
    updates = parse_updates(options)
    guards, sync = _guards(options), _sync(options, updates)  # in this order: the first mistake of several is told
    config = Config(compression=_compression(options, updates), merging=_merging(options), sync=sync, guards=guards)
    check_dear(config)
    _check_two_level(config)
    check_send_mode(config)
    return config


def _check_choices(options: Options) -> None:
    """Raise ``ValueError`` for a word that is none of those that its option knows."""
    check_choice("sparsify", options.sparsify, ("auto", "ahead", "behind"))
    check_choice("exchange", options.exchange, tuple(EXCHANGES), published.hint(published.EXCHANGE, options.exchange))
    check_choice("wire", options.wire, WIRES)
    check_choice("dense_sum", options.dense_sum, ("native", "ordered"))
    check_choice("unused", options.unused, ("none", "zero"))


def _guards(options: Options) -> Guards:
    """Return when a step is given up, skipped or refused."""
    scaled = _scales(options.scaler)
    nonfinite = nonfinite_of(options, scaled=scaled)
    check_choice("nonfinite", nonfinite, POLICIES)
    timeout, check_every = timeout_of(options), options.check_every
    if not is_number(timeout) or not 0 < timeout <= timeouts.LONGEST:
        raise ValueError(f"timeout must be a number of seconds > 0 and at most {timeouts.LONGEST:g}, got {timeout!r}")
    if not is_whole(check_every, 0):
        raise ValueError(f"check_every must be a number of steps (0: never), got {check_every!r}")
    return Guards(scaled=scaled, nonfinite=nonfinite, timeout=float(timeout), check_every=check_every)


def _sync(options: Options, updates: Updates | None) -> Sync:
    """Return what is combined, over which ranks and passes, and who applies it."""
    op, factor = _reduction(options.op), options.gradient_predivide_factor
    check_passes(options.backward_passes_per_step)
    if not is_number(factor) or not 0 < factor < float("inf"):
        raise ValueError(f"gradient_predivide_factor must be > 0 and a number, got {factor!r}")
    if factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if options.sparse_as_dense not in (True, False):
        raise ValueError(f"sparse_as_dense={options.sparse_as_dense!r}: expected True or False")
    return Sync(
        op=op,
        passes=options.backward_passes_per_step,
        predivide=float(factor),
        sparse_as_dense=bool(options.sparse_as_dense),
        ordered=options.dense_sum == "ordered",
        zero_unused=options.unused == "zero",
        process_set=process_sets.parse_process_set(options.process_set),
        model=options.model,
        updates=updates,
    )


def _compression(options: Options, updates: Updates | None) -> Compression:
    """Return what is sent of which tensor, and the error feedback of what is not sent."""
    density, wire = density_of(options), options.wire
    if isinstance(density, str) and density != IMPORTANCE:
        raise ValueError(f"density={density!r}: expected a number, {{pattern: number}}, or {IMPORTANCE!r}")
    by_importance = density == IMPORTANCE
    patterns = densities_of(density)
    number = default_density(options) if patterns or by_importance else density
    compressor = compressor_of(options.compression, number, options.rank)
    _check_low_rank(options, compressor)
    if wire in VALUES and not VALUES[wire].has_zero and options.exchange == "masked":
        raise ValueError(
            f"wire={wire!r} is not supported with exchange='masked', because it cannot encode zeros. Use another "
            "wire, or exchange='sparse', 'oktopk', 'two-level' or 'auto'."
        )
    rule, patterns_of_dense, cutoff = parse_dense(options, compressor, density)
    warmup = density_schedule.parse_warmup(options.warmup, bool(patterns))
    return Compression(
        compressor=compressor,
        memory=memory_for(options.memory, compressor) if updates is None else updates.memory_for(compressor),
        density=DensityPolicy(compressor.density, patterns, by_importance, warmup),
        wire=wire_of(options, compressor),
        dense=rule,
        partial=cutoff,
        patterns=patterns_of_dense,
    )


def _merging(options: Options) -> Merging:
    """Return which gradients share a message, and how messages are exchanged."""
    planner, plan = planner_or_plan(options.merging, options.sparsify, options.exchange)
    groups = parse_groups(options.groups, options.num_groups)
    if groups is not None and options.merging != MERGING:
        raise ValueError(
            f"merging={options.merging!r} and groups= both set which gradients share a message. Pass one of them."
        )
    return Merging(exchange=options.exchange, sparsify=options.sparsify, planner=planner, plan=plan, groups=groups)


def _check_low_rank(options: Options, compressor: sparsifiers.Compressor) -> None:
    """Raise ``ValueError`` for options that do not go with factors, where some tensors are factorised."""
    if Kind.LOW_RANK not in compressor.kinds:
        return
    if options.wire not in LOW_RANK_WIRES:
        raise ValueError(
            f"wire={options.wire!r} is not supported with low-rank factors, which are summed in transit. Choose from: "
            f"{', '.join(map(repr, LOW_RANK_WIRES))}"
        )
    if options.sync == UPDATES and options.carry == HOLD:
        raise ValueError(
            f"carry='hold' is not supported with compression={options.compression!r}, because it increased the loss "
            "by 7 to 18 % in our tests with AdamW (carry='apply': 1 %). Pass carry='apply', the default."
        )
    if options.exchange == TWO_LEVEL:
        raise ValueError(
            f"exchange='two-level' is not supported with compression={options.compression!r}, because each rank holds "
            "only a shard of each matrix. Pass exchange='sparse' or 'auto'."
        )


def _reduction(op: Any) -> ReduceOp:
    """Return ``op`` as ours, also where the script gives a constant of Horovod's; ``ValueError`` for other sums."""
    name = op.value if isinstance(op, ReduceOp) else horovod_names.horovod_reduction(op)
    if name in ("average", "sum"):
        return ReduceOp(name)
    raise ValueError(
        f"op must be agmerge.Average or agmerge.Sum, got {name or repr(op)}. Residuals are added to later gradients, "
        "which other operations do not support."
    )


def check_passes(passes: Any) -> None:
    """Raise ``ValueError`` unless ``passes`` is a number of backward passes that a step may have."""
    if not is_whole(passes):
        raise ValueError(f"backward_passes_per_step must be a whole number > 0, got {passes!r}")
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")


def _check_two_level(config: Config) -> None:
    """Raise ``ValueError`` for options that have no meaning where a rank holds a shard of every tensor."""
    if config.merging.exchange != TWO_LEVEL:
        return
    if config.sync.model is not None:
        raise ValueError(
            "exchange='two-level' is not supported with merging='dear', because both split a step in two. Set one of "
            "them."
        )
    if config.compression.density.by_importance:
        raise ValueError(
            "exchange='two-level' is not supported with density='importance', because the energy of a tensor is "
            "spread over several ranks. Pass a number or {pattern: number}."
        )
    if config.compression.memory.options().get("clipping") is not None:
        raise ValueError(
            f"exchange='two-level' is not supported with {config.compression.memory!r}, which clips by the norm of a "
            "tensor, because each rank holds only a shard. Clip in your script, after optimizer.synchronize()."
        )


def _scales(scaler: Any) -> bool:
    """Return whether there is a scaler that scales. ``TypeError`` for anything but a ``torch.amp.GradScaler``."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler={scaler!r}: expected the torch.amp.GradScaler that scales the loss")
    return scaler is not None and scaler.is_enabled()
