# SPDX-License-Identifier: Apache-2.0
"""Checks of all options of :class:`agmerge.DistributedOptimizer` together, and the config of a step made of them.

Every wrapper calls ``prepare``. Mistakes and combinations without meaning are refused; nothing is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import sparsifiers
from agmerge.backends import timeouts, topology
from agmerge.errors import warn
from agmerge.exchanges.low_rank.exchange import WIRES as LOW_RANK_WIRES
from agmerge.exchanges.message import VALUES
from agmerge.exchanges.table import EXCHANGES
from agmerge.ops import Average, ReduceOp
from agmerge.options import compressors, defaults, momentum, published
from agmerge.options.compressors import (
    check_custom,
    check_dear,
    check_send_mode,
    compressor_of,
    densities_of,
    memory_for,
    named,
    parse_dense,
    parse_groups,
    planner_or_plan,
)
from agmerge.options.defaults import default_density, density_of, nonfinite_of, resolve_auto, timeout_of, wire_of
from agmerge.options.meaning import check_meaning
from agmerge.options.typed import Options, check_choice, is_number, is_whole
from agmerge.runtime import process_sets, workers
from agmerge.step.config import (
    APPLY,
    CARRIES,
    GRADIENTS,
    HOLD,
    MEAN,
    MERGING,
    MOMENTS,
    SYNCS,
    TWO_LEVEL,
    UPDATES,
    WIRES,
    Compression,
    Config,
    Guards,
    Merging,
    Sync,
    Updates,
)
from agmerge.step.density_policy import DENSITY, IMPORTANCE, DensityPolicy
from agmerge.tensors.nonfinite import KEEP, POLICIES
from sparsifiers import Kind, catalogue

# ``sync="updates"``: the optimizer's updates of parameters are exchanged, not gradients.

# Options of sync="updates" alone, with their neutral values.
_OWN = {
    "carry": ("apply", None),
    "every": (None, 1),
    "fragments": (None, 1),
    "overlap": (None, 0),
    "decay": (1.0,),
    "outer": (None,),
    "moments": (None,),
}


def parse_updates(options: Options) -> Updates | None:
    """Return how updates are exchanged; None with ``sync="gradients"``.

    Raises ``ValueError`` or ``TypeError`` for options without meaning, by themselves or with others.
    """
    check_choice("sync", options.sync, SYNCS)
    if options.sync == GRADIENTS:
        for name, usual in _OWN.items():
            if getattr(options, name) not in usual:
                raise ValueError(
                    f"{name}={getattr(options, name)!r} requires sync='updates'. Pass sync='updates', or remove "
                    f"{name}=."
                )
        return None
    schedule = defaults.schedule_of(options)
    options = replace(options, every=schedule["every"], fragments=schedule["fragments"])
    for name, problem in _refused(options):
        raise ValueError(f"{name}={getattr(options, name)!r} is not supported with sync='updates': {problem}")
    carry = defaults.carry_of(options)
    check_choice("carry", carry, CARRIES)
    for name, least in (("every", 1), ("fragments", 1), ("overlap", 0)):
        value = getattr(options, name)
        if not (is_whole(value, least) or (name == "overlap" and value is None)):
            raise ValueError(f"{name}={value!r}: expected a whole number >= {least}")
    if not is_number(options.decay) or not 0.0 < options.decay <= 1.0:
        raise ValueError(f"decay={options.decay!r}: expected a number in (0, 1]")
    if options.outer is not None and not callable(options.outer):
        raise TypeError(
            f"outer={options.outer!r}: expected agmerge.Nesterov(), or a function that returns a "
            "torch.optim.Optimizer for a list of parameters"
        )
    if options.moments is not None:
        check_choice("moments", options.moments, MOMENTS)
    _check_together(options, carry)
    given = {name: getattr(options, name) for name in ("every", "fragments", "outer")}
    return Updates(carry=carry, decay=float(options.decay), overlap=options.overlap or 0, **given)


def _fitting(updates: Updates, overlap: int | None, moments: str | None, compressor: sparsifiers.Compressor) -> Updates:
    """Return how updates of ``compressor`` are exchanged. ``overlap``, ``moments``: as the script gives them."""
    if not compressor.kinds <= {Kind.QUANTISED, Kind.DENSE} or Kind.QUANTISED not in compressor.kinds:
        if moments == MEAN:
            raise ValueError(
                f"moments='mean' is not supported with compression={compressor.name!r}. It requires a quantizer, such "
                "as 'eden-2': with sparsifiers it increased the loss."
            )
        return updates
    stays = updates.carry == APPLY and updates.outer is None
    if moments == MEAN and not stays:
        raise ValueError("moments='mean' requires carry='apply' and no outer=. Remove moments=, or these.")
    few_steps = stays and defaults.are_few(updates.every, updates.fragments)
    is_late = overlap is None and few_steps
    return replace(
        updates,
        interleaved=True,
        overlap=1 if is_late else updates.overlap,
        in_time=defaults.IN_TIME if is_late else 0,
        mean_moments=moments == MEAN or (few_steps and moments is None),
    )


def _refused(options: Options) -> Iterable[tuple[str, str]]:
    """Yield the options that mean nothing where no gradient is exchanged, each with the reason."""
    if options.op is not Average and getattr(options.op, "value", options.op) != Average.value:
        yield "op", "the updates of the workers are averaged, because their sum would be as large as several steps"
    if options.backward_passes_per_step != 1:
        yield (
            "backward_passes_per_step",
            "backward passes start no exchange. Accumulate gradients in the script, then call step()",
        )
    if options.gradient_predivide_factor != 1.0:
        yield "gradient_predivide_factor", "no gradients are exchanged. Remove it"
    if options.sparse_as_dense:
        yield "sparse_as_dense", "the optimizer receives sparse gradients unchanged. Remove it"
    if options.unused != "none":
        yield "unused", "p.grad stays this worker's own gradient. Remove it"
    memory = getattr(options.memory, "name", options.memory)
    if memory is not None and (not isinstance(memory, str) or memory.casefold() != "residual"):
        yield "memory", "residuals are always kept, and the optimizer applies the momentum. Remove it"
    if options.model is not None or getattr(options.merging, "name", options.merging) == "dear":
        yield "merging", "DeAR exchanges gradients of a backward pass. Use overlap=1 instead"


def _check_together(options: Options, carry: str) -> None:
    """Raise ``ValueError`` for options of this file that contradict each other, or the exchange."""
    two_level = options.exchange == topology.EXCHANGE
    if two_level and carry == APPLY:
        raise ValueError(
            "exchange='two-level' is not supported with carry='apply', because a rank selects from a shard of its "
            "node's values. Pass carry='hold'."
        )
    if two_level and options.fragments > 1:
        raise ValueError(
            "exchange='two-level' is not supported with fragments, because a node sums all parameters at once. Remove "
            "fragments=."
        )
    if options.fragments > options.every:
        raise ValueError(
            f"fragments={options.fragments} must not exceed every={options.every}, because each fragment is exchanged "
            "in a separate step"
        )
    gap = options.every // options.fragments
    if (options.overlap or 0) > gap:
        raise ValueError(
            f"overlap={options.overlap} must be at most {gap} steps (every={options.every} / "
            f"fragments={options.fragments}), because messages must arrive before the next ones are sent"
        )
    if carry == HOLD and options.overlap:
        raise ValueError(
            "overlap is not supported with carry='hold', because a worker would compute with parameters that lack its "
            "last steps. Pass carry='apply'."
        )
    if carry == APPLY and options.decay != 1.0:
        raise ValueError(
            "decay is not supported with carry='apply', because the carried values are part of the parameters. Pass "
            "carry='hold'."
        )


# The config of a step, record by record.


def resolve(options: Options) -> Config:
    """Check every option and return the config of a step.

    Raises ``ValueError`` or ``TypeError`` that says which option is wrong, and why. ``rates`` of the config are not
    set: they are the optimizer's, see :func:`agmerge.options.resolve.with_momentum_of`.
    """
    _check_choices(options)
    updates = parse_updates(options)
    guards, sync = _guards(options), _sync(options, updates)  # in this order: the first mistake of several is told
    compression = _compression(options, updates)
    if updates is not None:
        sync = replace(sync, updates=_fitting(updates, options.overlap, options.moments, compression.compressor))
    config = Config(compression=compression, merging=_merging(options, compression), sync=sync, guards=guards)
    _check_kept(config)
    check_custom(config)
    check_dear(config)
    _check_two_level(config)
    check_send_mode(config)
    return config


def _check_kept(config: Config) -> None:
    """Raise ``ValueError`` where infinities and NaN shall be kept, and messages or residuals cannot have them."""
    if config.guards.nonfinite == KEEP and (config.compression.compressor.name != "none" or config.sync.updates):
        raise ValueError(
            "nonfinite='keep' requires compression='none', because other messages and residuals cannot represent "
            "infinities and NaN. Pass compression='none', or nonfinite='skip'."
        )


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
    check_choice("diverged", options.diverged, ("raise", "warn"))
    return Guards(
        scaled=scaled, nonfinite=nonfinite, timeout=float(timeout), check_every=check_every,
        warns=options.diverged == "warn",
    )  # fmt: skip


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
    if wire in VALUES and not VALUES[wire].has_zero and EXCHANGES[options.exchange].sends_zeros:
        raise ValueError(
            f"wire={wire!r} is not supported with exchange={options.exchange!r}, because it cannot encode zeros. "
            "Use another wire, or exchange='sparse', 'oktopk', 'two-level' or 'auto'."
        )
    rule, patterns_of_dense, cutoff = parse_dense(options, compressor, density)
    warmup = compressors.parse_warmup(options.warmup, bool(patterns))
    return Compression(
        compressor=compressor,
        memory=memory_for(options.memory, compressor) if updates is None else updates.memory_for(compressor),
        density=DensityPolicy(compressor.density, patterns, by_importance, warmup),
        wire=wire_of(options, compressor),
        dense=rule,
        partial=cutoff,
        patterns=patterns_of_dense,
    )


def _merging(options: Options, compression: Compression) -> Merging:
    """Return which gradients share a message, and how messages are exchanged."""
    if Kind.CUSTOM in compression.compressor.kinds and options.merging == MERGING and options.groups is None:
        options = replace(options, merging="threshold")  # made-up gradients, to be timed, would change its memory
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
    name = op.value if isinstance(op, ReduceOp) else process_sets.horovod_reduction(op)
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


# Preparation, the same for every wrapper: checks, decisions, and the config. An option that is None has not been given,
# so nothing can disagree with it.

KEPT = (
    "AGM707: compression={name!r} uses memory='residual' with {optimizer}, because memory={memory!r} cannot apply the "
    "momentum of {optimizer}. Pass memory='residual' to silence this warning."
)


class Prepared(NamedTuple):
    """Checked options of a script, and what a step needs of them."""

    options: Options  # with the compressor, its density and the memory decided; others as the script gave them
    config: Config


def prepare(options: Options, optimizer: torch.optim.Optimizer | None, *, are_new: bool = True) -> Prepared:
    """Check the options of a script, decide the open ones, and return them with the config of a step.

    All wrappers call this, so that the first mistake of several is the same on each of them. Raises ``ValueError`` or
    ``TypeError``. Nothing communicates.

    Args:
        options: as the script gave them, or those in use.
        optimizer: the one that steps; None: it is not known.
        are_new: the script has just given them; those in use may have some of an earlier compressor.
    """
    if are_new:
        check_meaning(options.compression, vars(options))
        _check_agreement(options.compression, options.density, options.rank)
    if options.sync == UPDATES and optimizer is not None:
        _check_outer(options.outer, optimizer)
    options = replace(options, process_set=process_sets.by_ranks(options.process_set))  # torch's groups do not pickle
    decided = {"compression": resolve_auto(options, optimizer), **defaults.schedule_of(options)}
    return _decided(replace(options, **decided), optimizer)


def prepare_change(
    options: Options,
    optimizer: torch.optim.Optimizer | None,
    compression: Any,
    given: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Prepared:
    """Return the options, and the config, of a wrapper that compresses otherwise from now on.

    Args:
        options: those in use.
        optimizer: which ``compression="auto"`` goes by; None: it is not known.
        compression: as the constructor takes it.
        given: ``density``, ``rank``, ``memory`` and ``warmup``; a density or rank that is None is the one in use.
        own: options of the compressor, by name.
    """
    asked = replace(Options(), sync=options.sync, exchange=options.exchange, compression=compression, **given)
    _check_agreement(asked.compression, asked.density, asked.rank)
    compression = resolve_auto(asked, optimizer)  # earlier options do not count
    check_meaning(compression, {name: getattr(asked, name) for name in ("density", "rank", "warmup")})
    density = options.density if asked.density is None else asked.density
    rank = options.rank if asked.rank is None else asked.rank
    if own and not isinstance(compression, str):
        raise TypeError(
            f"{', '.join(own)}: options of a compressor require the compressor's name, got compression={compression!r}"
        )
    if own:
        compression = named(compression, DENSITY if density == IMPORTANCE else density, rank, **own)
    density = density if density == IMPORTANCE else defaults.own_density(compression) or density
    if own or asked.rank is None:
        rank = next((part.rank for part in defaults.objects(compression) if part.rank is not None), rank)
    said = {"memory": asked.memory, "warmup": asked.warmup, "density": density, "rank": rank}
    return _decided(replace(options, compression=compression, **said), optimizer)


def _decided(options: Options, optimizer: torch.optim.Optimizer | None) -> Prepared:
    """Return options of which the compression is decided, with density and memory decided too, and their config."""
    options = replace(options, density=defaults.density_of(options), memory=memory_beside(options, optimizer))
    return Prepared(options, with_momentum_of(resolve(options), optimizer))


def with_momentum_of(config: Config, optimizer: torch.optim.Optimizer | None, groups: Any = None) -> Config:
    """Return ``config`` with the momentum of this optimizer's groups, where its memory applies that.

    ``optimizer``: None: it is not known. ``groups``: those that the optimizer is about to load; None:
    its own. Raises as :func:`agmerge.options.momentum.rates` does.
    """
    return config.changed(rates=momentum.rates(optimizer, config.compression.memory, groups))


def _check_agreement(compression: Any, density: Any, rank: Any) -> None:
    """Raise ``ValueError`` if a density or a rank was given (not None) that is not that of a compressor object.

    ``compression``: as the script gives it. ``density="importance"`` goes around the object's own.
    """
    for part in defaults.objects(compression):
        if part.selects and density is not None and density not in (IMPORTANCE, part.density):
            if isinstance(density, dict):
                raise ValueError(
                    f"density={density!r} requires a compressor's name or a single density, got "
                    f"compression={compression!r}"
                )
            raise ValueError(
                f"density={density!r} and compression={compression!r} disagree. Pass the density to the compressor "
                "only."
            )
        if part.rank is not None and rank not in (None, part.rank):
            raise ValueError(f"rank={rank!r} and compression={compression!r} disagree. Pass the rank to one of them.")


def _check_outer(outer: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``TypeError`` if a script's ``outer=`` does not make an optimizer: it is asked once, of the parameters."""
    if not callable(outer) or type(outer).__module__.partition(".")[0] == "agmerge":
        return  # no function is refused later; ours makes one
    made = outer([p.detach() for group in optimizer.param_groups for p in group["params"] if p.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"outer={outer!r} returned {made!r}, expected a torch.optim.Optimizer")


def memory_beside(options: Options, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the memory that the script asks for; where it asks for none, one that goes with the optimizer.

    That is None, the compressor's own, unless this applies momentum, and the optimizer has one that it cannot apply in
    the optimizer's place. Then it is ``"residual"``, and rank 0 says so.
    """
    if options.memory is not None or options.sync == UPDATES or optimizer is None:
        return options.memory
    named = isinstance(options.compression, str) and catalogue.is_sparsifier(options.compression)
    if not named and not defaults.objects(options.compression):
        return None
    compressor = compressor_of(options.compression, DENSITY, options.rank)
    memory = sparsifiers.memory(compressor.memory)
    if not memory.has_momentum or compressor.kinds != {Kind.SPARSE}:  # beside factors it is refused, by name
        return None
    try:
        momentum.rates(optimizer, memory)
    except ValueError:
        if workers.is_initialized():
            text = KEPT.format(name=compressor.name, optimizer=type(optimizer).__name__, memory=memory.name)
            warn(text, workers.rank())
        return "residual"
    return None
