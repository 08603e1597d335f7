# SPDX-License-Identifier: Apache-2.0
"""Arguments turned into objects: what is compressed, by which compressor, how much is sent, in which merge buffers."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

import merging
import sparsifiers
from agmerge.errors import warn
from agmerge.exchanges.routing import AHEAD, OWN, send_mode, why_labels_are_wrong, why_parts_impossible, with_send_mode
from agmerge.ops import Compression
from agmerge.options import published
from agmerge.options.typed import Options, is_whole
from agmerge.runtime import process_sets, workers
from agmerge.step.config import AUTO, FASTEST, TWO_LEVEL, Config, DenseRule, Groups, is_small, never
from agmerge.step.density_policy import NAME, DenseCutoff, Schedule
from sparsifiers import Kind, catalogue
from sparsifiers.name_patterns import compiled

# ``dense=``: which parameters are always sent uncompressed, or, as ``"partial"``, up to which size.

Patterns = tuple[re.Pattern[str], ...]


def parse_dense(
    options: Options, compressor: sparsifiers.Compressor, density: Any
) -> tuple[DenseRule, Patterns, DenseCutoff | None]:
    """Return the rule for parameters that are always sent uncompressed, its patterns, and where ``"partial"`` starts.

    ``compressor`` and ``density``: those of the options. Raises ``TypeError`` for anything but a rule, ``ValueError``
    for what is no pattern, and for ``"partial"`` beside options with which it has no meaning.
    """
    dense = options.dense
    if isinstance(dense, str) and dense == NAME:
        return is_small, (), _cutoff(options, compressor, density)
    if dense is None:  # a class of the script's own gets every parameter
        return (never if compressor.kinds == {Kind.CUSTOM} else is_small), (), None
    if callable(dense):
        return lambda name, parameter: bool(dense(name, parameter)), (), None
    if isinstance(dense, str) or not isinstance(dense, Iterable):
        raise TypeError(
            f"dense={dense!r}: expected a list of patterns for full parameter names, a callable (name, parameter) -> "
            f"bool, or {NAME!r}"
        )
    patterns = _patterns(dense)
    return lambda name, parameter: any(pattern.fullmatch(name) for pattern in patterns), patterns, None


def _cutoff(options: Options, compressor: sparsifiers.Compressor, density: Any) -> DenseCutoff:
    """Return the cutoff that ``dense="partial"`` starts with; ``ValueError`` for options without meaning beside it."""
    if compressor.kinds != {Kind.SPARSE}:
        how = "factors are sent" if Kind.LOW_RANK in compressor.kinds else "every element is sent"
        raise ValueError(
            f"dense='partial' has no effect with compression={options.compression!r}: {how}. Remove dense=, or use a "
            "sparsifier."
        )
    if isinstance(density, (dict, str)):
        raise ValueError(
            f"dense='partial' is not supported with density={density!r}, because both set the size of each "
            "parameter's message. Pass one number as density."
        )
    if callable(options.warmup):
        raise ValueError(
            "dense='partial' is not supported with a callable warmup=, which returns one density for all parameters. "
            "Pass warmup='dgc' or a number of steps."
        )
    return DenseCutoff()


def _patterns(dense: Iterable[Any]) -> Patterns:
    """Return the patterns of ``dense=``; ``ValueError`` for anything else."""
    patterns = []
    for pattern in dense:
        try:
            patterns.append(compiled(pattern))
        except ValueError as error:
            raise ValueError(f"dense: {error}") from None
    return tuple(patterns)


# ``warmup=``: a density by step.

START = 0.25  # density at which every warm-up begins
RUNGS = (0.25, 0.0625, 0.015625, 0.004, 0.001)  # Lin et al., ICLR 2018, section 4.1
RUNG_STEPS = 200  # of "dgc", which does not know how long an epoch is


def ladder(steps: int) -> Callable[[int], float]:
    """Return the warm-up schedule of the DGC paper, for ``warmup=``.

    The density is 25, 6.25, 1.5625, 0.4 and then 0.1 %, where it stays.

    Args:
        steps (int): Number of steps at each density, for example the steps of one epoch.

    Raises:
        ValueError: For fewer than one step.
    """
    if not is_whole(steps, 1):
        raise ValueError(f"ladder: the steps of a rung must be a whole number of at least 1, got {steps!r}")
    return lambda step: RUNGS[min(step // steps, len(RUNGS) - 1)]


def parse_warmup(warmup: Any, by_pattern: bool) -> Schedule | None:
    """Return the schedule of ``warmup=``: ``None``, ``"dgc"``, a number of steps, or ``callable(step)``.

    ``by_pattern``: densities differ by parameter, so that a callable has no meaning. Raises ``ValueError`` for that and
    for anything else.
    """
    if warmup is None:
        return None
    if warmup == "dgc":
        rungs = ladder(RUNG_STEPS)
        last = RUNG_STEPS * len(RUNGS)
        return Schedule("dgc", lambda step, target: target if step >= last else max(target, rungs(step)))
    if is_whole(warmup, 1):
        return Schedule(str(warmup), lambda step, target: _geometric(step / warmup, target))
    if not callable(warmup):
        raise ValueError(
            f"warmup={warmup!r}: expected None, 'dgc', a number of steps > 0, or a callable step -> density"
        )
    if by_pattern:
        raise ValueError(
            "warmup= as a callable is not supported with density= by pattern. Pass a number as one of them."
        )
    schedule = Schedule("", lambda step, target: warmup(step))
    # Ranks cannot compare code, so they compare what it says.
    samples = ", ".join(f"{schedule(step, 1.0)!r} at {step}" for step in (0, 1, 10, 100, 1000))
    return Schedule(f"callable: {samples}", schedule.density)


def _geometric(part: float, target: float) -> float:
    """Return the density from START to ``target``, by a constant factor a step, as ``part`` goes from 0 to 1."""
    return target if part >= 1.0 or target >= START else START * (target / START) ** part


# ``merging=`` and ``groups=``: a planner, a plan, or groups of the script's own; and what goes with these.

NO_GROUPS = "groups should be a non-negative integer or a list of list of torch.Tensor."


def planner_or_plan(given: Any, sparsify: str, exchange: str) -> tuple[merging.Planner | None, merging.Plan | None]:
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
            raise ValueError(
                "merging: this plan has uncompressed merge buffers, which require exchange='auto', got "
                f"exchange={exchange!r}. Pass exchange={AUTO!r}."
            )
        if sparsify == "behind" and send_mode(given).ahead:
            raise ValueError(
                "sparsify='behind' is not supported with this plan, which was made for sparsify='ahead'. Remove one "
                "of them."
            )
        if sparsify == AHEAD:
            given = with_send_mode(given, ahead=True)
        if problem := why_parts_impossible(given):
            raise ValueError(f"merging: {problem}")
        return None, given
    names = ", ".join(merging.names())
    raise TypeError(f"merging={given!r}: expected a planner's name ({names}), a planner, or a saved plan")


def check_send_mode(config: Config) -> None:
    """Raise ``ValueError`` for a plan with a value codec or exchange that these options do not leave to a plan."""
    if config.merging.plan is None:
        return
    mode = send_mode(config.merging.plan)
    if mode.codec not in (OWN, config.compression.wire, *config.wires):
        raise ValueError(
            f"merging: this plan sends values as {mode.codec} with error feedback, but the options differ. Pass "
            f"wire={mode.codec!r}, or use another plan."
        )
    if mode.quantiser not in (OWN, config.compression.compressor.name, *config.quantisers):
        raise ValueError(
            f"merging: this plan sends in {mode.quantiser!r}, but compression is {config.compression.compressor!r}. "
            f"Pass compression={mode.quantiser!r} or 'auto', or use another plan."
        )
    if mode.exchange not in (OWN, config.merging.exchange, *config.exchanges):
        raise ValueError(
            f"merging: this plan uses exchange={mode.exchange!r}, but exchange={config.merging.exchange!r} is set. "
            f"Pass exchange={FASTEST!r} or {mode.exchange!r}, or use another plan."
        )


def check_custom(config: Config) -> None:
    """Raise ``ValueError`` for options that do not go with a compressor of the script's own class."""
    compressor = config.compression.compressor
    if Kind.CUSTOM not in compressor.kinds:
        return
    found = {
        "sync='updates'": (config.sync.updates is not None, "Its memory would keep updates. Remove sync="),
        f"exchange={TWO_LEVEL!r}": (config.merging.exchange == TWO_LEVEL, "A rank has shards there. Remove exchange="),
        "merging='dear'": (config.sync.model is not None, "DeAR requires an all-reduce. Use another merging"),
        f"merging={config.merging.planner}": (
            config.merging.groups is None and getattr(config.merging.planner, "timed", False),
            "To time messages, it would compress made-up gradients. Pass 'threshold', 'layerwise' or a plan",
        ),
        "gradient_predivide_factor=": (config.sync.predivide != 1.0, "Remove it"),
    }
    for what, (is_given, instead) in found.items():
        if is_given:
            raise ValueError(
                f"{what} is not supported with compression={compressor.name}, a class of your own: {instead}."
            )


