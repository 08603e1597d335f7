# SPDX-License-Identifier: Apache-2.0
"""Options of a step: the arguments of :class:`agmerge.DistributedOptimizer`, resolved, in four records.

``options/`` checks them and makes a :class:`Config`. This file has what can be asked of one, and the treatment of each
parameter by it: dense, selected from, factorized or quantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

import merging
import sparsifiers
from agmerge.backends import topology
from agmerge.backends.base import Chosen
from agmerge.backends.handshake import Fact
from agmerge.exchanges.message import VALUES
from agmerge.exchanges.message.scaled import CHOICE, WHOLE
from agmerge.exchanges.routing import SUMS
from agmerge.exchanges.table import EXCHANGES
from agmerge.ops import ReduceOp
from agmerge.step import density_policy
from agmerge.step.density_policy import DensityPolicy
from agmerge.tensors.layout import Slot, TensorClass
from agmerge.tensors.nonfinite import SKIP
from agmerge.tensors.parameters import ParameterInfo, is_dtensor, why_not_exchangeable
from merging.timeline import LIMIT
from sparsifiers import Kind, Rate
from sparsifiers.memories import Decaying, HandBack, NoMemory, Residual
from sparsifiers.name_patterns import advice
from sparsifiers.quantising.base import NONE

# ``groups=``, as Horovod has it: the script decides which parameters share a message.


@dataclass(frozen=True)
class Groups:
    """Groups of parameters: ``number`` of equal size in the order of parameters, or as listed."""

    number: int = 0  # 0: they are listed
    listed: tuple[tuple[torch.Tensor, ...], ...] = ()  # parameters, group by group

    def by_name(self, members: Sequence[ParameterInfo]) -> list[list[str]]:
        """Return the groups as names. A parameter that is in no group is one by itself, one that is frozen in none.

        Raises ``ValueError`` for a listed parameter that needs a gradient and is not among ``members``.
        """
        if self.number:
            names = [member.name for member in members]
            size, more = divmod(len(names), self.number)
            ends = [group * size + min(group, more) for group in range(self.number + 1)]
            return [names[start:stop] for start, stop in zip(ends, ends[1:], strict=False) if start < stop]
        names_of = {member.parameter: member.name for member in members}
        for tensor in (tensor for group in self.listed for tensor in group):
            if tensor.requires_grad and tensor.numel() and tensor not in names_of:
                raise ValueError(
                    f"groups: a tensor of shape {list(tensor.shape)} is not a parameter of this optimizer. List only "
                    "its parameters."
                )
        groups = [[names_of[tensor] for tensor in group if tensor in names_of] for group in self.listed]
        grouped = {name for group in groups for name in group}
        return [group for group in groups if group] + [[name] for name in names_of.values() if name not in grouped]

    def plan(self, members: Sequence[ParameterInfo], order: Sequence[str]) -> merging.Plan:
        """Return one merge buffer a group, in the order in which groups are complete; ``order``: names by readiness.

        Raises ``ValueError`` for a group that is too large for one message.
        """
        position = {name: index for index, name in enumerate(order)}
        groups = [sorted(group, key=position.__getitem__) for group in self.by_name(members)]
        groups.sort(key=lambda group: position[group[-1]])
        numel = {member.name: member.local.numel() for member in members}
        for group in groups:
            if sum(numel[name] for name in group) >= LIMIT:
                raise ValueError(f"groups: the group of {group[0]!r} has 2**31 elements or more. Split it.")
        return merging.Plan(tuple(len(group) for group in groups), names=tuple(n for group in groups for n in group))


# ``sync="updates"``: the optimizer's updates of parameters are exchanged, not gradients.

GRADIENTS, UPDATES = SYNCS = ("gradients", "updates")
APPLY, HOLD = CARRIES = ("apply", "hold")
MEAN, OWN_MOMENTS = MOMENTS = ("mean", "own")
Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Updates:
    """Options of an exchange of updates: its schedule, the residual, and the outer optimizer."""

    carry: str  # "apply": the residual stays in this worker's parameters; "hold": beside the shared parameters
    every: int  # steps from one exchange of a parameter to the next
    fragments: int  # the merge buffers take turns, in so many groups
    overlap: int  # steps between sending and receiving
    decay: float  # of residuals, from one exchange to the next
    outer: Outer | None  # makes the optimizer that steps with the combined updates; None: they are taken as they are

    mean_moments: bool = False  # the optimizer's moments are in the scale of the mean gradient, and follow it
    in_time: int = 0  # so many first steps are exchanged without overlap
    interleaved: bool = False  # fragments are runs of blocks, which the exchange chooses: each has all merge buffers

    @property
    def takes_turns(self) -> bool:
        """Return whether fragments are groups of merge buffers, of which each exchange has one."""
        return self.fragments > 1 and not self.interleaved

    def fragment_at(self, step: int) -> int | None:
        """Return the number of the fragment that is exchanged after step ``step`` (1, 2, ...); None: none is."""
        phase = step % self.every
        return next((f for f in range(self.fragments) if f * self.every // self.fragments == phase), None)

    def merge_buffers_of(self, fragment: int) -> Callable[[int], Collection[int]] | None:
        """Return which merge buffers, of so many, are in a fragment; None: all are."""
        if not self.takes_turns:
            return None
        return lambda count: {buffer for buffer in range(count) if buffer * self.fragments // count == fragment}

    def memory_for(self, compressor: sparsifiers.Compressor, *, narrow: bool = False) -> sparsifiers.Memory:
        """Return the memory of the residuals of ``compressor``.

        With "apply" the parameters hold them, unless they are ``narrow``, of 16 bits: these could not.
        """
        if compressor.memory == "none" and Kind.QUANTISED not in compressor.kinds:  # it drops nothing
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
        yield "moments", MEAN if self.mean_moments else OWN_MOMENTS
        yield "decay", str(self.decay)
        # Without addresses, which differ from process to process.
        yield "outer", re.sub(r" at 0x[0-9a-fA-F]+", "", str(getattr(self.outer, "__qualname__", repr(self.outer))))


def planner_for(updates: Updates, planner: merging.Planner | None, numel: int) -> merging.Planner | None:
    """Return the planner: where merge buffers take turns one by size, of about as many buffers as fragments.

    ``numel``: elements of all parameters. A planner without times stays.
    """
    if not updates.takes_turns or planner is None or not planner.timed:
        return planner
    return merging.get("threshold", bytes=max(1, 4 * numel // updates.fragments))


# The four records. ``resolve`` makes each in one function, and a field's name occurs in one of them alone.

DenseRule = Callable[[str, torch.Tensor], bool]


class Rates(Protocol):
    """Momentum of an optimizer's groups, which a memory applies in the optimizer's place."""

    def by_slot(self, parameters: Sequence[torch.Tensor]) -> Callable[[Slot], Rate]:
        """Return a function from a slot to the present rate of its parameter; ``parameters``: in the order of slots."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What is sent of which tensor, and the error feedback of what is not sent."""

    compressor: sparsifiers.Compressor  # of every tensor that `dense` does not exempt
    memory: sparsifiers.Memory  # the rule of its residuals
    density: DensityPolicy
    wire: str  # the value codec of sparse tensors
    dense: DenseRule  # which parameters are always sent uncompressed
    partial: density_policy.DenseCutoff | None  # dense="partial": `dense` goes dense whatever the cut
    patterns: tuple[re.Pattern[str], ...]  # those that `dense` was made from, if it was
    rates: Rates | None = None  # where the memory takes the optimizer's momentum from, if it does


