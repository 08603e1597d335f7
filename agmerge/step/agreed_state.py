"""State that the ranks of one exchange have agreed on, and the state carried from one agreement to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

import merging
from agmerge.backends import Backend, topology
from agmerge.backends.handshake import Fact, require_agreement
from agmerge.metrics.chrome_trace import Trace
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.metrics.totals import Totals
from agmerge.ops import Average, ReduceOp
from agmerge.step.agreement import model_facts, open_merge_buffers
from agmerge.step.config import TWO_LEVEL, Config
from agmerge.step.dense_cutoff import DenseCutoff
from agmerge.step.flat_buffers import State
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.plan_status import PlanStatus
from agmerge.step.treatments import assign_lanes, check_parameter, with_cutoff_for
from agmerge.tensors.parameters import ParameterInfo, check_spread_alike
from sparsifiers import Kind, Sparsifier
from sparsifiers.observed import Observed

RESIZED = (
    "parameter {name!r} had shape {before} and has {now} now: what was kept of it does not fit. Give the model its "
    "shapes before its optimizer is wrapped, or close() this optimizer and wrap anew"
)
OF_GRADIENTS = ("residual", "momentum")  # kinds of state that are linear in gradients


class TensorTable(Protocol):
    """Table of the tensors that take part. It is read again whenever they may have changed."""

    def active(self) -> list[ParameterInfo]:
        """Return the tensors that take part now, in an order that is the same on every rank."""

    def snapshot(self) -> object:
        """Return an object to compare by ``==``: where it differs, ranks have to agree again.

        Cheap: called in each step.
        """


@dataclass(frozen=True)
class Decision:
    """Changes from the next step on, the same on every rank; None: no change."""

    plan: merging.Plan | None = None  # for the tensors that take part, in their order
    cutoff: DenseCutoff | None = None  # of dense="partial"; with another size ranks agree again
    budgets: tuple[int, ...] | None = None  # elements that each tensor may send in a step, by slot


class Plans(Protocol):
    """Maker of plans between steps, from measured times."""

    def after_step(self, step: int) -> Iterable[Decision]:
        """Collective. Yield changes before ``step``, the one to come; each is applied before the next one is made."""

    def measure(self, step: int) -> merging.Measurements:
        """Collective. Measure costs now, before ``step``, for reports; the plan stays."""

    def status(self) -> PlanStatus:
        """Return what is in use, and why."""


OnAgreement = Callable[[MergeBuffers, RunningStepTimes], "Plans | None"]


class AgreedState:
    """Group, config and merge buffers of the last agreement, and the state that waits for the next one.

    ``table``: which tensors take part. ``on_agreement`` is called at every new agreement, and returns the maker of
    plans from measured times (None: the first plan stays).
    """

    def __init__(self, table: TensorTable, config: Config, on_agreement: OnAgreement) -> None:
        self.table, self._on_agreement = table, on_agreement
        self.config = config  # for the next agreement; `buffers.config` is that of the last one
        self.totals, self.times = Totals(), RunningStepTimes()
        self.world: Backend | None = None  # from which it was connected
        self.comm: Backend | None = None  # of its own
        self.second: Backend | None = None  # another one of the same ranks, for second phases; None: not needed, so far
        self.outside = False  # of the process set: this rank exchanges nothing
        self.shard: tuple[int, int] | None = None  # of every tensor, this rank's: which of how many (two-level)
        self.buffers: MergeBuffers | None = None  # None before the first agreement
        self.plans: Plans | None = None
        self.steps = 0  # committed exchanges; after restore() the checkpoint's
        self.step = 0  # equal on every rank; written into messages
        self.origin: tuple[int, int] | None = None  # rank and size of the group that the carried state is of
        self._nodes: topology.Nodes | None = None  # exchange="two-level"
        self._carried: State = {}  # state without a place in the merge buffers
        self._carried_plan: merging.Plan | None = None  # for the next agreement
        self._carried_budgets: dict[str, int] | None = None  # likewise: elements to send by name, by importance
        self._stale = False  # the state of the merge buffers is outdated: `_carried` replaces it
        self._snapshot: object = None  # of the table, as of the last agreement

    # -- the group ------------------------------------------------------------------------------------------------

    def connect(
        self,
        world: Backend,
        comm: Backend | None,
        facts: Iterable[Fact] | None = None,
        second: Backend | None = None,
    ) -> None:
        """Collective. Exchange among the ranks of ``comm`` (None: not this one), and compare ``facts`` first (G1).

        ``comm`` is a communicator of this exchange's own among the workers of ``world``, and ``second`` another one of
        the same ranks, for the second phases of messages. ``facts``: compared between ranks; None: :meth:`facts`.
        Raises :class:`agmerge.RankMismatchError` on every rank where they differ.
        """
        self.world, self.comm, self.second, self.outside = world, comm, second, comm is None
        if comm is None:
            return
        facts = self.facts() if facts is None else list(facts)
        self.totals.among(comm.size)
        advice = "Give every rank the same model and the same arguments."
        require_agreement(comm, facts, what="DistributedOptimizer", advice=advice, timeout=self.config.guards.timeout)
        if self.config.merging.exchange == TWO_LEVEL:
            self._nodes = topology.form(comm, self.config.guards.timeout, wants_second=self.config.quantises)
            self.shard = self._nodes.shard

    def facts(self) -> list[Fact]:
        """Return the facts that must be equal on every rank: arguments and tensors.

        Raises ``ValueError`` for tensors that cannot be sent.
        """
        return [*self.config.facts(), *model_facts(self.members(), self.config)]

    def fit_to_group(self, shard_before: tuple[int, int] | None) -> bool:
        """Scale the carried state from another number of workers to this one, once; see :func:`rescaled`.

        Returns False, and drops all carried state, where it is of other shards than this rank has now.
        """
        origin, self.origin = self.origin, None
        if origin is None or self.comm is None or not self._carried:
            return True
        if self.shard != shard_before:
            self._carried = {}
            return False
        self._carried = rescaled(self._carried, weight_factor(self.config.sync.op, origin[1], self.comm.size))
        return True

    def leave(self) -> None:
        """Forget the group. The state after the last step is carried over to the next one."""
        if self.comm is not None:
            self.origin = (self.comm.rank, self.comm.size)
        self._carried = self.copy_state()
        self._carried_plan, self._carried_budgets, self.outside = self.plan(), self.budgets(), False
        self.comm = self.second = self._nodes = self.buffers = self.plans = None

    def close(self) -> None:
        """Close the communicators."""
        if self._nodes is not None:
            self._nodes.close()
        for comm in (self.comm, self.second):
            if comm is not None:
                comm.close()

    # -- agreements -----------------------------------------------------------------------------------------------

    @property
    def agreed(self) -> bool:
        """Return whether the merge buffers are valid for the next step, as far as this rank knows."""
        return self.buffers is not None and not self._stale

    @property
    def changed(self) -> bool:
        """Return whether this rank needs a new agreement: its tensors or its state have changed."""
        return self._stale or self.table.snapshot() != self._snapshot

    def members(self) -> list[ParameterInfo]:
        """Return the tensors that take part now, each with its class.

        Raises ``ValueError`` for one that cannot be sent.
        """
        active = self.table.active()
        check_spread_alike(active)
        members = assign_lanes(self.config, (member for member in active if member.local.numel()))
        for member in members:
            check_parameter(self.config, member)
        return members

    def agree_anew(self, order: Sequence[str]) -> MergeBuffers:
        """Collective. Agree on the present tensors and plan, and move the state to the new merge buffers by name.

        ``order``: the names of tensors in the order in which this rank saw them ready, as far as it has.
        """
        assert self.comm is not None
        if self.buffers is not None:
            order = [*(slot.name for slot in self.buffers.layout.slots), *order]  # new tensors follow
            self._carried = self.copy_state()
        members = self.members()
        self.config = with_cutoff_for(self.config, members, warns=self.comm.rank == 0)
        buffers, self.steps = open_merge_buffers(
            self.comm,
            self.config,
            members,
            order,
            self.steps,
            self._carried_plan,
            self._nodes,
            self._carried_budgets,
            self._carried,
            self.second if self._nodes is None else self._nodes.second,
            self.totals.left,
        )
        self._check_shapes(buffers)
        self.step, self._carried_plan, self._carried_budgets = self.steps, None, None
        buffers.flat.restore(self._carried, buffers.across, self.config.guards.timeout)
        self.buffers, self._snapshot, self._stale = buffers, self.table.snapshot(), False
        self._forget_measurements(buffers)
        self.plans = self._on_agreement(buffers, self.times)
        return buffers

    def _check_shapes(self, buffers: MergeBuffers) -> None:
        """Raise ``ValueError`` for a parameter that the script has given another shape, on all ranks alike.

        Where no state is carried shapes may change. ``buffers``: those that ranks have just agreed on.
        """
        if self.buffers is None or not (self._carried or self.config.sync.updates is not None):
            return
        before = {slot.name: slot.shape for slot in self.buffers.layout.slots}
        for slot in buffers.layout.slots:
            if before.get(slot.name, slot.shape) != slot.shape:
                raise ValueError(RESIZED.format(name=slot.name, before=list(before[slot.name]), now=list(slot.shape)))

    def replan(self) -> None:
        """Collective. Between steps: change to another plan, where the measured times ask for one."""
        if self.plans is None or self.buffers is None or self._stale:
            return
        for decision in self.plans.after_step(self.step):
            if decision.budgets is not None:
                self.buffers.budgets.choose(decision.budgets)
            if decision.cutoff is not None:
                before, self.config = self.config.compression.partial, self.config.changed(partial=decision.cutoff)
                if before is None or before.elements != decision.cutoff.elements:
                    self.reopen()  # tensors change their class
            if decision.plan is not None:
                self.use_plan(decision.plan)

    def use_plan(self, plan: merging.Plan) -> None:
        """Use ``plan`` from the next step on; every rank calls this alike. Residuals stay where they are."""
        assert self.buffers is not None
        self.buffers.rebuild(plan)
        self._forget_measurements(self.buffers)

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Use another config from the next step on, with residuals and plan unchanged.

        ``what``, ``advice``: for the error where ranks give different ones.
        """
        before, self.config = self.config, observing(config, self.is_observed)
        try:
            facts = self.facts()
            if self.comm is not None:
                require_agreement(self.comm, facts, what=what, advice=advice, timeout=config.guards.timeout)
            self._connect_twice()
        except BaseException:
            self.config = before
            raise
        self.reopen()

    def _connect_twice(self) -> None:
        """Collective. Make the communicator of second phases, where the config needs one now and all ranks take part.

        Making it needs all ranks of ``world``: those outside the process set do not call this. There messages are
        gathered.
        """
        if self.comm is None or self.world is None or self.second is not None or not self.config.quantises:
            return
        if 2 < self.comm.size == self.world.size and self._nodes is None:
            self.second = self.comm.duplicate("agmerge optimizer, second phases", self.config.guards.timeout)

    def observe_selection(self, on: bool) -> None:
        """Start or stop recording figures of every selection: see :class:`sparsifiers.observed.Observed`."""
        self.adopt(observing(self.config, on))
        if self.buffers is not None:
            self.buffers.adopt(self.buffers.config.changed(compressor=self.config.compression.compressor))

    @property
    def is_observed(self) -> bool:
        """Return whether figures of selections are recorded."""
        sparsifier = self.config.compression.compressor.part(Kind.SPARSE)
        return sparsifier is not None and sparsifier.unobserved is not sparsifier

    def adopt(self, config: Config) -> None:
        """Use ``config`` from the next agreement on. The facts that ranks compare must not differ."""
        self.config = config

    def reopen(self) -> None:
        """Agree again in the next step, with all state unchanged."""
        self.restore(self.copy_state(), self.steps, self.plan(), origin=self.origin, shard=self.shard)

    def describe_to(self, trace: Trace | None) -> None:
        """Write into a trace which tensors are in which merge buffer now."""
        if trace is not None and self.buffers is not None:
            trace.follow([slot.name for slot in self.buffers.layout.slots], self.buffers.plan.counts)

    def _forget_measurements(self, buffers: MergeBuffers) -> None:
        """Drop measured times, and sparsifiers' state, of merge buffers that no longer exist."""
        self.times.forget()
        self.describe_to(self.times.trace)
        self.config.compression.compressor.retain(buffers.keys())

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return this rank's state between steps, by kind ("residual", "momentum") and name: views."""
        current = self.buffers.flat.state() if self.buffers is not None and not self._stale else {}
        return {**self._carried, **current}

    def copy_state(self) -> State:
        """Return a copy of this rank's state between steps on the host: a device may have no room for it twice."""
        return {key: tensor.to("cpu", copy=True) for key, tensor in self.state().items()}

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return every residual of this rank, by name: views."""
        return {name: tensor for (kind, name), tensor in self.state().items() if kind == "residual"}

    def plan(self) -> merging.Plan | None:
        """Return the plan in use, or the one for the next agreement; None before the first agreement."""
        return self.buffers.plan if self.buffers is not None and not self._stale else self._carried_plan

    def budgets(self) -> dict[str, int] | None:
        """Return how many elements of each tensor a step sends, by importance; None where that is not known."""
        if self.buffers is None or self._stale or self._carried_budgets is not None:
            return self._carried_budgets
        return self.buffers.budgets.by_name()

    def restore(
        self,
        state: State,
        steps: int,
        plan: merging.Plan | None,
        budgets: dict[str, int] | None = None,
        origin: tuple[int, int] | None = None,
        shard: tuple[int, int] | None = None,
    ) -> None:
        """Replace state, steps, plan and budgets by earlier ones; the next step agrees on them.

        ``state``, ``plan``, ``budgets``: results of :meth:`state`, :meth:`plan` and :meth:`budgets`. ``origin``: rank
        and size of the group that ``state`` is of. ``shard``: which shard of each tensor, where this rank has no group
        yet.
        """
        self._carried, self.steps, self._carried_plan = dict(state), steps, plan
        self._carried_budgets, self.origin = budgets, origin
        if self.comm is None:
            self.shard = shard
        self._stale = self.buffers is not None
        self.discard()

    def discard(self) -> None:
        """Discard the step under way. Here there is none; a :class:`GradientExchange` has one."""

    def carry(self, kind: str, name: str, tensor: torch.Tensor | None) -> None:
        """Keep ``tensor`` for the next agreement, replacing carried state of this kind and name; None: remove that."""
        self._carried.pop((kind, name), None)
        if tensor is not None:
            self._carried[kind, name] = tensor


def observing(config: Config, on: bool) -> Config:
    """Return ``config`` with a sparsifier that records figures of its selections (``on``), or without. Nothing else."""
    compressor, sparsifier = config.compression.compressor, config.compression.compressor.part(Kind.SPARSE)
    if sparsifier is None:
        return config
    bare = cast(Sparsifier, sparsifier.unobserved)
    return config.changed(compressor=compressor.replaced(Observed(bare) if on else bare))


def weight_factor(op: ReduceOp, before: int, now: int) -> float:
    """Return the factor for a residual of one of ``before`` workers among ``now`` workers.

    A residual enters the update with the weight of its rank's gradient: 1 / W where updates are averages, 1 where they
    are sums. The sum of residual * weight over all ranks stays the same.
    """
    return now / before if op is Average else 1.0


def rescaled(state: State, factor: float) -> State:
    """Return one rank's state as a member of another number of workers: its own residuals times ``factor``.

    A momentum that each rank has of its own gradients is linear in them, and is scaled too. A momentum of averages,
    equal on every rank, stays as it is, and so do bases, which have no scale.
    """
    if factor == 1.0:
        return state
    return {key: tensor * factor if key[0] in OF_GRADIENTS else tensor for key, tensor in state.items()}
