"""Check the options of ``sync="updates"``: the optimizer's updates of parameters are exchanged, not gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

import merging
import sparsifiers
from agmerge.backends import topology
from agmerge.backends.handshake import Fact
from agmerge.ops import Average
from agmerge.options.arguments import Options
from agmerge.options.density_policy import DENSITY
from merging.planners.papers.dear import DeAR
from sparsifiers.memories import Decaying, HandBack, NoMemory, Residual

GRADIENTS, UPDATES = SYNCS = ("gradients", "updates")
APPLY, HOLD = CARRIES = ("apply", "hold")
DENSITY_OF_UPDATES = 0.05  # the default, see docs/parity.md
WIRE_OF_UPDATES = "sign"  # the default where an exchange has one
SENT_AS_THEY_ARE = ("oktopk", "masked")  # exchanges that send values as they are, unless a codec is asked for

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

# Options of sync="updates" alone, with their neutral values.
_OWN = {"carry": ("apply", None), "every": (1,), "fragments": (1,), "overlap": (0,), "decay": (1.0,), "outer": (None,)}


@dataclass(frozen=True, kw_only=True)
class Updates:
    """Options of an exchange of updates: its schedule, the residual, and the outer optimizer."""

    carry: str  # "apply": the residual stays in this worker's parameters; "hold": beside the shared parameters
    every: int  # steps from one exchange of a parameter to the next
    fragments: int  # the merge buffers take turns, in so many groups
    overlap: int  # steps between sending and receiving
    decay: float  # of residuals, from one exchange to the next
    outer: Outer | None  # makes the optimizer that steps with the combined updates; None: they are taken as they are

    def fragment_at(self, step: int) -> int | None:
        """Return the number of the fragment that is exchanged after step ``step`` (1, 2, ...); None: none is."""
        phase = step % self.every
        return next((f for f in range(self.fragments) if f * self.every // self.fragments == phase), None)

    def merge_buffers_of(self, fragment: int) -> Callable[[int], Collection[int]] | None:
        """Return which merge buffers, of so many, are in a fragment; None: all are."""
        if self.fragments == 1:
            return None
        return lambda count: {buffer for buffer in range(count) if buffer * self.fragments // count == fragment}

    def memory_for(self, compressor: sparsifiers.Compressor, *, narrow: bool = False) -> sparsifiers.Memory:
        """Return the memory of the residuals of ``compressor``.

        With "apply" the parameters hold them, unless they are ``narrow``, of 16 bits: these could not.
        """
        if compressor.memory == "none":  # it drops nothing
            return NoMemory()
        if self.carry == APPLY:
            return Residual() if narrow else HandBack()
        return Residual() if self.decay == 1.0 else Decaying(self.decay)

    def facts(self) -> Iterator[Fact]:
        """Yield the facts that must be the same on every rank."""
        yield "carry", self.carry
        yield "every", str(self.every)
        yield "fragments", str(self.fragments)
        yield "overlap", str(self.overlap)
        yield "decay", str(self.decay)
        # Without addresses, which differ from process to process.
        yield "outer", re.sub(r" at 0x[0-9a-fA-F]+", "", str(getattr(self.outer, "__qualname__", repr(self.outer))))


def density_of(options: Options) -> Any:
    """Return the density that is asked for, that of a compressor object, or the default one."""
    if options.density is not None:
        return options.density
    own = own_density(options.compression)
    return default_density(options) if own is None else own


def own_density(compression: Any) -> float | None:
    """Return the density of a sparsifier that a script gives as an object, by pattern too; None where it gives none."""
    parts = compression.values() if isinstance(compression, Mapping) else [compression]
    for part in parts:
        if isinstance(part, sparsifiers.Compressor) and part.selects:
            return float(getattr(part, "density", DENSITY))
    return None


def default_density(options: Options) -> float:
    """Return the density where the script gives none."""
    return DENSITY_OF_UPDATES if options.sync == UPDATES else DENSITY


def wire_of(options: Options, compressor: sparsifiers.Compressor) -> str:
    """Return the value codec that is asked for, or the default one: of updates where an exchange has codecs signs."""
    codecs = compressor.kinds == {sparsifiers.Kind.SPARSE} and options.exchange not in SENT_AS_THEY_ARE
    return WIRE_OF_UPDATES if options.sync == UPDATES and options.wire == "auto" and codecs else options.wire


def parse_updates(options: Options) -> Updates | None:
    """Return how updates are exchanged; None with ``sync="gradients"``.

    Raises ``ValueError`` or ``TypeError`` for options without meaning, by themselves or with others.
    """
    if options.sync not in SYNCS:
        raise ValueError(f"sync={options.sync!r} is unknown; choose from: {', '.join(map(repr, SYNCS))}")
    if options.sync == GRADIENTS:
        for name, usual in _OWN.items():
            if getattr(options, name) not in usual:
                raise ValueError(
                    f"{name}={getattr(options, name)!r} is about sync='updates': pass that, or leave it out"
                )
        return None
    for name, problem in _refused(options):
        raise ValueError(f"{name}={getattr(options, name)!r} and sync='updates': {problem}")
    carry = APPLY if options.carry is None else options.carry
    if carry not in CARRIES:
        raise ValueError(f"carry={carry!r} is unknown; choose from: {', '.join(map(repr, CARRIES))}")
    for name, least in (("every", 1), ("fragments", 1), ("overlap", 0)):
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number >= {least}")
    if isinstance(options.decay, bool) or not isinstance(options.decay, Real) or not 0.0 < options.decay <= 1.0:
        raise ValueError(f"decay={options.decay!r}: give a number in (0, 1]")
    if options.outer is not None and not callable(options.outer):
        raise TypeError(
            f"outer={options.outer!r}: give agmerge.Nesterov(), or a function of a list of parameters that returns a "
            "torch.optim.Optimizer of them"
        )
    _check_together(options, carry)
    return Updates(
        carry=carry,
        every=options.every,
        fragments=options.fragments,
        overlap=options.overlap,
        decay=float(options.decay),
        outer=options.outer,
    )


def _refused(options: Options) -> Iterable[tuple[str, str]]:
    """Yield the options that mean nothing where no gradient is exchanged, each with the reason."""
    if options.op is not Average and getattr(options.op, "value", options.op) != Average.value:
        yield "op", "the ways that workers have made are averaged; their sum would be that many steps at once"
    if options.backward_passes_per_step != 1:
        yield "backward_passes_per_step", "no exchange hangs on a backward pass: accumulate in the script, then step()"
    if options.gradient_predivide_factor != 1.0:
        yield "gradient_predivide_factor", "no gradients are added up; leave it out"
    if options.sparse_as_dense:
        yield "sparse_as_dense", "the optimizer takes gradients as they are, sparse ones too; leave it out"
    if options.unused != "none":
        yield "unused", "p.grad stays this worker's own; leave it out"
    memory = getattr(options.memory, "name", options.memory)
    if memory is not None and (not isinstance(memory, str) or memory.casefold() != "residual"):
        yield "memory", "what is not sent is always kept, and momentum is the optimizer's; leave it out"
    if options.model is not None or isinstance(options.merging, DeAR) or options.merging == DeAR.name:
        yield "merging", "DeAR is about gradients that come in a backward pass; use overlap=1 instead"


def _check_together(options: Options, carry: str) -> None:
    """Raise ``ValueError`` for options of this file that contradict each other, or the exchange."""
    two_level = options.exchange == topology.EXCHANGE
    if two_level and carry == APPLY:
        raise ValueError(
            "exchange='two-level' and carry='apply': a rank selects from a shard of what its node has in common, so "
            "its own parameters cannot hold the rest; pass carry='hold'"
        )
    if two_level and options.fragments > 1:
        raise ValueError("exchange='two-level' and fragments: a node adds up everything at once; leave fragments out")
    if options.fragments > options.every:
        raise ValueError(
            f"fragments={options.fragments} and every={options.every}: each fragment takes a step of its own, so "
            "there cannot be more of them than steps"
        )
    gap = options.every // options.fragments
    if options.overlap > gap:
        raise ValueError(
            f"overlap={options.overlap}: the next messages leave after {gap} steps, every={options.every} / "
            f"fragments={options.fragments}, and these must have arrived by then"
        )
    if carry == HOLD and options.overlap:
        raise ValueError(
            "overlap and carry='hold': a worker would compute with parameters that lack its own last steps; pass "
            "carry='apply'"
        )
    if carry == APPLY and options.decay != 1.0:
        raise ValueError("decay and carry='apply': what is carried is part of the parameters; pass carry='hold'")


def planner_for(updates: Updates, planner: merging.Planner | None, numel: int) -> merging.Planner | None:
    """Return the planner: where merge buffers take turns one by size, of about as many buffers as fragments.

    ``numel``: elements of all parameters. A planner without times stays.
    """
    if updates.fragments == 1 or planner is None or not planner.timed:
        return planner
    return merging.get("threshold", bytes=max(1, 4 * numel // updates.fragments))