@dataclass(frozen=True, kw_only=True)
class Merging:
    """Which gradients share a message, and how messages are exchanged."""

    sparsify: str  # "ahead" of merging, "behind" it, or "auto"
    exchange: str  # of sparse tensors, a name of exchanges.table.EXCHANGES
    planner: merging.Planner | None  # None: there is a plan
    plan: merging.Plan | None
    groups: Groups | None  # plans by themselves; the planner is then not asked


@dataclass(frozen=True, kw_only=True)
class Sync:
    """What is combined, over which ranks and passes, and who applies it."""

    process_set: Chosen
    op: ReduceOp  # Average or Sum
    passes: int  # backward passes per step
    predivide: float  # dense sums are of gradient / predivide
    sparse_as_dense: bool  # gradients of sparse layout are made dense
    ordered: bool  # sums in rank order, whatever the plan
    zero_unused: bool  # a parameter that no rank has used gets a gradient of zeros
    model: torch.nn.Module | None  # merging="dear": its forward takes the updates
    updates: Updates | None  # sync="updates": the optimizer's updates are exchanged; None: gradients are


@dataclass(frozen=True, kw_only=True)
class Guards:
    """When a step is given up, skipped or refused."""

    timeout: float  # seconds, for every wait
    check_every: int  # steps between two comparisons of replicas; 0: after the first step alone
    warns: bool  # where replicas differ, instead of an error
    nonfinite: str  # policy for a step in which a rank has a gradient that is infinite or NaN
    scaled: bool  # by an attached GradScaler