def check_dear(config: Config) -> None:
    """Raise unless ``merging="dear"`` has the model that it needs, and no other merging has one.

    ``TypeError`` for a model that is no module, ``ValueError`` for options that do not go with DeAR.
    """
    model, dear = config.sync.model, "dear" in getattr(config.merging.planner, "modes", ())
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={model!r}: expected the torch.nn.Module whose forward uses the parameters")
    if not dear and model is not None:
        raise ValueError("model= is supported with merging='dear' only. Remove it.")
    if dear and model is None:
        raise ValueError(
            "merging='dear' requires model=, because it applies updates in the next forward pass. Pass the module "
            "that you call."
        )
    if dear and config.guards.scaled:
        raise ValueError(
            "merging='dear' is not supported with scaler=, because scaler.step() cannot see updates in the next "
            "forward pass. Train in bfloat16 without scaler=, or use another merging."
        )
    if dear and config.compression.compressor.compresses:
        how = (
            "{} sends selected values by all-gather"
            if config.compression.compressor.selects
            else "{} sends low-rank factors"
        )
        raise ValueError(
            f"merging='dear' requires an all-reduce, but {how.format(repr(config.compression.compressor))}. Pass "
            "compression='none', 'fp16' or 'bf16', or use another merging."
        )


def parse_groups(groups: Any, num_groups: Any) -> Groups | None:
    """Return the groups that both arguments ask for as Horovod means them, None for none.

    Raises ``ValueError``, with Horovod's texts, as Horovod does. Warns of ``num_groups``, its old name.
    """
    if not is_whole(num_groups, 0):
        raise ValueError(f"num_groups={num_groups!r}: {NO_GROUPS}")
    if num_groups:
        warnings.warn("AGM307: Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=8)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if is_whole(groups, 1):
        return Groups(number=groups)
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"{NO_GROUPS} Got {groups!r}.")
    listed = []
    for group in groups:
        if isinstance(group, torch.Tensor) or not isinstance(group, Iterable):
            raise ValueError(f"{NO_GROUPS} One of the groups is a {type(group).__name__}, not a list.")
        listed.append(tuple(group))
    seen: set[torch.Tensor] = set()
    for tensor in (tensor for group in listed for tensor in group):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"groups must consist of torch.Tensor. One of them is {tensor!r}.")
        if tensor in seen:
            raise ValueError(
                f"A parameter can only appear once in groups. A parameter of shape {list(tensor.shape)} appears twice."
            )
        seen.add(tensor)
    return Groups(listed=tuple(listed))


