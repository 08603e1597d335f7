# SPDX-License-Identifier: Apache-2.0
"""State that the ranks of one exchange have agreed on: tensors, merge buffers, plan, and what is measured of them.

Rank 0 decides: :func:`decide_on_rank_0`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch

import merging
from agmerge.backends import Backend
from agmerge.backends.handshake import Fact, broadcast_bytes, require_agreement
from agmerge.exchanges.routing import OWN, send_mode, why_labels_are_wrong, why_parts_impossible, with_send_mode
from agmerge.metrics.chrome_trace import Trace
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.metrics.totals import Totals
from agmerge.ops import Average, ReduceOp
from agmerge.step.config import AUTO, FASTEST, Config, assign_classes, check_parameter, with_cutoff_for
from agmerge.step.density_policy import DenseCutoff
from agmerge.step.flat_buffers import State
from agmerge.step.group import Group, Note
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.plan_status import Announcer, PlanStatus
from agmerge.tensors.layout import Slot
from agmerge.tensors.parameters import ParameterInfo, check_spread_alike
from sparsifiers import Kind, Sparsifier
from sparsifiers.gpu import is_fused
from sparsifiers.proof import Observed

# State of a rank between steps, as the next agreement takes it over, in a group of perhaps another size.

OF_GRADIENTS = ("residual", "momentum")  # kinds of state that are linear in gradients


@dataclass
class CarriedState:
    """State that waits for the next agreement."""

    tensors: State = field(default_factory=dict)  # without a place in the merge buffers of now
    plan: merging.Plan | None = None  # to go on with, if it still fits
    budgets: dict[str, int] | None = None  # elements to send by name, by importance; None if not known of every tensor
    trial: str = ""  # of plans, to go on with, as Plans.trial() has returned it; "": none was under way
    origin: tuple[int, int] | None = None  # rank and size of the group that the state is of, until it is fitted

    def copied(self) -> CarriedState:
        """Return a copy with all tensors on the host: a device may have no room for them twice."""
        return replace(self, tensors={key: tensor.to("cpu", copy=True) for key, tensor in self.tensors.items()})

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return every residual of this rank, by name."""
        return {name: tensor for (kind, name), tensor in self.tensors.items() if kind == "residual"}

    def stash(self, kind: str, name: str, tensor: torch.Tensor | None) -> None:
        """Keep ``tensor`` in place of one of this kind and name; None: remove that."""
        self.tensors.pop((kind, name), None)
        if tensor is not None:
            self.tensors[kind, name] = tensor

    def forget_all_but(self, names: Container[str]) -> None:
        """Drop the state of tensors with other names: the script has removed or replaced them."""
        self.tensors = {key: tensor for key, tensor in self.tensors.items() if key[1] in names}

    def fit(self, op: ReduceOp, workers: int) -> None:
        """Scale the state from the number of workers of its origin to ``workers``, once; see :func:`rescaled`."""
        origin, self.origin = self.origin, None
        if origin is not None:
            self.tensors = rescaled(self.tensors, weight_factor(op, origin[1], workers))


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


# The agreement, before an exchange, on members, their order, and the plan, which rank 0 makes.

RESIZED = (
    "parameter {name!r} changed its shape from {before} to {now}, so its residual does not fit. Set the shapes before "
    "you wrap the optimizer, or close() this optimizer and wrap it again."
)
ADVICE = "Change parameters (add_param_group, requires_grad, dtype, device) on every rank at the same step."
SHARD = (
    "the shard of {name!r}, which all ranks of a process set must hold (fully_shard uses mesh['shard'], process_set= "
    "uses mesh['replicate'])"
)
COMPUTES = "the kernels on devices (AGMERGE_KERNEL=off on every rank uses torch's operations)"


def model_facts(members: Sequence[ParameterInfo], config: Config) -> list[Fact]:
    """Return the facts about the model that ranks must agree on: every tensor, in the order of the groups.

    For DTensors, first which shard a rank has: shards of the same shape could not be distinguished otherwise. Last
    whether kernels compute on their devices, for those select otherwise than torch's operations.
    """
    groups = config.merging.groups.by_name(members) if config.merging.groups is not None else []
    group_of = {name: f" group {number}" for number, group in enumerate(groups) for name in group}
    shards = [(SHARD.format(name=member.name), member.shard) for member in members if member.shard]
    tensors = [
        (f"tensor {i}", f"{member.name} {member.describe()}{group_of.get(member.name, '')}")
        for i, member in enumerate(members)
    ]
    devices = {member.device for member in members if member.device.type != "cpu"}
    computes = [(COMPUTES, "kernels" if all(map(is_fused, devices)) else "torch's operations")] if devices else []
    return shards + tensors + computes