# The config.

MERGING = "agmerge"  # the default planner
AUTO = "auto"
FASTEST = "fastest"
SPARSE = "sparse"
TWO_LEVEL = topology.EXCHANGE
SMALL = 1024  # elements; a smaller tensor costs more to select from than to send
WIRES = ("auto", *VALUES)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Checked options of a step: :func:`agmerge.options.resolve.resolve` makes them."""

    compression: Compression
    merging: Merging
    sync: Sync
    guards: Guards

    def changed(self, **fields: Any) -> Config:
        """Return this with other values for ``fields`` of its four records. All fields have different names."""
        records = {}
        for name in ("compression", "merging", "sync", "guards"):
            record = getattr(self, name)
            own = {field: fields.pop(field) for field in list(fields) if hasattr(record, field)}
            records[name] = replace(record, **own)
        assert not fields, fields
        return Config(**records)

    def memory_of(self, tensor_class: TensorClass, *, has_unsent: bool = False) -> sparsifiers.Memory:
        """Return the memory of a tensor class: dense ones have a residual only where something may be unsent.

        That is what was rounded, on the host, and with ``has_unsent`` this rank's residual from an earlier
        configuration: it is added to their gradients. With ``sync="updates"`` it is in the parameters instead.
        """
        memory, has_unsent = self.compression.memory, has_unsent and self.sync.updates is None
        if tensor_class.kind not in self.compression.compressor.kinds:  # dense beside compressed tensors
            return memory.for_dense_tensors(
                has_residual=has_unsent or (self.rounds_dense and not tensor_class.on_device)
            )
        keeps = memory.has_residual or memory.has_momentum or memory.hands_back
        sends_all = tensor_class.kind in (Kind.DENSE, Kind.QUANTISED, Kind.CUSTOM)
        return sparsifiers.memory("residual") if has_unsent and sends_all and not keeps else memory

    @property
    def rounds_dense(self) -> bool:
        """Return whether small dense tensors in messages of selections may be rounded on the host.

        Not those that a script names, and not where the quantisation error would be lost.
        """
        if (
            Kind.DENSE in self.compression.compressor.kinds
            or not self.compression.compressor.selects
            or not self.compression.memory.has_residual
        ):
            return False
        if (
            self.compression.dense is not is_small
            or self.compression.partial is not None
            or self.sync.ordered
            or self.sync.updates is not None
        ):
            return False
        if self.merging.exchange == TWO_LEVEL or not EXCHANGES[self.merging.exchange].rounds_dense:
            return False
        return self.compression.wire in WHOLE or bool(self.wires)

    @property
    def fragments(self) -> int:
        """Return into how many fragments the exchange divides quantized tensors."""
        return self.sync.updates.fragments if self.sync.updates is not None and self.sync.updates.interleaved else 1

    @property
    def quantises(self) -> bool:
        """True if some tensors are quantised, or may be by a later choice."""
        return Kind.QUANTISED in self.compression.compressor.kinds

    @property
    def quantisers(self) -> tuple[str, ...]:
        """Names of quantisers of which plans may take one, the most exact first; (): there is no choice."""
        return tuple(name for name in self.compression.compressor.candidates if name != NONE)

    def quantiser_of(self, label: str) -> sparsifiers.Quantiser | None:
        """Return the quantiser of quantised tensors; None: there are none.

        ``label``: its name, as a plan has it, where there is a choice; ``"auto"``: none was made.
        """
        if self.quantisers:
            return sparsifiers.quantiser(self.compression.compressor.until_chosen if label == AUTO else label)
        return cast("sparsifiers.Quantiser | None", self.compression.compressor.part(Kind.QUANTISED))

    @property
    def wires(self) -> tuple[str, ...]:
        """Return the value codecs that plans may take in place of the gradient's own dtype, most bits first.

        None where ``wire`` names one, where the exchange chooses none, where the quantisation error would be lost, and
        where sums are not to depend on the plan.
        """
        codecs = self.compression.compressor.selects and Kind.LOW_RANK not in self.compression.compressor.kinds
        if self.compression.wire != AUTO or self.sync.ordered or not codecs:
            return ()
        chooses = EXCHANGES[self.merging.exchange].chooses_codec and self.compression.memory.has_residual
        return CHOICE if chooses else ()

    @property
    def chooses_dense(self) -> bool:
        """Return whether merge buffers that could be compressed may go dense where that is measured to be faster."""
        if self.quantises:  # a script that names a quantiser has decided that it travels
            return NONE in self.compression.compressor.candidates
        if Kind.CUSTOM in self.compression.compressor.kinds:  # a class that a script passes is to be used
            return False
        return self.merging.exchange in (AUTO, FASTEST) and self.compression.compressor.compresses

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Return the exchanges that plans may take in place of the usual one of selections."""
        return SUMS if self.merging.exchange == FASTEST else ()

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the modes in which planners may predict; the first one counts until times are measured.

        They say where selection is: "behind" or "ahead" of merging, or "dense" where there is none. Matrices are
        projected as soon as they are ready, so that is ahead.
        """
        if not self.compression.compressor.compresses:
            return ("dense",)
        if not self.compression.compressor.selects:
            return ("ahead",)
        return ("behind", "ahead") if self.merging.sparsify == "auto" else (self.merging.sparsify,)

    @property
    def plans_from(self) -> str:
        """Return where plans come from, as text."""
        if self.merging.groups is not None:
            return "groups"  # which ones: ranks compare that tensor by tensor
        return f"plan {self.merging.plan.digest()}" if self.merging.plan else repr(self.merging.planner)

    def facts(self) -> list[Fact]:
        """Return the facts that must be the same on every rank, by name and as text.

        ``backward_passes_per_step`` too: it decides what a step is.
        """
        rank = self.compression.compressor.rank
        momentum_of = "the memory's" if self.compression.memory.has_momentum else "None"
        return [
            ("sync", GRADIENTS if self.sync.updates is None else UPDATES),  # first: defaults of others hang on it
            *(() if self.sync.updates is None else self.sync.updates.facts()),
            ("compression", self.compression.compressor.name),
            *self.compression.density.facts(),
            *(() if rank is None else [("rank", str(rank))]),
            ("dense='partial'", str(self.compression.partial)),
            ("options", repr(self.compression.compressor)),
            ("memory", repr(self.compression.memory)),
            ("momentum before selection", momentum_of if self.compression.rates is None else "the optimizer's"),
            ("merging", self.plans_from),
            ("sparsify", self.merging.sparsify),
            ("exchange", self.merging.exchange),
            ("wire", self.compression.wire),
            ("op", self.sync.op.value),
            ("sparse_as_dense", str(self.sync.sparse_as_dense)),
            ("backward_passes_per_step", str(self.sync.passes)),
            ("gradient_predivide_factor", str(self.sync.predivide)),
            ("dense_sum", "ordered" if self.sync.ordered else "native"),
            ("check_every", str(self.guards.check_every)),
            ("diverged", "warn" if self.guards.warns else "raise"),
            ("unused", "zero" if self.sync.zero_unused else "none"),
            ("nonfinite", self.guards.nonfinite),
            ("scaler", "attached" if self.guards.scaled else "None"),
        ]


def never(name: str, parameter: torch.Tensor) -> bool:
    """Return False: no parameter is exempt from compression."""
    return False


def is_small(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter has fewer than two dimensions (biases, norms), or than 1024 elements.

    This is the rule for ``dense=None``; ``name`` is not used.
    """
    return parameter.dim() < 2 or parameter.numel() < SMALL