# ``compression=``, ``memory=`` and ``density=``.

DENSE = (
    "AGM704: compression=Compression.none sends uncompressed gradients, as in Horovod. To compress, remove it or set "
    "a compressor such as compression='topk'. Pass compression='none' to silence this warning."
)
CASTS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Cast(sparsifiers.Compressor):
    """Compressor that sends every element, in the gradient's own dtype ("none") or cast to 16 bits ("fp16", "bf16")."""

    kind = sparsifiers.Kind.DENSE

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = CASTS[name]  # None: nothing is cast, and nothing lost
        self.memory = "none" if self.dtype is None else "residual"


def cast_name(compression: Any) -> str | None:
    """Return ``"none"``, ``"fp16"`` or ``"bf16"`` for a cast, in any form that is accepted; None for anything else."""
    if isinstance(compression, Compression):
        return compression.value
    own = published.cast(compression) if isinstance(compression, str) else None
    name = process_sets.horovod_compression(compression) or own
    return name if name in CASTS else None


def compressor_of(compression: Any, density: Any, rank: Any = None) -> sparsifiers.Compressor:
    """Return the compressor that is meant. Raises ``ValueError`` or ``TypeError``.

    Args:
        compression: a name, an object that is a compressor, or {pattern: one of these}.
        density: the one number that a sparsifier given by name gets; one that is an object has its own.
        rank: likewise, of a low-rank compressor: a number, {pattern: number}, or None, its own.
    """
    if rank is not None:
        sparsifiers.low_rank("powersgd", rank)  # checked also where it is not needed
    if isinstance(compression, Mapping):
        return _by_name(compression, density, rank)
    try:
        sparsifiers.budget(density, 1)  # checked also where it is not needed
    except ValueError as error:
        raise ValueError(f"density={density!r}: {error}") from None
    cast = cast_name(compression)
    if cast == "none" and not isinstance(compression, str) and workers.is_initialized():
        warn(DENSE, workers.rank())  # the object of a script that was Horovod's
    if cast is not None:
        return Cast(cast)
    if isinstance(compression, sparsifiers.Compressor):
        return compression
    if not isinstance(compression, str):
        raise TypeError(_why_no_compressor(compression))
    kinds = (catalogue.is_sparsifier, catalogue.is_low_rank, catalogue.is_quantiser)
    if not any(is_of(compression) for is_of in kinds):
        raise ValueError(unknown("compression", compression))
    return named(compression, density, rank)


