"""Check every option of :class:`agmerge.DistributedOptimizer`, and make the config of a step out of them.

Mistakes and combinations without meaning are refused; nothing is accepted and ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch

import merging
import sparsifiers
from agmerge.backends import timeouts
from agmerge.exchanges.low_rank.exchange import WIRES as LOW_RANK_WIRES
from agmerge.exchanges.message import VALUES
from agmerge.exchanges.send_mode import AHEAD, OWN, send_mode, why_labels_are_wrong, with_send_mode
from agmerge.exchanges.splitting import why_parts_impossible
from agmerge.exchanges.table import EXCHANGES
from agmerge.ops import Average, ReduceOp
from agmerge.options import density_schedule, published
from agmerge.options.arguments import Options
from agmerge.options.compressors import compressor_of, densities_of, memory_for
from agmerge.options.defaults import default_density, density_of, nonfinite_of, timeout_of, wire_of
from agmerge.options.updates import parse_updates
from agmerge.runtime import horovod_names, process_sets
from agmerge.step import dense_cutoff
from agmerge.step.config import AUTO, FASTEST, MERGING, TWO_LEVEL, WIRES, Config, is_small
from agmerge.step.density_policy import IMPORTANCE, DensityPolicy
from agmerge.step.groups import parse_groups
from agmerge.step.records import Compression, DenseRule, Guards, Merging, Sync
from agmerge.step.updates import HOLD, UPDATES, Updates
from agmerge.tensors.nonfinite import POLICIES
from merging.planners.papers.dear import DeAR
from sparsifiers import Kind


def resolve(options: Options) -> Config:
    """Check every option and return the config of a step.

    Raises ``ValueError`` or ``TypeError`` that says which option is wrong, and why. ``rates`` of the config are not
    set: they are the optimizer's, see :func:`agmerge.step.config.with_momentum_of`.
    """
    _check_choices(options)
    updates = parse_updates(options)
    guards, sync = _guards(options), _sync(options, updates)  # in this order: the first mistake of several is told
    config = Config(compression=_compression(options, updates), merging=_merging(options), sync=sync, guards=guards)
    _check_dear(config)
    _check_two_level(config)
    _check_send_mode(config)
    return config


def _check_choices(options: Options) -> None:
    """Raise ``ValueError`` for a word that is none of those that its option knows."""
    _check_choice("sparsify", options.sparsify, ("auto", "ahead", "behind"))
    _check_choice("exchange", options.exchange, tuple(EXCHANGES), published.hint(published.EXCHANGE, options.exchange))
    _check_choice("wire", options.wire, WIRES)
    _check_choice("dense_sum", options.dense_sum, ("native", "ordered"))
    _check_choice("unused", options.unused, ("none", "zero"))


def _guards(options: Options) -> Guards:
    """Return when a step is given up, skipped or refused."""
    scaled = _scales(options.scaler)
    nonfinite = nonfinite_of(options, scaled=scaled)
    _check_choice("nonfinite", nonfinite, POLICIES)
    timeout, check_every = timeout_of(options), options.check_every
    if not _is_number(timeout) or not 0 < timeout <= timeouts.LONGEST:
        raise ValueError(f"timeout must be a number of seconds > 0, and at most {timeouts.LONGEST:g}, not {timeout!r}")
    if not isinstance(check_every, int) or isinstance(check_every, bool) or check_every < 0:
        raise ValueError(f"check_every must be a number of steps (0: never), not {check_every!r}")
    return Guards(scaled=scaled, nonfinite=nonfinite, timeout=float(timeout), check_every=check_every)


def _sync(options: Options, updates: Updates | None) -> Sync:
    """Return what is combined, over which ranks and passes, and who applies it."""
    op, factor = _reduction(options.op), options.gradient_predivide_factor
    check_passes(options.backward_passes_per_step)
    if not _is_number(factor) or not 0 < factor < float("inf"):
        raise ValueError(f"gradient_predivide_factor must be > 0, and a number, not {factor!r}")
    if factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if options.sparse_as_dense not in (True, False):
        raise ValueError(f"sparse_as_dense={options.sparse_as_dense!r}: give True or False")
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
    compression, density, dense, wire = options.compression, density_of(options), options.dense, options.wire
    if isinstance(density, str) and density != IMPORTANCE:
        raise ValueError(f"density={density!r}: give a number, {{pattern: number}}, or {IMPORTANCE!r}")
    by_importance = density == IMPORTANCE
    patterns = densities_of(density)
    number = default_density(options) if patterns or by_importance else density
    compressor = compressor_of(compression, number, options.rank)
    _check_low_rank(options, compressor)
    if wire in VALUES and not VALUES[wire].has_zero and options.exchange == "masked":
        raise ValueError(
            f"wire={wire!r}: a mask names coordinates where a rank may have nothing to send, and {wire!r} has no code "
            "for 0; take another wire, or exchange='sparse', 'oktopk', 'two-level' or 'auto'"
        )
    cutoff = dense_cutoff.parse_dense_cutoff(dense, compressor, compression, density, options.warmup)
    warmup = density_schedule.parse_warmup(options.warmup, bool(patterns))
    return Compression(
        compressor=compressor,
        memory=memory_for(options.memory, compressor) if updates is None else updates.memory_for(compressor),
        density=DensityPolicy(compressor.density, patterns, by_importance, warmup),
        wire=wire_of(options, compressor),
        dense=is_small if cutoff is not None else _dense_rule(dense),
        partial=cutoff,
        patterns=() if dense is None or cutoff is not None or callable(dense) else _patterns(dense),
    )


def _merging(options: Options) -> Merging:
    """Return which gradients share a message, and how messages are exchanged."""
    planner, plan = _planner_or_plan(options.merging, options.sparsify, options.exchange)
    groups = parse_groups(options.groups, options.num_groups)
    if groups is not None and options.merging != MERGING:
        raise ValueError(
            f"merging={options.merging!r} and groups both say which gradients share a message; give one of them"
        )
    return Merging(exchange=options.exchange, sparsify=options.sparsify, planner=planner, plan=plan, groups=groups)


def _check_low_rank(options: Options, compressor: sparsifiers.Compressor) -> None:
    """Raise ``ValueError`` for options that do not go with factors, where some tensors are factorised."""
    if Kind.LOW_RANK not in compressor.kinds:
        return
    if options.wire not in LOW_RANK_WIRES:
        raise ValueError(
            f"wire={options.wire!r}: factors are added up on their way, so they travel as numbers that add up; choose "
            f"from: {', '.join(map(repr, LOW_RANK_WIRES))}"
        )
    if options.sync == UPDATES and options.carry == HOLD:
        raise ValueError(
            f"carry='hold' and compression={options.compression!r}: beside the parameters the rest of an update waits "
            "too long (7 and 18 % of the loss of a small language model with AdamW, docs/parity.md, where 'apply' cost "
            "1 %); pass carry='apply', the default"
        )
    if options.exchange == TWO_LEVEL:
        raise ValueError(
            f"exchange='two-level' and compression={options.compression!r}: a rank of a node has a shard of each "
            "matrix, and factors of shards are not built yet; pass exchange='sparse' or 'auto'"
        )


def _check_choice(name: str, value: Any, allowed: tuple[str, ...], hint: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` is ``allowed``. ``hint``: the value that may be meant, after "; "."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose from: {', '.join(map(repr, allowed))}{hint}")


def _is_number(value: Any) -> bool:
    """Return whether this is a real number, of Python's or numpy's; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _reduction(op: Any) -> ReduceOp:
    """Return ``op`` as ours, also where the script gives a constant of Horovod's; ``ValueError`` for other sums."""
    name = op.value if isinstance(op, ReduceOp) else horovod_names.reduction(op)
    if name in ("average", "sum"):
        return ReduceOp(name)
    raise ValueError(
        f"op must be agmerge.Average or agmerge.Sum, not {name or repr(op)}: what is not sent now is sent later, "
        "and with minima, maxima, products or Adasum that would be another update"
    )