def open_merge_buffers(
    group: Group,
    config: Config,
    members: Sequence[ParameterInfo],
    order: Iterable[str],
    steps: int,
    carried: CarriedState,
    note: Note,
) -> tuple[MergeBuffers, int, str]:
    """Collective. Agree on members, order and plan, and allocate memory.

    Returns the merge buffers, the step count, and the trial of plans to go on with.

    Args:

        group: the ranks that agree.
        config: the same on all of them.
        members: this rank's tensors, each with its class.
        order: names in the order in which this rank saw them ready; other tensors go last. Rank 0's counts.
        steps: committed exchanges so far. Rank 0's counts.
        carried: this rank's state of before, which is only read. Rank 0's plan, budgets and trial count.
        note: as in :class:`MergeBuffers`.

    Raises :class:`agmerge.RankMismatchError` on every rank if the models differ, and ``ValueError`` on every rank if
    the plan does not fit.
    """
    comm = group.comm
    assert comm is not None
    require_agreement(
        comm, model_facts(members, config), what="membership", advice=ADVICE, timeout=config.guards.timeout
    )
    if not members:
        raise ValueError(
            "no parameter requires a gradient, so there is nothing to exchange. Unfreeze one, or do not call step()."
        )
    names = [member.name for member in members]
    decision = decide_on_rank_0(
        comm,
        lambda: {
            "plan": _make_plan(config, members, order, carried.plan).dumps(),
            "steps": steps,
            "shares": carried.budgets,
            "trial": carried.trial,
        },
        reject=lambda decision: why_plan_does_not_fit(merging.Plan.loads(decision["plan"]), names),
        timeout=config.guards.timeout,
    )
    unsent = {name for name, residual in carried.residuals().items() if bool(residual.any())}
    plan = merging.Plan.loads(decision["plan"])
    buffers = MergeBuffers(comm, config, members, plan, group.side, group.nodes, group.second_across, note, unsent)
    buffers.budgets.restore(decision["shares"] or {})
    return buffers, decision["steps"], decision["trial"]


def check_shapes(before: Iterable[Slot], now: Iterable[Slot]) -> None:
    """Raise ``ValueError`` for a parameter that the script has given another shape since the last agreement."""
    shapes = {slot.name: slot.shape for slot in before}
    for slot in now:
        if shapes.get(slot.name, slot.shape) != slot.shape:
            raise ValueError(RESIZED.format(name=slot.name, before=list(shapes[slot.name]), now=list(slot.shape)))


def decide_on_rank_0(
    comm: Backend,
    decide: Callable[[], dict[str, Any]],
    reject: Callable[[dict[str, Any]], str] | None,
    timeout: float,
    *,
    decider: str = "",
) -> dict[str, Any]:
    """Collective. Return on every rank what ``decide()`` returned on rank 0, after a round trip through JSON.

    Args:

        comm: the ranks that receive the decision, all of which call this.
        decide: called on rank 0 alone. It may run a script's own planner: its error is sent to the other ranks.
        reject: called on every rank with the decision; returns why this rank cannot follow it, "" if it can. Then one
            more collective compares the answers. None: no rank can reject.
        timeout: seconds, for each collective.
        decider: the name that an error of ``decide`` is reported under; "": the class of the error.

    Raises ``ValueError`` on every rank if ``decide`` failed or every rank rejects, and
    :class:`agmerge.RankMismatchError` on every rank if only some of them reject.
    """
    text = ""
    if comm.rank == 0:
        try:
            text = json.dumps({"decision": decide()})
        except Exception as error:  # the other ranks wait for an answer: any error is sent to them
            text = json.dumps({"problem": f"{decider or type(error).__name__}: {error}"})
    answer = json.loads(broadcast_bytes(comm, text.encode(), 0, "plan", timeout))
    problem: str = answer.get("problem", "")
    if reject is not None:
        problem = problem or reject(answer["decision"])
        require_agreement(comm, [("the plan", problem or "fits")], what="plan", advice=ADVICE, timeout=timeout)
    if problem:
        raise ValueError(f"there is no plan for this model: {problem}")
    decision: dict[str, Any] = answer["decision"]
    return decision


