"""Check every argument of :class:`agmerge.DistributedOptimizer`, and resolve it.

Mistakes and combinations without meaning are refused here; nothing is accepted and ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

import merging
import sparsifiers
from agmerge.backends import timeouts
from agmerge.exchanges.routing import AHEAD
from agmerge.exchanges.splitting import why_parts_impossible
from agmerge.ops import Average, ReduceOp
from agmerge.options import dense_cutoff
from agmerge.options import density_schedule as schedules
from agmerge.options.compressors import DENSITY, compressor_of, densities_of, memory_for
from agmerge.options.config import AUTO, EXCHANGES, IMPORTANCE, MERGING, WIRES, Config, DenseRule, is_small
from agmerge.options.groups import checked as checked_groups
from agmerge.runtime import horovod_names, process_sets
from agmerge.tensors.nonfinite import POLICIES, RAISE, SKIP
from merging.planners.dear import DeAR


def resolve(
    *,
    compression: Any,
    density: Any,
    memory: Any,
    dense: Any,
    merging: Any,
    sparsify: str,
    exchange: str,
    wire: str,
    wire_check: str,
    dense_sum: str,
    op: Any,
    backward_passes_per_step: Any,
    gradient_predivide_factor: float,
    sparse_as_dense: bool,
    timeout: float | None,
    check_every: int,
    unused: str,
    groups: Any,
    num_groups: Any,
    process_set: Any,
    warmup: Any,
    model: Any,
    scaler: Any,
    nonfinite: Any,
) -> Config:
    """Check every argument; raises ``ValueError`` or ``TypeError`` that says which and why."""
    _choice("sparsify", sparsify, ("auto", "ahead", "behind"))
    _choice("exchange", exchange, EXCHANGES, hint=_DENSE_HINT)
    _choice("wire", wire, WIRES)
    _choice("wire_check", wire_check, ("payload", "header"), later=("none",))
    _choice("dense_sum", dense_sum, ("native", "ordered"))
    _choice("unused", unused, ("none", "zero"))
    scaled = _scales(scaler)
    nonfinite = (SKIP if scaled else RAISE) if nonfinite is None else nonfinite
    _choice("nonfinite", nonfinite, POLICIES)
    op = _reduction(op)
    check_passes(backward_passes_per_step)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor must be > 0, not {gradient_predivide_factor!r}")
    timeout = timeouts.default() if timeout is None else timeout
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a number of seconds > 0, not {timeout!r}")
    if not isinstance(check_every, int) or check_every < 0:
        raise ValueError(f"check_every must be a number of steps (0: never), not {check_every!r}")
    if isinstance(density, str) and density != IMPORTANCE:
        raise ValueError(f"density={density!r}: give a number, {{pattern: number}}, or {IMPORTANCE!r}")
    by_importance = density == IMPORTANCE
    densities = densities_of(density)
    sparsifier, cast = compressor_of(compression, DENSITY if densities or by_importance else density)
    if densities and isinstance(compression, sparsifiers.Sparsifier):
        raise ValueError(f"density={density!r} and compression={compression!r}: give a name, or one density")
    if wire != "auto" and exchange in ("oktopk", "masked"):
        raise ValueError(
            f"wire={wire!r}: exchange={exchange!r} sends values in the gradient's dtype; leave wire out, or take "
            "exchange='sparse', 'two-level' or 'auto'"
        )
    rule = dense_cutoff.checked(dense, sparsifier, compression, density, warmup)
    planner, plan = _planner(merging, sparsify, exchange)
    chosen = checked_groups(groups, num_groups)
    if chosen is not None and merging != MERGING:
        raise ValueError(f"merging={merging!r} and groups both say which gradients share a message; give one of them")
    return Config(
        sparsifier=sparsifier,
        sparsify=sparsify,
        exchange=exchange,
        wire=wire,
        checks_payload=wire_check == "payload",
        cast=cast,
        memory=memory_for(memory, sparsifier, cast),
        densities=densities,
        importance=by_importance,
        warmup=schedules.checked(warmup, bool(densities)),
        planner=planner,
        plan=plan,
        groups=chosen,
        process_set=process_sets.parse_process_set(process_set),
        dense=is_small if rule is not None else _dense_rule(dense),
        partial=rule,
        patterns=() if dense is None or rule is not None or callable(dense) else tuple(map(re.compile, dense)),
        op=op,
        passes=backward_passes_per_step,
        predivide=float(gradient_predivide_factor),
        sparse_as_dense=bool(sparse_as_dense),
        ordered=dense_sum == "ordered",
        timeout=float(timeout),
        check_every=check_every,
        zero_unused=unused == "zero",
        nonfinite=nonfinite,
        scaled=scaled,
        model=_model(model, planner, sparsifier, scaled),
    )


_DENSE_HINT = {"dense": "a dense exchange sends every element; ask for it with compression='none'"}


def _choice(
    name: str, value: Any, allowed: tuple[str, ...], later: tuple[str, ...] = (), hint: dict[str, str] | None = None
) -> None:
    if value in allowed:
        return
    if value in (hint or {}):
        raise ValueError(f"{name}={value!r}: {(hint or {})[value]}")
    why = "is not built yet" if value in later else "is unknown"
    raise ValueError(f"{name}={value!r} {why}; choose from: {', '.join(map(repr, allowed))}")


def _reduction(op: Any) -> ReduceOp:
    """``op`` as ours, also where the script says it with a constant of Horovod's."""
    name = op.value if isinstance(op, ReduceOp) else horovod_names.reduction(op)
    if name in ("average", "sum"):
        return ReduceOp(name)
    raise ValueError(
        f"op must be agmerge.Average or agmerge.Sum, not {name or repr(op)}: what is not sent now is sent later, "
        "and with minima, maxima, products or Adasum that would be another update"
    )