def check_passes(passes: Any) -> None:
    """Raise ``ValueError`` unless ``passes`` is a number of backward passes that a step may have."""
    if not isinstance(passes, int) or isinstance(passes, bool):
        raise ValueError(f"backward_passes_per_step must be a whole number > 0, not {passes!r}")
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")


def _planner_or_plan(given: Any, sparsify: str, exchange: str) -> tuple[merging.Planner | None, merging.Plan | None]:
    """Return the planner that ``merging=`` names, or else the plan. Raises ``ValueError`` for one that cannot be used.

    Args:
        given: a planner or its name, a plan or the path of a saved one.
        sparsify: "ahead" labels the merge buffers of a plan.
        exchange: must leave the choice where a plan has dense merge buffers.
    """
    if isinstance(given, str) and not given.endswith(".json"):
        given = published.planner(given)
    if isinstance(given, merging.Planner):
        return given, None
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
        given = merging.Plan.load(given)
    if isinstance(given, merging.Plan):
        if problem := why_labels_are_wrong(given):
            raise ValueError(f"merging: {problem}")
        if any(given.dense) and exchange not in (AUTO, FASTEST):
            raise ValueError(f"merging: this plan has dense merge buffers, and exchange={exchange!r}: pass {AUTO!r}")
        if sparsify == "behind" and send_mode(given).ahead:
            raise ValueError("sparsify='behind', and merging is a plan made to sparsify ahead; leave one of them out")
        if sparsify == AHEAD:
            given = with_send_mode(given, ahead=True)
        if problem := why_parts_impossible(given):
            raise ValueError(f"merging: {problem}")
        return None, given
    names = ", ".join(merging.names())
    raise TypeError(f"merging={given!r}: give a planner's name ({names}), a planner, or a saved plan")