def why_plan_does_not_fit(plan: merging.Plan, members: Iterable[str]) -> str:
    """Return why ``plan`` cannot serve members of these names; "" if it can."""
    names = sorted(members)
    if sum(plan.counts) != len(names):
        return f"it covers {sum(plan.counts)} tensors, the model has {len(names)}"
    different = sorted(set(plan.names or ()) ^ set(names))
    if different:
        return f"tensors that only one of them has: {', '.join(different)}"
    return why_labels_are_wrong(plan) or why_parts_impossible(plan)


def with_mode(plan: merging.Plan, mode: str) -> merging.Plan:
    """Return the plan, labelled with its mode: in mode "ahead" tensors are selected from before merging.

    Then merge buffers of several tensors are one message.
    """
    ahead, pairs = mode == "ahead", zip(plan.counts, plan.parts, strict=True)
    parts = tuple(1 if ahead and count > 1 else parts for count, parts in pairs)
    return replace(with_send_mode(plan, ahead=ahead), parts=parts)


def _make_plan(
    config: Config, members: Sequence[ParameterInfo], order: Iterable[str], recorded: merging.Plan | None
) -> merging.Plan:
    """Return this rank's plan, from its own readiness order. A saved plan with names brings its own order.

    A planner that needs times has none yet: until they are measured, merge buffers are made by size.
    """
    parameters = {member.name: member.local for member in members}
    fits = recorded is not None and not why_plan_does_not_fit(recorded, parameters)
    if (
        config.merging.plan is not None
        and config.merging.plan.names is not None
        and not (fits and _is_chosen(config, recorded))
    ):
        return config.merging.plan
    if recorded is not None and fits:
        if config.merging.exchange not in (AUTO, FASTEST) or (config.quantises and not config.chooses_dense):
            recorded = replace(recorded, dense=(False,) * len(recorded.counts))
        if not config.wires:
            recorded = with_send_mode(recorded, codec=OWN)
        if not config.exchanges:
            recorded = with_send_mode(recorded, exchange=OWN)
        mode = send_mode(recorded)
        if not (mode.workers and mode.quantiser in config.quantisers):  # a trial alone does not count
            if config.quantisers:
                recorded = replace(recorded, dense=(False,) * len(recorded.counts))
            recorded = with_send_mode(recorded, quantiser=OWN, workers=0)
        where = "ahead" if mode.ahead else "behind"
        if where in config.modes or not config.compression.compressor.compresses:
            return recorded
        return with_mode(recorded, config.modes[0])  # the script asks for the other mode now
    # Reversed registration stands in for tensors that no backward pass has reached yet.
    names = list(dict.fromkeys([*(name for name in order if name in parameters), *reversed(list(parameters))]))
    if config.merging.plan is not None:
        config.merging.plan.check(len(names))
        return replace(config.merging.plan, names=tuple(names))
    if config.merging.groups is not None:
        return with_mode(config.merging.groups.plan(members, names), config.modes[0])
    assert config.merging.planner is not None
    planner = merging.get("threshold") if config.merging.planner.timed else config.merging.planner
    numel = [parameters[name].numel() for name in names]
    profile = merging.Profile(names, numel, [0.0] * len(names))
    return with_mode(planner.plan(profile, _UNMEASURED), config.modes[0])


def _is_chosen(config: Config, recorded: merging.Plan | None) -> bool:
    """Return whether ``recorded`` is the script's own plan, with a quantiser that a run has chosen for it since."""
    if recorded is None or config.merging.plan is None:
        return False
    mode = send_mode(recorded)
    same = (recorded.counts, recorded.names) == (config.merging.plan.counts, config.merging.plan.names)
    return same and mode.quantiser in config.quantisers and mode.workers > 0


def _free(elements: Any) -> Any:
    """Return 0 seconds for each number of elements."""
    return 0.0 * elements


# The state.

_UNMEASURED = merging.Costs(sparsify=_free, exchange=_free)  # planners that go by tensors and bytes read no costs


class TensorTable(Protocol):
    """Table of the tensors that take part. It is read again whenever they may have changed."""

    def active(self) -> list[ParameterInfo]:
        """Return the tensors that take part now, in an order that is the same on every rank."""

    def names(self) -> Container[str]:
        """Return the names of all tensors of which state is kept, also of those that do not take part now."""

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

    def resume(self, trial: str) -> None:
        """Go on with a trial of plans, if it is of these tensors and workers. The same on all ranks."""

    def trial(self) -> str:
        """Return the trial of plans that is under way, for :meth:`resume` in a later run; "" if none is."""

    def measure(self, step: int) -> merging.Measurements:
        """Collective. Measure costs now, before ``step``, for reports; the plan stays."""

    def status(self) -> PlanStatus:
        """Return what is in use, and why."""

    @property
    def is_decided(self) -> bool:
        """Return whether the plan in use was chosen from times, here or earlier, and stays for now."""