def check_passes(passes: Any) -> None:
    """Raise ``ValueError`` unless this is a number of backward passes that a step may have."""
    if not isinstance(passes, int) or isinstance(passes, bool):
        raise ValueError(f"backward_passes_per_step must be a whole number > 0, not {passes!r}")
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")


def _planner(given: Any, sparsify: str, exchange: str) -> tuple[merging.Planner | None, merging.Plan | None]:
    if isinstance(given, str) and not given.endswith(".json"):
        given = merging.get(given)
    if isinstance(given, merging.Planner):
        return given, None
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
        given = merging.Plan.load(given)
    if isinstance(given, merging.Plan):
        if set(given.labels) - {"", AHEAD}:
            raise ValueError(f"merging: this plan has labels other than {AHEAD!r}, and none is known")
        if any(given.dense) and exchange != AUTO:
            raise ValueError(f"merging: this plan has dense merge buffers, and exchange={exchange!r}: pass {AUTO!r}")
        if sparsify == "behind" and any(given.labels):
            raise ValueError("sparsify='behind', and merging is a plan made to sparsify ahead; leave one of them out")
        if sparsify == AHEAD:
            given = replace(given, labels=(AHEAD,) * len(given.counts))
        if problem := why_parts_impossible(given):
            raise ValueError(f"merging: {problem}")
        return None, given
    names = ", ".join(merging.names())
    raise TypeError(f"merging={given!r}: give a planner's name ({names}), a planner, or a saved plan")


def _model(
    model: Any, planner: merging.Planner | None, sparsifier: sparsifiers.Sparsifier | None, scaled: bool
) -> torch.nn.Module | None:
    """The model of ``merging="dear"``, which needs one; no other merging takes one."""
    dear = isinstance(planner, DeAR)
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={model!r}: give the torch.nn.Module whose forward uses the parameters")
    if not dear and model is not None:
        raise ValueError("model= is taken by merging='dear' alone; a use with others is not built yet, leave it out")
    if dear and model is None:
        raise ValueError("merging='dear' applies updates in the next forward: pass model=, the module that you call")
    if dear and scaled:
        raise ValueError(
            "merging='dear' has its updates in the next forward only, where scaler.step() cannot see them: train "
            "in bfloat16, without scaler=, or use another merging"
        )
    if dear and sparsifier is not None:
        raise ValueError(
            f"merging='dear' halves an all-reduce, and what {sparsifier!r} selects travels by all-gather: pass "
            "compression='none', 'fp16' or 'bf16', or use another merging"
        )
    return model


def _dense_rule(dense: Any) -> DenseRule:
    if dense is None:
        return is_small
    if callable(dense):
        return lambda name, parameter: bool(dense(name, parameter))
    if isinstance(dense, str) or not isinstance(dense, Iterable):
        raise TypeError(
            f"dense={dense!r}: give a list of patterns for whole names, a callable (name, parameter) -> bool, or "
            f"{dense_cutoff.NAME!r}"
        )
    patterns = [re.compile(pattern) for pattern in dense]
    return lambda name, parameter: any(pattern.fullmatch(name) for pattern in patterns)


def _scales(scaler: Any) -> bool:
    """Whether there is a scaler that scales. ``TypeError`` for what is no ``torch.amp.GradScaler``."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler={scaler!r}: give the torch.amp.GradScaler whose scale() the loss goes through")
    return scaler is not None and scaler.is_enabled()
