"""What a step needs to know: the arguments of :class:`agmerge.DistributedOptimizer`, resolved.

``resolve`` makes a :class:`Config` out of the arguments; here is what can be asked of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import merging
import sparsifiers
from agmerge.backends import topology
from agmerge.backends.handshake import Fact
from agmerge.exchanges.message import VALUES
from agmerge.ops import ReduceOp
from agmerge.options import dense_cutoff, momentum
from agmerge.options import density_schedule as schedules
from agmerge.options.compressors import CASTS, DENSITY
from agmerge.options.groups import Groups
from agmerge.runtime import process_sets
from agmerge.tensors.parameters import ParameterInfo

MERGING = "agmerge"  # the default planner
IMPORTANCE = "importance"
AUTO = "auto"
TWO_LEVEL = topology.EXCHANGE
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
    planner: merging.Planner | None
    plan: merging.Plan | None
    groups: Groups | None  # plans by themselves; the planner is then not asked
    process_set: process_sets.Chosen
    dense: DenseRule
    partial: dense_cutoff.DenseCutoff | None  # dense="partial": `dense` is what goes dense whatever the cut
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

    def lanes(self, members: Iterable[ParameterInfo]) -> list[ParameterInfo]:
        """The members, each with its lane. A rule of the script's own is asked once, here."""
        members = list(members)
        if self.partial is not None and self.sparsifier is not None:
            return dense_cutoff.place(members, self.partial, self.sparsifier.density, self.dense)
        found = []
        for member in members:
            sparse = self.sparsifier is not None and not self.dense(member.name, member.parameter)
            found.append(replace(member, sparse=sparse, density=self.density_of(member.name, sparse)))
        return found

    def opened(self, members: Sequence[ParameterInfo], *, tells: bool) -> Config:
        """This, as it holds once a session of ``members`` is open. ``tells``: this rank says what is to be said."""
        if self.partial is None or self.sparsifier is None:
            return self
        rule = dense_cutoff.opened(members, self.partial, self.sparsifier.density, self.dense, tells=tells)
        return replace(self, partial=rule)

    def check(self, member: ParameterInfo) -> None:
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


def followed(config: Config, optimizer: torch.optim.Optimizer, groups: Any = None) -> Config:
    """``config`` as it is with this optimizer: see :func:`agmerge.options.momentum.rates`, and what that raises."""
    return replace(config, rates=momentum.rates(optimizer, config.memory, groups))


def check_two_level(config: Config) -> None:
    """Raise ``ValueError`` for what has no meaning where a rank holds a shard of every tensor."""
    if config.exchange != TWO_LEVEL:
        return
    if config.model is not None:
        raise ValueError("exchange='two-level' and merging='dear' both cut a step in two; give one of them")
    if config.importance:
        raise ValueError(
            "exchange='two-level' and density='importance': the energy of a tensor lies on several ranks, and is not "
            "added up yet; give a number or {pattern: number}"
        )
    if config.memory.options().get("clipping") is not None:
        raise ValueError(
            f"exchange='two-level' and {config.memory!r}: clipping goes by the norm of a tensor; a rank has a shard "
            "of it; clip in the script, after synchronize()"
        )


def is_small(name: str, parameter: torch.Tensor) -> bool:
    """The default ``dense`` rule: fewer than two dimensions (biases, norms), or fewer than 1024 elements."""
    return parameter.dim() < 2 or parameter.numel() < SMALL