# Treatment of each parameter by a config, and refusals, by name.


def assign_classes(config: Config, members: Iterable[ParameterInfo]) -> list[ParameterInfo]:
    """Return the parameters, each with its treatment. A rule of the script's own is asked once for each of them."""
    compression, members = config.compression, list(members)
    if compression.partial is not None:
        target, dense = compression.density.target, compression.dense
        return density_policy.assign_classes(members, compression.partial, target, dense)
    placed = []
    for member in members:
        kind = _kind_of(config, member)
        density = compression.density.of_parameter(member.name) if kind is Kind.SPARSE else None
        placed.append(replace(member, kind=kind, density=density))
    return placed


def _kind_of(config: Config, member: ParameterInfo) -> Kind:
    """Return how a parameter's gradient is sent."""
    if member.is_figure:
        return Kind.DENSE
    compressor = config.compression.compressor.of_tensor(member.name)
    exempt = config.compression.dense(member.name, member.local)
    compressed = compressor.is_for(member.dtype) and compressor.shrinks(member.name, member.shape)
    return compressor.kind if compressed and not exempt else Kind.DENSE


def with_cutoff_for(config: Config, members: Sequence[ParameterInfo], *, warns: bool) -> Config:
    """Return ``config`` with the cutoff of dense="partial" for these parameters. ``warns``: this rank may warn."""
    compression = config.compression
    if compression.partial is None:
        return config
    target, dense = compression.density.target, compression.dense
    return config.changed(
        partial=density_policy.with_cutoff_for(members, compression.partial, target, dense, warns=warns)
    )