def _check_send_mode(config: Config) -> None:
    """Raise ``ValueError`` for a plan with a value codec or exchange that these options do not leave to a plan."""
    if config.merging.plan is None:
        return
    mode = send_mode(config.merging.plan)
    if mode.codec not in (OWN, config.compression.wire, *config.wires):
        raise ValueError(
            f"merging: this plan sends values in {mode.codec}, and the options say otherwise, or do not keep what "
            f"rounding leaves behind: pass wire={mode.codec!r}, or another plan"
        )
    if mode.quantiser not in (OWN, config.compression.compressor.name, *config.quantisers):
        raise ValueError(
            f"merging: this plan sends in {mode.quantiser!r}, and compression is {config.compression.compressor!r}: "
            f"pass compression={mode.quantiser!r} or 'auto', or another plan"
        )
    if mode.exchange not in (OWN, config.merging.exchange, *config.exchanges):
        raise ValueError(
            f"merging: this plan exchanges by {mode.exchange!r}, and exchange={config.merging.exchange!r}: pass "
            f"exchange={FASTEST!r} or {mode.exchange!r}, or another plan"
        )


def _check_dear(config: Config) -> None:
    """Raise unless ``merging="dear"`` has the model that it needs, and no other merging has one.

    ``TypeError`` for a model that is no module, ``ValueError`` for options that do not go with DeAR.
    """
    model, dear = config.sync.model, isinstance(config.merging.planner, DeAR)
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={model!r}: give the torch.nn.Module whose forward uses the parameters")
    if not dear and model is not None:
        raise ValueError("model= is taken by merging='dear' alone; a use with others is not built yet, leave it out")
    if dear and model is None:
        raise ValueError("merging='dear' applies updates in the next forward: pass model=, the module that you call")
    if dear and config.guards.scaled:
        raise ValueError(
            "merging='dear' has its updates in the next forward only, where scaler.step() cannot see them: train "
            "in bfloat16, without scaler=, or use another merging"
        )
    if dear and config.compression.compressor.compresses:
        how = (
            "what {} selects travels by all-gather"
            if config.compression.compressor.selects
            else "{} sends factors of matrices"
        )
        raise ValueError(
            f"merging='dear' halves an all-reduce, and {how.format(repr(config.compression.compressor))}: pass "
            "compression='none', 'fp16' or 'bf16', or use another merging"
        )


def _check_two_level(config: Config) -> None:
    """Raise ``ValueError`` for options that have no meaning where a rank holds a shard of every tensor."""
    if config.merging.exchange != TWO_LEVEL:
        return
    if config.sync.model is not None:
        raise ValueError("exchange='two-level' and merging='dear' both cut a step in two; give one of them")
    if config.compression.density.by_importance:
        raise ValueError(
            "exchange='two-level' and density='importance': the energy of a tensor lies on several ranks, and is not "
            "added up yet; give a number or {pattern: number}"
        )
    if config.compression.memory.options().get("clipping") is not None:
        raise ValueError(
            f"exchange='two-level' and {config.compression.memory!r}: clipping goes by the norm of a tensor; a rank "
            "has a shard of it; clip in the script, after synchronize()"
        )


def _dense_rule(dense: Any) -> DenseRule:
    """Return the rule of ``dense=``; ``TypeError`` for anything else. ``"partial"`` is not asked here."""
    if dense is None:
        return is_small
    if callable(dense):
        return lambda name, parameter: bool(dense(name, parameter))
    if isinstance(dense, str) or not isinstance(dense, Iterable):
        raise TypeError(
            f"dense={dense!r}: give a list of patterns for whole names, a callable (name, parameter) -> bool, or "
            f"{dense_cutoff.NAME!r}"
        )
    patterns = _patterns(dense)
    return lambda name, parameter: any(pattern.fullmatch(name) for pattern in patterns)


def _patterns(dense: Iterable[Any]) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of ``dense=``; ``ValueError`` for anything else."""
    patterns = []
    for pattern in dense:
        try:
            patterns.append(re.compile(pattern))
        except (TypeError, re.error) as error:
            raise ValueError(f"dense: {pattern!r} is no pattern for whole names: {error}") from None
    return tuple(patterns)


def _scales(scaler: Any) -> bool:
    """Return whether there is a scaler that scales. ``TypeError`` for anything but a ``torch.amp.GradScaler``."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler={scaler!r}: give the torch.amp.GradScaler whose scale() the loss goes through")
    return scaler is not None and scaler.is_enabled()