OnAgreement = Callable[[MergeBuffers, RunningStepTimes], "Plans | None"]


class AgreedState:
    """Config, merge buffers and plan of the last agreement of a group, and the state that waits for the next one.

    ``table``: which tensors take part. ``on_agreement`` is called at every new agreement, and returns the maker of
    plans from measured times (None: the first plan stays).
    """

    def __init__(self, table: TensorTable, config: Config, on_agreement: OnAgreement, group: Group) -> None:
        self.table, self._on_agreement, self._group = table, on_agreement, group
        self.config = config  # for the next agreement; `buffers.config` is that of the last one
        self.totals, self.times = Totals(), RunningStepTimes()
        self.buffers: MergeBuffers | None = None  # None before the first agreement
        self.plans: Plans | None = None
        self.steps = 0  # committed exchanges; after restore() the checkpoint's
        self.step = 0  # equal on every rank; written into messages
        self.carried = CarriedState()
        self._announcer = Announcer()
        self._stale = False  # the state of the merge buffers is outdated: `carried` replaces it
        self._snapshot: object = None  # of the table, as of the last agreement

    @property
    def is_valid(self) -> bool:
        """Return whether the merge buffers are valid for the next step, as far as this rank knows."""
        return self.buffers is not None and not self._stale

    @property
    def changed(self) -> bool:
        """Return whether this rank needs a new agreement: its tensors or its state have changed."""
        return self._stale or self.table.snapshot() != self._snapshot

    # -- agreements -----------------------------------------------------------------------------------------------

    def members(self) -> list[ParameterInfo]:
        """Return the tensors that take part now, each with its class.

        Raises ``ValueError`` for one that cannot be sent.
        """
        active = self.table.active()
        check_spread_alike(active)
        members = assign_classes(self.config, (member for member in active if member.local.numel()))
        for member in members:
            check_parameter(self.config, member)
        return members

    def facts(self) -> list[Fact]:
        """Return the facts that must be equal on every rank: arguments and tensors.

        Raises ``ValueError`` for tensors that cannot be sent.
        """
        return [*self.config.facts(), *model_facts(self.members(), self.config)]

    def devices(self) -> list[torch.device]:
        """Return the devices of the tensors, without the host, in the order of the table."""
        return [one for one in dict.fromkeys(member.device for member in self.table.active()) if one.type != "cpu"]

    def agree_anew(self, order: Sequence[str]) -> MergeBuffers:
        """Collective. Agree on the present tensors and plan, and move the state to the new merge buffers by name.

        ``order``: the names of tensors in the order in which this rank saw them ready, as far as it has.
        """
        group, before = self._group, self.buffers
        assert group.comm is not None
        if before is not None:
            order = [*(slot.name for slot in before.layout.slots), *order]  # new tensors follow
            self.carried.tensors = self.current.copied().tensors
        carried = self.carried
        members = self.members()
        self.config = with_cutoff_for(self.config, members, warns=group.comm.rank == 0)
        buffers, self.steps, trial = open_merge_buffers(
            group, self.config, members, order, self.steps, carried, self.totals.collectives.append
        )
        if before is not None and (carried.tensors or self.config.sync.updates is not None):
            check_shapes(before.layout.slots, buffers.layout.slots)
        self.step, carried.plan, carried.budgets, carried.trial = self.steps, None, None, ""
        buffers.flat.restore(carried.tensors, buffers.across, self.config.guards.timeout)
        carried.forget_all_but(self.table.names())
        self.buffers, self._snapshot, self._stale = buffers, self.table.snapshot(), False
        self._forget_measurements(buffers)
        self.plans = self._on_agreement(buffers, self.times)
        if self.plans is not None and trial:
            self.plans.resume(trial)
        return buffers

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Use another config from the next step on, with residuals and plan unchanged.

        ``what``, ``advice``: for the error where ranks give different ones.
        """
        before, self.config = self.config, observing(config, is_observed(self.config))
        try:
            facts, comm = self.facts(), self._group.comm
            if comm is not None:
                require_agreement(comm, facts, what=what, advice=advice, timeout=config.guards.timeout)
            self._group.connect_second(self.config)
        except BaseException:
            self.config = before
            raise
        self.reopen()

    def adopt(self, config: Config) -> None:
        """Use ``config`` from the next agreement on. The facts that ranks compare must not differ."""
        self.config = config

    def reopen(self) -> None:
        """Agree again in the next step, with all state unchanged. Budgets by importance are chosen anew."""
        self.restore(replace(self.current.copied(), budgets=None), self.steps)

    def end_step(self, left_out: Iterable[Slot], *, counts: bool = True) -> None:
        """End a step, as :meth:`FlatBuffers.end_step` does, and count it; ``counts`` False: it has another part."""
        buffers = self.buffers
        assert buffers is not None
        buffers.flat.end_step(left_out)
        if not counts:
            return
        self.steps = self.step = self.step + 1
        self.totals.stepped(len(buffers.messages), buffers.layout.numel, buffers.flat.tensors.numel)

    # -- plans ----------------------------------------------------------------------------------------------------

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
        if not self._announcer.is_quiet(self.buffers.plan) and not self._stale and self.plans.is_decided:
            self._announcer.look(self.buffers, self.plans.status(), self.step, self.totals)

    def use_plan(self, plan: merging.Plan) -> None:
        """Use ``plan`` from the next step on; every rank calls this alike. Residuals stay where they are."""
        assert self.buffers is not None
        self.buffers.rebuild(plan)
        self._forget_measurements(self.buffers)

    def observe_selection(self, on: bool) -> None:
        """Start or stop recording figures of every selection: see :class:`sparsifiers.proof.Observed`."""
        self.adopt(observing(self.config, on))
        if self.buffers is not None:
            self.buffers.adopt(self.buffers.config.changed(compressor=self.config.compression.compressor))

    def describe_to(self, trace: Trace | None) -> None:
        """Write into a trace which tensors are in which merge buffer now."""
        if trace is not None and self.buffers is not None:
            trace.follow([slot.name for slot in self.buffers.layout.slots], self.buffers.plan.counts)

    def _forget_measurements(self, buffers: MergeBuffers) -> None:
        """Drop measured times, and sparsifiers' state, of merge buffers that no longer exist."""
        self.times.forget()
        self.describe_to(self.times.trace)
        self.config.compression.compressor.retain(buffers.keys())

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def current(self) -> CarriedState:
        """State, plan and budgets between steps, as the next agreement would take them over: views."""
        buffers, carried = self.buffers, self.carried
        if buffers is None or self._stale:
            return carried
        budgets = buffers.budgets.by_name() if carried.budgets is None else carried.budgets
        return CarriedState({**carried.tensors, **buffers.flat.state()}, buffers.plan, budgets, origin=carried.origin)

    def trial(self) -> str:
        """Return the trial of plans that is under way, or waits for the next agreement; "" if there is none."""
        if self.buffers is None or self._stale:
            return self.carried.trial
        return "" if self.plans is None else self.plans.trial()

    def residual_of(self, name: str) -> torch.Tensor | None:
        """Return the residual of one tensor, in the shape in which it is kept: a view; None: there is none."""
        if self.buffers is None or self._stale or name not in self.buffers.slot_of:
            return self.carried.tensors.get(("residual", name))
        slot = self.buffers.slot_of[name]
        return self.buffers.flat.arena_of[slot.index].state_of(slot).get("residual")

    def restore(self, carried: CarriedState, steps: int) -> None:
        """Replace the state and the number of exchanges by earlier ones; the next step agrees on them.

        ``carried``: once returned by ``current``, here or on the rank that it comes from.
        """
        self.carried = replace(carried, tensors=dict(carried.tensors))
        self.steps, self._stale = steps, self.buffers is not None

    def leave(self) -> None:
        """Forget the merge buffers. The state after the last step is carried over to the next group."""
        comm, self.carried = self._group.comm, self.current.copied()
        if comm is not None:
            self.carried.origin = (comm.rank, comm.size)
        self.buffers = self.plans = None


def observing(config: Config, on: bool) -> Config:
    """Return ``config`` with a sparsifier that records figures of its selections (``on``), or without. Nothing else."""
    compressor, sparsifier = config.compression.compressor, config.compression.compressor.part(Kind.SPARSE)
    if sparsifier is None:
        return config
    bare = cast(Sparsifier, sparsifier.unobserved)
    return config.changed(compressor=compressor.replaced(Observed(bare) if on else bare))


def is_observed(config: Config) -> bool:
    """Return whether figures of selections are recorded."""
    sparsifier = config.compression.compressor.part(Kind.SPARSE)
    return sparsifier is not None and sparsifier.unobserved is not sparsifier