def check_parameter(config: Config, member: ParameterInfo) -> None:
    """Raise ``ValueError`` for a parameter with a gradient that cannot be sent, or not by this compression."""
    problem = why_not_exchangeable(member.parameter, member.name)
    if not problem and is_dtensor(member.parameter):
        problem = _why_not_sharded(config, member.name)
    if problem:
        raise ValueError(problem)
    casts = config.compression.compressor.dtype is not None
    if member.dtype.is_complex and (casts or member.kind is not Kind.DENSE):
        raise ValueError(
            f"parameter {member.name!r} is {member.dtype}: sparsifiers and casts support real numbers only. Use "
            "compression='none', leave it uncompressed (dense=), or store it as torch.view_as_real()."
        )


def _why_not_sharded(config: Config, name: str) -> str:
    """Return why these options do not go with a parameter of which a rank holds a shard; "" if they do."""
    if config.sync.model is not None:
        return (
            f"merging='dear' is not supported with parameter {name!r}, a DTensor, because FSDP gathers parameters "
            "before DeAR would update them. Use another merging."
        )
    if config.merging.exchange == TWO_LEVEL:
        return (
            f"exchange='two-level' is not supported with parameter {name!r}, a DTensor: ranks of a node already share "
            "it by shards, and process_set= is the level between nodes. Pass exchange='sparse' or 'auto'."
        )
    if config.guards.nonfinite == SKIP and not config.guards.scaled:
        return (
            f"nonfinite='skip' is not supported with parameter {name!r}, a DTensor, because only the rank with the "
            "affected shard would skip the step. Pass scaler=, which checks all shards, or nonfinite='raise'."
        )
    return ""


def check_patterns(config: Config, names: Iterable[str]) -> None:
    """Raise ``ValueError`` for a pattern that matches none of ``names``: a slip is not ignored."""
    known = list(names)
    given: dict[str, Sequence[re.Pattern[str]]] = {
        "dense": config.compression.patterns,
        "density": [pattern for pattern, _ in config.compression.density.patterns],
        **config.compression.compressor.name_patterns(),
    }
    for what, pattern in ((what, pattern) for what, patterns in given.items() for pattern in patterns):
        if not any(pattern.fullmatch(name) for name in known):
            raise ValueError(
                f"AGM301: {what}: the pattern {pattern.pattern!r} matches no parameter. "
                f"{advice(pattern.pattern, known)}. Parameters: {', '.join(known)}"
            )
