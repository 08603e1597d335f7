# SPDX-License-Identifier: Apache-2.0
"""State that the ranks of one exchange have agreed on: tensors, merge buffers, plan, and what is measured of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch

import merging
from agmerge.backends.handshake import Fact, require_agreement
from agmerge.metrics.chrome_trace import Trace
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.metrics.totals import Totals
from agmerge.step.agreement import check_shapes, model_facts, open_merge_buffers
from agmerge.step.announcer import Announcer
from agmerge.step.carried_state import CarriedState
from agmerge.step.config import Config
from agmerge.step.dense_cutoff import DenseCutoff
from agmerge.step.group import Group
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.plan_status import PlanStatus
from agmerge.step.treatments import assign_classes, check_parameter, with_cutoff_for
from agmerge.tensors.layout import Slot
from agmerge.tensors.parameters import ParameterInfo, check_spread_alike
from sparsifiers import Kind, Sparsifier
from sparsifiers.observed import Observed


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
            group, self.config, members, order, self.steps, carried, self.totals.left
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
        """Start or stop recording figures of every selection: see :class:`sparsifiers.observed.Observed`."""
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