def named(name: str, density: Any, rank: Any, **options: Any) -> sparsifiers.Compressor:
    """Return the compressor of this name, with options of its own. ``TypeError`` for one that it does not have."""
    if sparsifiers.is_low_rank(name):
        return sparsifiers.low_rank(name, **({} if rank is None else {"rank": rank}), **options)
    if sparsifiers.is_quantiser(name):
        return sparsifiers.quantiser(name, **options)
    return sparsifiers.get(name, density=density, **options)


def _by_name(parts: Mapping[Any, Any], density: Any, rank: Any) -> sparsifiers.Compressor:
    """Return the compressor of {pattern: compressor}. Raises as :func:`compressor_of` does."""
    if not parts:
        raise ValueError(
            "compression={}: expected a compressor's name, or at least one pattern that matches full parameter names"
        )
    made = [(pattern, compressor_of(part, density, rank)) for pattern, part in parts.items()]
    for pattern, part in made:
        if part.dtype is not None:
            raise ValueError(
                f"compression={{{pattern!r}: {part.name!r}}}: casts cannot be used in a pattern. Use 'none' to leave "
                "these parameters uncompressed, or wire= to send the selected values in 16 bits."
            )
    return sparsifiers.ByName(made)


def _why_no_compressor(given: Any) -> str:
    """Return why an object that is neither a name nor a compressor cannot be taken for one."""
    if hasattr(given, "compress") and hasattr(given, "decompress"):
        return (
            f"compression={given!r}: of Horovod's compressors, only none and fp16 are supported. Pass your own "
            "compressor as a sparsifiers.Sparsifier."
        )
    return (
        f"compression={given!r}: expected a name ({_names()}), {{pattern: name}}, a sparsifiers.Compressor, or "
        "agmerge.Compression.none | .fp16 | .bf16"
    )


def unknown(argument: str, name: str) -> str:
    """Return the error about an unknown compressor's name, with the known ones and the one that may be meant."""
    return f"{argument}={name!r} is unknown. Choose from: {_names()}{published.hint(published.COMPRESSION, name)}"


def _names() -> str:
    return f"{', '.join(sparsifiers.names())}, {_others()}"


def _others() -> str:
    """Return the names of compressors that are no sparsifiers."""
    return ", ".join((AUTO, *sparsifiers.quantisers(), *sparsifiers.low_rank_names(), *CASTS))


def memory_for(memory: Any, compressor: sparsifiers.Compressor) -> sparsifiers.Memory:
    """Return the memory that is asked for, or the compressor's own (``memory`` None).

    Raises ``ValueError`` or ``TypeError`` for one that does not fit.
    """
    memory = compressor.memory if memory is None else memory
    if Kind.CUSTOM in compressor.kinds and memory != "none":
        raise ValueError(
            f"memory={memory!r} is not supported with a compressor of your own. Pass its memory with it: "
            "agmerge.grace(compressor, memory)."
        )
    given = sparsifiers.memory(memory) if isinstance(memory, str) else memory
    if not isinstance(given, sparsifiers.Memory):
        raise TypeError(f"memory={memory!r}: expected a name or a sparsifiers.Memory")
    if given.has_momentum and compressor.kinds != {sparsifiers.Kind.SPARSE}:
        text = f"memory={memory!r} applies momentum to the values that a sparsifier selects. Use it with a sparsifier"
        if compressor.selects:
            text += " only: next to low-rank factors, in compression={pattern: name}, pass memory='residual'"
        raise ValueError(text)
    if not compressor.compresses and compressor.dtype is None and given.has_residual:
        raise ValueError(
            f"memory={memory!r} has no effect with compression='none', which leaves no residual. Remove memory=."
        )
    return given


def densities_of(density: Any) -> tuple[tuple[re.Pattern[str], float], ...]:
    """Return densities by pattern for full names (regular expressions), in the order given; empty for a number.

    Raises ``ValueError`` for an empty dict, a pattern that is none, or a density outside (0, 1].
    """
    if not isinstance(density, dict):
        return ()
    if not density:
        raise ValueError("density={}: expected a number, or at least one pattern that matches full parameter names")
    patterns = []
    for pattern, value in density.items():
        try:
            sparsifiers.budget(value, 1)
            patterns.append((compiled(pattern), float(value)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"density={{{pattern!r}: {value!r}}}: {error}") from None
    return tuple(patterns)
