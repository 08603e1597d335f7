"""The arguments of :class:`agmerge.DistributedOptimizer`, checked and resolved.

Mistakes and combinations without meaning are refused here; nothing is accepted and ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import merging
import sparsifiers
from agmerge import deadline, partial, process_sets, scaling
from agmerge import warmup as schedules
from agmerge.backends import horovod
from agmerge.codecs import VALUES
from agmerge.groups import Groups
from agmerge.groups import checked as checked_groups
from agmerge.handshake import Fact
from agmerge.members import Member
from agmerge.nonfinite import POLICIES, RAISE, SKIP
from agmerge.ops import Average, ReduceOp
from agmerge.options import momentum
from agmerge.options.compression import CASTS, DENSITY, compressor_of, densities_of, memory_for
from agmerge.parts import refused
from agmerge.routing import AHEAD
from merging.dear import DeAR

MERGING = "agmerge"  # the default planner
IMPORTANCE = "importance"
AUTO = "auto"
EXCHANGES = (AUTO, "sparse", "oktopk", "masked", "two-level")
SMALL = 1024  # elements; a smaller tensor costs more to select from than to send
WIRES = ("auto", *VALUES)

DenseRule = Callable[[str, torch.Tensor], bool]


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a step needs to know. ``sparsifier`` None: every tensor is in the dense lane, cast to ``cast``."""

    sparsifier: sparsifiers.Sparsifier | None
    cast: torch.dtype | None
    memory: sparsifiers.Memory
    densities: tuple[tuple[re.Pattern[str], float], ...]  # by pattern, where the script gives them so
    importance: bool  # densities go by the energy of gradients, around the compressor's own
    warmup: schedules.Schedule | None
    sparsify: str
    exchange: str  # of the sparse lane
    wire: str  # the value codec of the sparse lane
    checks_payload: bool  # whether the checksum covers values and indices, not the header alone
    planner: merging.Planner | None
    plan: merging.Plan | None
    groups: Groups | None  # plans by themselves; the planner is then not asked
    process_set: process_sets.Chosen
    dense: DenseRule
    partial: partial.Partial | None  # dense="partial": `dense` is what goes dense whatever the cut
    patterns: tuple[re.Pattern[str], ...]  # those that `dense` was made from, if it was
    op: ReduceOp
    passes: int
    predivide: float
    sparse_as_dense: bool
    ordered: bool
    timeout: float
    check_every: int
    zero_unused: bool
    nonfinite: str  # what becomes of a step in which a rank has a gradient that is infinite or NaN
    scaled: bool  # by an attached GradScaler
    model: torch.nn.Module | None  # merging="dear": whose forward takes the updates
    rates: momentum.Rates | None = None  # where the memory takes the optimizer's momentum from, if it does

    def lanes(self, members: Iterable[Member]) -> list[Member]:
        """The members, each with its lane. A rule of the script's own is asked once, here."""
        members = list(members)
        if self.partial is not None and self.sparsifier is not None:
            return partial.place(members, self.partial, self.sparsifier.density, self.dense)
        found = []
        for member in members:
            sparse = self.sparsifier is not None and not self.dense(member.name, member.parameter)
            found.append(replace(member, sparse=sparse, density=self.density_of(member.name, sparse)))
        return found

    def opened(self, members: Sequence[Member], *, tells: bool) -> Config:
        """This, as it holds once a session of ``members`` is open. ``tells``: this rank says what is to be said."""
        if self.partial is None or self.sparsifier is None:
            return self
        rule = partial.opened(members, self.partial, self.sparsifier.density, self.dense, tells=tells)
        return replace(self, partial=rule)

    def check(self, member: Member) -> None:
        """Raise ``ValueError`` for a parameter whose gradient this compression cannot send."""
        if member.dtype.is_complex and (self.cast is not None or member.sparse):
            raise ValueError(
                f"parameter {member.name!r} is {member.dtype}: sparsifiers and casts are for real numbers; use "
                f"compression='none', send it whole (dense=), or hold it as torch.view_as_real()"
            )

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raise ``ValueError`` for a pattern that matches none of ``names``: a slip is not ignored."""
        known = list(names)
        given = {"dense": self.patterns, "density": [pattern for pattern, _ in self.densities]}
        for what, pattern in ((what, pattern) for what, patterns in given.items() for pattern in patterns):
            if not any(pattern.fullmatch(name) for name in known):
                raise ValueError(f"{what}: {pattern.pattern!r} matches no whole name; parameters: {', '.join(known)}")

    def density_of(self, name: str, sparse: bool) -> float | None:
        """The density of a parameter where it is given by pattern (the first that matches counts), else None."""
        if not sparse or not self.densities:
            return None
        return next((density for pattern, density in self.densities if pattern.fullmatch(name)), DENSITY)

    def density(self, of_lane: float | None, step: int) -> float:
        """What a lane sends in a step; ``of_lane`` None: the compressor's own density."""
        assert self.sparsifier is not None
        target = self.sparsifier.density if of_lane is None else of_lane
        return target if self.warmup is None else self.warmup(step, target)

    def memory_of(self, sparse: bool) -> sparsifiers.Memory:
        """The memory of a lane. What is sent whole leaves nothing to remember."""
        if self.sparsifier is not None:
            return self.memory if sparse else self.memory.of_dense()
        return self.memory

    @property
    def modes(self) -> tuple[str, ...]:
        """How planners may predict, the first until times are measured: where selection is, if there is any."""
        if self.sparsifier is None:
            return ("dense",)
        return ("behind", "ahead") if self.sparsify == "auto" else (self.sparsify,)

    @property
    def merging(self) -> str:
        """Where plans come from, as text."""
        if self.groups is not None:
            return "groups"  # which: said tensor by tensor
        return f"plan {self.plan.digest()}" if self.plan else repr(self.planner)

    @property
    def _momentum(self) -> str:
        if self.rates is not None:
            return "the optimizer's"
        return "the memory's" if self.memory.corrects else "None"

    @property
    def compressor(self) -> str:
        """Its canonical name."""
        cast = next(name for name, dtype in CASTS.items() if dtype == self.cast)
        return self.sparsifier.name if self.sparsifier is not None else cast

    def facts(self) -> list[Fact]:
        """What must be the same on every rank. ``backward_passes_per_step`` too: it decides what a step is."""
        return [
            ("compression", self.compressor),
            ("density", str(self.sparsifier.density if self.sparsifier else 1.0)),
            ("density by importance", str(self.importance)),
            ("dense='partial'", str(self.partial)),
            ("options", repr(self.sparsifier)),
            # "none" has one on those ranks that have loaded what is still to be sent; messages are the same.
            ("memory", repr(self.memory) if self.sparsifier or self.cast or self.memory.corrects else "None"),
            ("momentum before selection", self._momentum),
            ("warmup", self.warmup.text if self.warmup is not None else "None"),
            ("merging", self.merging),
            ("sparsify", self.sparsify),
            ("exchange", self.exchange),
            ("wire", self.wire),
            ("wire_check", "payload" if self.checks_payload else "header"),
            ("op", self.op.value),
            ("sparse_as_dense", str(self.sparse_as_dense)),
            ("backward_passes_per_step", str(self.passes)),
            ("gradient_predivide_factor", str(self.predivide)),
            ("dense_sum", "ordered" if self.ordered else "native"),
            ("check_every", str(self.check_every)),
            ("unused", "zero" if self.zero_unused else "none"),
            ("nonfinite", self.nonfinite),
            ("scaler", "attached" if self.scaled else "None"),
        ]


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
    scaled = scaling.enabled(scaler)
    nonfinite = (SKIP if scaled else RAISE) if nonfinite is None else nonfinite
    _choice("nonfinite", nonfinite, POLICIES)
    op = _reduction(op)
    check_passes(backward_passes_per_step)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor must be > 0, not {gradient_predivide_factor!r}")
    timeout = deadline.default() if timeout is None else timeout
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
    rule = partial.checked(dense, sparsifier, compression, density, warmup)
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
        process_set=process_sets.checked(process_set),
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
    name = op.value if isinstance(op, ReduceOp) else horovod.reduction(op)
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


def followed(config: Config, optimizer: torch.optim.Optimizer, groups: Any = None) -> Config:
    """``config`` as it is with this optimizer: see :func:`agmerge.options.momentum.rates`, and what that raises."""
    return replace(config, rates=momentum.rates(optimizer, config.memory, groups))


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
        if problem := refused(given):
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


def is_small(name: str, parameter: torch.Tensor) -> bool:
    """The default ``dense`` rule: fewer than two dimensions (biases, norms), or fewer than 1024 elements."""
    return parameter.dim() < 2 or parameter.numel() < SMALL


def _dense_rule(dense: Any) -> DenseRule:
    if dense is None:
        return is_small
    if callable(dense):
        return lambda name, parameter: bool(dense(name, parameter))
    if isinstance(dense, str) or not isinstance(dense, Iterable):
        raise TypeError(
            f"dense={dense!r}: give a list of patterns for whole names, a callable (name, parameter) -> bool, or "
            f"{partial.NAME!r}"
        )
    patterns = [re.compile(pattern) for pattern in dense]
    return lambda name, parameter: any(pattern.fullmatch(name) for pattern in patterns)
