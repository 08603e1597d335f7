# SPDX-License-Identifier: Apache-2.0
"""Changes between steps: measure the first steps, plan, and check times again later.

Everything here happens at steps that every rank counts alike, with nothing in flight. Rank 0 decides from the
measurements of all ranks; a plan is checked by every rank against its own model before it is used.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

import merging
from agmerge.exchanges.routing import OWN, send_mode
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.planning import plan_trial
from agmerge.planning.choice import Choice, FixedCounts, planner_of, status_of
from agmerge.planning.coding import CountedZeros
from agmerge.planning.cost_probe import MeasuredCosts, gather_seconds, share_of
from agmerge.planning.measuring import DriftDetector, Finding, Look, Measurer, profile
from agmerge.planning.plan_trial import Candidate, PlanTrial
from agmerge.step.agreed_state import Decision, decide_on_rank_0, why_plan_does_not_fit
from agmerge.step.density_policy import DenseCutoff, budgets_by_energy
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.plan_status import Activity, PlanStatus
from merging import Measurements, dense_cutoff
from merging.pieces import go_on, run_to_end
from sparsifiers import Kind

FIRST = 10  # steps that are measured before the first plan
LIKELY = 70  # steps after which the first choice has been made, in most runs: measuring, probing, a trial of three
Changes = Iterator[Decision | None]
"""Decisions for the step to come; None: continue after that step."""


class Replanner:
    """Driver of the planner of one agreement.

    ``measurer``: makes the measurements; None: one for merge buffers that are sent under backward alone.
    """

    def __init__(self, buffers: MergeBuffers, times: RunningStepTimes, measurer: Measurer | None = None) -> None:
        self.buffers, self.times = buffers, times  # read, and never changed here but for restart() of averages
        self._measurer = measurer or Measurer(buffers, times)
        self._measured: Measurements | None = None  # behind the plan in use; None before the first plan from times
        self._latest: Measurements | None = None  # the last ones, also if no better plan came from them
        self._steps = 0  # of this agreement
        self._step = 0  # the one to come
        self._drift = DriftDetector()  # asked on rank 0
        self._tried: Sequence[Candidate] = ()  # in the last trial, or chosen without one
        self._trial: PlanTrial | None = None  # of these, while it is under way
        self._resumed = ""  # a trial of an earlier run, until the first step has ended
        self._hurries = False  # that run has ended while it measured: now costs are measured at once
        config, kinds = buffers.config, {slot.tensor_class.kind for slot in buffers.layout.slots}
        quantises = bool(config.quantisers) and Kind.QUANTISED in kinds
        self._zeros = CountedZeros(buffers)
        self._choice = Choice(buffers, self._zeros if quantises else None)
        planner = config.merging.planner  # None: the script gives a plan, of which only the quantiser may be open
        self._planner = planner or FixedCounts(counts=buffers.plan.counts)
        has_planner = planner is not None or (quantises and self._choice.is_open)
        makes_plans = (self._planner.timed and config.merging.groups is None) or config.chooses_dense or quantises
        self._activity = Activity.TIMING if has_planner and makes_plans and buffers.comm.size > 1 else Activity.FIXED
        self._changes: Changes = Replanner._run(weakref.proxy(self))

    def after_step(self, step: int) -> Iterator[Decision]:
        """Collective. Yield changes before ``step``, the one to come; at most steps there are none.

        Ranks communicate at steps that all of them count alike. The caller applies each decision before asking for the
        next one: costs are measured with the chosen budgets. A cutoff of another size is the last decision.
        """
        self._measurer.whole.end()
        self._zeros.end_step()
        self._step, self._steps = step, self._steps + 1
        if self.buffers.budgets.energy is not None and self._steps == FIRST:
            yield Decision(budgets=self._budgets())
        while (change := next(self._changes, None)) is not None:
            yield change
        plans_next = self._activity is Activity.PROBING or self._is_due(self._steps + 1)
        self._zeros.begin_step(plans_next and self._choice.quantises)
        self._measurer.whole.begin()

    def resume(self, trial: str) -> None:
        """Go on, after the first step, with a trial of an earlier run, if it was made here. The same on all ranks."""
        self._resumed = trial

    def trial(self) -> str:
        """Return the trial that is under way, as text; "" if none is."""
        if self._trial is not None:
            return plan_trial.kept(self.buffers, self._tried, self._trial.saved())
        is_first = self._hurries or (self._activity is Activity.PROBING and self._latest is None)
        return plan_trial.kept(self.buffers, [], {}) if is_first else self._resumed

    def measure(self, step: int) -> Measurements:
        """Collective. Measure now, for reports, and return the measurements; the plan stays."""
        latest = run_to_end(self._measurer.measure(step, at_once=True))
        text = self._decided(lambda: {"measured": latest.dumps()})["measured"]
        self._measured = self._latest = Measurements.loads(text)
        self._activity = Activity.SETTLED if self._activity is Activity.TIMING else self._activity
        self._drift = DriftDetector()
        return self._measured

    def status(self) -> PlanStatus:
        """Return the activity of planning, and what is in use for which reason."""
        first = self._step - self._steps + 1  # step of this agreement, counted from 1
        likely = LIKELY + self._first - FIRST
        until = first + likely - first % 10 if self._steps < likely else self._step + FIRST
        probed = self._measurer.bytes_probed
        return status_of(self.buffers, self._choice, self._activity, self._measured, probed, until)

    @property
    def is_decided(self) -> bool:
        """Return whether the plan in use was chosen from times, and stays for now."""
        if self._choice.is_open or self.buffers.comm.size == 1:
            return False
        if self.buffers.config.quantisers:  # the quantizer stays, whatever is measured of merge buffers
            return self._activity is not Activity.TRYING
        return self._activity is Activity.SETTLED

    # -- when something happens ---------------------------------------------------------------------------------

    def _run(self) -> Changes:
        """Collective. Yield all changes of this agreement, and None at the end of each step.

        ``self`` is a weak proxy, here and in trials: a generator that held what holds it would keep the memory of an
        earlier agreement until a collection.
        """
        self._choice.take_over(self.buffers.plan, self._step)
        if self._activity is Activity.FIXED:
            return
        if self._resumed:
            yield from Replanner._go_on_trying(self)
            yield None
        while True:
            if self._is_due(self._steps):
                if self._has_no_plan:
                    yield from self._noted(self._measure_and_plan())
                else:
                    yield from self._recheck()
                if self._activity is Activity.TRYING:
                    yield from Replanner._try_in_turns(self)
            yield None

    def _is_due(self, steps: int) -> bool:
        """Return whether after so many steps of this agreement times are measured, or checked, for a plan."""
        if self._activity is Activity.FIXED:
            return False
        if self._has_no_plan:
            return steps == self._first
        every = self._planner.recheck_every
        return bool(every) and steps % every == 0

    @property
    def _first(self) -> int:
        """Return after how many steps of this agreement the first plan from times is made.

        Not while updates still arrive in time: later steps, which do not wait for them, can do with more bits.
        """
        updates = self.buffers.config.sync.updates
        if updates is None or not updates.overlap:
            return FIRST
        in_time = updates.in_time * updates.fragments // updates.every  # exchanges, as `_step` counts them
        return FIRST + max(0, in_time - (self._step - self._steps))

    @property
    def _has_no_plan(self) -> bool:
        """Return whether the first plan from times is to be made: the script may have measured for itself."""
        return self._latest is None or self._choice.is_open

    # -- what happens -------------------------------------------------------------------------------------------

    def _recheck(self) -> Changes:
        """Collective. Compare times with the prediction, and plan again, or probe first, where they have changed."""
        look, finding, latest = self._measurer.look(), Finding.KEEP, self._latest
        assert latest is not None
        if self.buffers.comm.rank == 0:
            load = profile(self.buffers, look.ready, self._step).load
            finding = self._drift.look(self.buffers.plan, latest, look.ready, look.travel, load)
        finding = Finding(self._of_rank_0(finding))
        # A clear gain has to be seen twice. Zeros may have come since, as of pruned weights.
        if self._choice.is_ruled_out() or self._choice.is_clear:
            finding = Finding.PROBE
        if finding is Finding.PROBE:
            yield from self._noted(self._measure_and_plan(look))
        elif finding is Finding.PLAN:
            costs = MeasuredCosts(latest.sparsify, latest.exchange, latest.dense, latest.message)
            yield from self._noted(self._plan(self._measurer.with_costs(self._step, look.ready, costs)))

    def _measure_and_plan(self, look: Look | None = None) -> Changes:
        """Collective. Measure, a part after each step, and plan. ``look``: the times of steps, where they are known.

        Before the first plan the cutoff of dense="partial" is chosen, if it still is to be.
        """
        self._activity, is_first = Activity.PROBING, self._latest is None
        latest = yield from self._measurer.measure(self._step, look, at_once=self._hurries)
        cutoff = self.buffers.config.compression.partial
        if is_first and cutoff is not None and not cutoff.final:
            elements = self._cutoff(latest)
            yield Decision(cutoff=DenseCutoff(elements, final=True))
            if elements != cutoff.elements:
                return  # this agreement ends here; the next one measures and plans
        yield from self._plan(latest)

    def _plan(self, latest: Measurements) -> Changes:
        """Collective. Plan on rank 0, a part after each step, and yield the change, if there is one.

        Every rank checks the plans, which travel with their measurements. Where the planner chooses between dense and
        sparse merge buffers, a new plan has to prove its gain in a trial beside its alternatives.
        """
        self._activity = Activity.PROBING
        buffers, usual = self.buffers, self._measurer.whole.typical()
        names, share = [slot.name for slot in buffers.layout.slots], math.inf if self._hurries else share_of(usual)
        self._hurries = False
        search = self._choice.search(self._planner, latest, self._step, usual)
        if share < math.inf:  # measuring codings has taken time, too
            yield None

        def decide() -> dict[str, Any]:
            found = go_on(search, share)
            return {} if found is None else plan_trial.dumps(found)

        def reject(decision: dict[str, Any]) -> str:
            found = plan_trial.loads(decision) if decision else []
            return next(filter(None, (why_plan_does_not_fit(each.plan, names) for each in found)), "")

        while not (decision := self._decided(decide, reject)):
            yield None
        self._tried = plan_trial.loads(decision)
        self._latest = self._tried[0].measured
        self._drift = DriftDetector()
        is_final = len(self._tried) == 1
        self._activity = Activity.SETTLED if is_final else Activity.TRYING
        plan = self._choice.settle(self._tried, 0, (), self._step) if is_final else self._tried[0].plan
        change = self._changed_to(plan)
        if self._measured is None or change.plan is not None:
            self._measured = self._latest
        yield change

    def _try_in_turns(self) -> Changes:
        """Collective. Train with each candidate in turn, and continue with the best one by the slowest rank."""
        tried = self._tried
        if self._trial is None:
            self._trial = PlanTrial(*(each.plan for each in tried))
        trial, following = self._trial, 0
        while following >= 0:
            yield None
            if trial.count_step():
                following = self._of_rank_0(trial.following())
                if following >= 0:
                    yield self._changed_to(trial.begin_turn(following))
        columns = gather_seconds(self.buffers, np.array(trial.seconds()), np.array(trial.doubts()))
        seconds, doubts = (every.max(axis=0).tolist() for every in columns)
        number = self._of_rank_0(self._choice.best(tried, seconds, doubts))
        self._measured = self._latest = tried[number].measured
        self._activity, self._steps, self._trial = Activity.SETTLED, FIRST, None
        self.times.restart()
        yield self._changed_to(self._choice.settle(tried, number, seconds, self._step))

    def _go_on_trying(self) -> Changes:
        """Collective. Go on with the trial of an earlier run, where it was made for these workers. Rank 0 decides."""
        kept, self._resumed = plan_trial.read(self._resumed, self.buffers), ""
        if kept is None or not self._of_rank_0(kept.fits):
            return
        if not kept.tried:
            self._hurries = True
            return
        self._tried = kept.tried
        self._latest, self._activity = self._tried[0].measured, Activity.TRYING
        self._trial = PlanTrial(*(each.plan for each in self._tried))
        yield self._changed_to(self._trial.resume(kept.turns))
        yield from Replanner._try_in_turns(self)

    def _changed_to(self, plan: merging.Plan) -> Decision:
        """Return the decision for ``plan``: none if it is the one in use. A new codec is noted in the trace."""
        codec = send_mode(plan).codec
        if self.times.trace is not None and codec != send_mode(self.buffers.plan).codec:
            name = "the gradient's own dtype" if codec == OWN else codec
            self.times.trace.note(f"values in {name}", time.time(), 0.0)
        return Decision(plan=plan if plan != self.buffers.plan else None)

    def _noted(self, changes: Changes) -> Changes:
        """Collective. Yield the same; the trace gets the time of probing and planning after each step."""
        began, begins = time.time(), True
        for change in changes:
            if begins and self.times.trace is not None:
                self.times.trace.note("probe", began, time.time() - began)
            yield change
            began, begins = time.time(), change is None

    # -- decisions of rank 0 ------------------------------------------------------------------------------------

    def _decided(
        self, decide: Callable[[], dict[str, Any]], reject: Callable[[dict[str, Any]], str] | None = None
    ) -> dict[str, Any]:
        """Collective. Return rank 0's decision: see :func:`agmerge.step.agreed_state.decide_on_rank_0`."""
        buffers = self.buffers
        return decide_on_rank_0(
            buffers.comm, decide, reject, buffers.config.guards.timeout, decider=repr(self._planner)
        )

    def _of_rank_0(self, number: int) -> int:
        """Collective. Return rank 0's ``number`` on every rank."""
        cell = torch.tensor([int(number)], dtype=torch.int64)
        self.buffers.comm.broadcast(cell, 0, "finding").wait(self.buffers.config.guards.timeout)
        return int(cell)

    def _budgets(self) -> tuple[int, ...]:
        """Collective. Return the elements that each tensor may send, by the energy of all ranks' gradients; for good.

        The counts are by slot; 0: nothing is selected.
        """
        slots, budgets = self.buffers.layout.slots, self.buffers.budgets
        assert budgets.energy is not None
        density = self.buffers.config.compression.density.target
        (energies,) = gather_seconds(self.buffers, budgets.energy.of(slots))
        return tuple(self._decided(lambda: {"budgets": budgets_by_energy(slots, energies, density)})["budgets"])

    def _cutoff(self, measured: Measurements) -> int:
        """Collective. Return the elements of the cutoff of ``dense="partial"`` that is predicted to be best; for good.

        The one in use is the largest that may be chosen, for tensors only become sparse. The compressor's density
        counts, not that of the step: a warm-up ends, the cutoff stays.
        """
        buffers, compression = self.buffers, self.buffers.config.compression
        assert compression.partial is not None and compression.partial.elements is not None
        in_use, density = compression.partial.elements, compression.density.target

        def decide() -> dict[str, int]:
            slots = buffers.flat.tensors.slots  # whole tensors, where ranks have shards of them
            sizes = [slot.numel for slot in slots]
            pairs = zip(slots, buffers.flat.locals, strict=True)
            exempt = [compression.dense(slot.name, local) for slot, local in pairs]
            if not dense_cutoff.feasible(sizes, exempt, density):
                return {"elements": in_use}
            planner = planner_of(buffers, self._planner)
            chosen = dense_cutoff.choose(planner, measured, sizes, exempt, density, in_use, planner.min_gain)
            return {"elements": chosen}

        elements: int = self._decided(decide, lambda decision: "")["elements"]
        return elements
