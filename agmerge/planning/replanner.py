"""Changes between steps: measure the first steps, plan, and check times again later.

Everything here happens at steps that every rank counts alike, with nothing in flight. Rank 0 decides from the
measurements of all ranks; a plan is checked by every rank against its own model before it is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import merging
from agmerge.exchanges.send_mode import send_mode
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.planning import candidates, plan_trial, quantiser_choice, wire_choice
from agmerge.planning.candidates import Candidate, Search
from agmerge.planning.codec_costs import measure_codecs
from agmerge.planning.cost_probe import MeasuredCosts
from agmerge.planning.drift import DriftDetector, Finding
from agmerge.planning.earlier_run import EarlierRun
from agmerge.planning.first_choices import choose_budgets, choose_cutoff
from agmerge.planning.known_plans import KnownPlan
from agmerge.planning.measurer import Measurer
from agmerge.planning.measuring import gather_seconds, number_of_rank_0, profile
from agmerge.planning.plan_choice import FixedCounts, planner_of, predicted_finish
from agmerge.planning.plan_trial import PlanTrial
from agmerge.planning.probe_budget import share_of
from agmerge.planning.quantiser_choice import QuantiserSearch, Settled
from agmerge.planning.quantiser_costs import measure_quantisers
from agmerge.step.agreed_state import Decision
from agmerge.step.agreement import decide_on_rank_0, why_plan_does_not_fit
from agmerge.step.config import AUTO
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.plan_status import PlanStatus
from merging import Measurements
from sparsifiers import Kind
from sparsifiers.quantising.choice import NONE

FIRST = 10  # steps that are measured before the first plan
_DONE = Decision()  # an activity of several steps has ended
LOOKS = (5, FIRST)  # steps after which a plan of an earlier run is checked first: it may be for another network


class Replanner:
    """Driver of the planner of one agreement. ``measured``: the measurements behind the plan in use.

    ``measurer``: makes the measurements; None: one for merge buffers that are sent under backward alone.
    """

    def __init__(self, buffers: MergeBuffers, times: RunningStepTimes, measurer: Measurer | None = None) -> None:
        self.buffers, self.times = buffers, times  # read, and never changed here but for restart() of averages
        self._measurer = measurer or Measurer(buffers, times)
        self.measured: Measurements | None = None  # None before the first plan from times
        self._latest: Measurements | None = None  # the last ones, also if no better plan came from them
        self._steps = 0  # of this agreement
        self._drift = DriftDetector()  # asked on rank 0
        self._step = 0  # the one to come
        self._under_way: Iterator[Decision | None] | None = None  # probing and planning, over several steps
        self._trial: PlanTrial | None = None  # under way
        self._tried: list[Candidate] = []  # in the last trial, or chosen without one
        self._values: torch.Tensor | None = None  # sample of those that a step before planning has selected
        self._is_sampling = False  # whether the step to come makes that sample
        self._why = ""  # the reason for the value codec, of this agreement; "": it was not chosen
        self._why_exchange = ""  # step times by exchange, of this agreement; "": not known
        self._is_known = False  # the plan in use is one of an earlier run, and nothing has been measured in this one
        self._earlier = EarlierRun(buffers)
        kinds = {slot.lane.kind for slot in buffers.layout.slots}
        self._chooses = bool(buffers.config.quantisers) and Kind.QUANTISED in kinds  # the quantiser
        self._settled = Settled(buffers.plan, buffers.comm.size)
        self._planner = buffers.config.merging.planner  # None: plans are not made
        if self._planner is None and self._chooses and self._settled.is_open:  # of a plan that the script gives
            self._planner = FixedCounts(counts=buffers.plan.counts)

    def after_step(self, step: int) -> Iterator[Decision]:
        """Collective. Yield changes before ``step``, the one to come; at most steps there are none.

        Ranks communicate at steps that all of them count alike. The caller applies each decision before asking for the
        next one: costs are measured with the chosen budgets. A cutoff of another size is the last decision.
        """
        self._measurer.whole.end()
        self._step = step
        if self._is_sampling:
            values = self.buffers.store.end_sample()
            self._values = self._values if values is None else values  # a step that overflows has none
        yield from self._decide(step)
        plans_soon = self._under_way is not None or self._may_plan_after(self._steps + 1)
        self._is_sampling = bool(self.buffers.config.wires) and plans_soon
        if self._is_sampling:
            self.buffers.sample_values(step)
        self._measurer.whole.begin()

    def _decide(self, step: int) -> Iterator[Decision]:
        """Collective. Yield the decisions of :meth:`after_step`."""
        planner = self._planner
        self._steps += 1
        if self._steps == 1:
            self._settled.take_over(self.buffers.plan, step)
        if self.buffers.budgets.energy is not None and self._steps == FIRST:
            yield Decision(budgets=choose_budgets(self.buffers))
        if planner is None or not self._plans_by_times:
            return
        if self._steps == 1 and step == 1 and self._remembers(planner):
            yield self._recall()
        elif self._trial is not None:
            yield self._advance_trial(self._trial)
        elif self._under_way is not None:
            yield from self._go_on(self._under_way)
        elif self._may_plan_after(self._steps):
            if self._has_no_plan:
                yield from self._go_on(self._renew(planner, self._measurer.measure(step)))
            else:
                yield from self._recheck(planner, step)

    def _may_plan_after(self, steps: int) -> bool:
        """Return whether after so many steps of this agreement times are measured, or checked, for a plan."""
        planner = self._planner
        if planner is None or not self._plans_by_times:
            return False
        if self._has_no_plan:
            return steps == FIRST
        every = planner.recheck_every
        return bool(every) and (steps % every == 0 or (self._is_known and steps in LOOKS))

    @property
    def _has_no_plan(self) -> bool:
        """Return whether the first plan from times is to be made: the script may have measured for itself."""
        return self._latest is None or (self._chooses and self._settled.is_open)

    def measure(self, step: int) -> Measurements:
        """Collective. Measure now, for reports, and return the measurements; the plan stays."""
        *_, latest = self._measurer.measure(step, at_once=True)
        assert latest is not None
        decision = decide_on_rank_0(
            self.buffers.comm, lambda: {"measured": latest.dumps()}, None, self.buffers.config.guards.timeout
        )
        self.measured = self._latest = Measurements.loads(decision["measured"])
        self._drift.restart()
        return self.measured

    def status(self) -> PlanStatus:
        """Return the activity of planning, and what is in use for which reason."""
        quantiser = None if all(self.buffers.plan.dense) else self.buffers.quantiser
        return PlanStatus(
            wire=self.buffers.wire,
            wire_why=self.why_wire,
            exchange=self.buffers.exchange,
            exchange_why=self.why_exchange,
            quantiser=quantiser.name if quantiser is not None else NONE,
            bits=quantiser.bits if quantiser is not None else None,
            quantiser_why=self.why_quantiser,
            activity=self.state,
            bytes_probed=self._measurer.bytes_probed,
            measured=self.measured,
        )

    @property
    def state(self) -> str:
        """Return the activity: "timing" the first steps, "probing", "trying", "known", "settled", or "fixed": none."""
        if not self._plans_by_times:
            return "fixed"
        if self._trial is not None:
            return "trying"
        if self._under_way is not None:
            return "probing"
        if self._is_known:
            return "known"
        return "timing" if self._latest is None else "settled"

    @property
    def why_wire(self) -> str:
        """Return the reason for the value codec in use."""
        config, given = self.buffers.config, self.buffers.config.compression.wire
        if not config.wires:
            return "these options leave no choice" if given == AUTO else f"wire={given!r} was given"
        return self._why_undecided or self._why or "nothing has been measured since ranks agreed"

    @property
    def why_exchange(self) -> str:
        """Return the reason for the exchange in use."""
        config = self.buffers.config
        if not config.exchanges:
            given = f"exchange={config.merging.exchange!r} was given"
            return f"{given}: {self._why_exchange}" if config.chooses_dense and self._why_exchange else given
        return self._why_undecided or self._why_exchange or "no other one was tried"

    @property
    def why_quantiser(self) -> str:
        """Return the reason for the quantiser in use."""
        if not self._chooses:
            return "it was named" if self.buffers.quantiser is not None else "nothing is quantised"
        if self._settled.is_open:
            return "nothing has been chosen so far"
        return self._settled.why or "it was settled on before, among as many workers"

    @property
    def _why_undecided(self) -> str:
        """Return why this run has not chosen a codec or exchange; empty: it has chosen, or will."""
        if not self._plans_by_times:
            return "nothing is planned from times"
        return "it was settled on in an earlier run" if self._is_known else ""

    @property
    def _plans_by_times(self) -> bool:
        """Return whether there is anything to plan from times."""
        config, planner = self.buffers.config, self._planner
        if planner is None or self.buffers.comm.size == 1:
            return False
        return (planner.timed and config.merging.groups is None) or config.chooses_dense or self._chooses

    # -- plans of an earlier run -----------------------------------------------------------------------------------

    def _remembers(self, planner: merging.Planner) -> bool:
        """Return whether an earlier run's plan may be used: it is checked again, and nothing else is decided here.

        A checkpoint brings a plan of its own: only the first step of a training asks.
        """
        config = self.buffers.config
        decides_more = config.compression.partial is not None or self.buffers.budgets.energy is not None
        return bool(planner.recheck_every) and config.merging.groups is None and not decides_more

    def _recall(self) -> Decision:
        """Collective. Change to the plan that an earlier run like this one has kept, if there is one."""
        known = self._earlier.recall()
        if known is None:
            return Decision()
        self.measured = self._latest = known.measured
        self._is_known = True
        self._settled.take_over(known.plan, self._step)
        self._drift.restart(known.ratio)
        return self._changed_to(known.plan)

    def _keep(self) -> None:
        """Keep the plan in use for later runs, once it was checked and stays. On rank 0."""
        ratio = self._drift.usual_ratio
        if self._latest is not None and ratio is not None and not self._is_known:
            self._earlier.keep(KnownPlan(self.buffers.plan, self._latest, ratio))

    # -- when it plans --------------------------------------------------------------------------------------

    def _go_on(self, under_way: Iterator[Decision | None]) -> Iterator[Decision]:
        """Collective. Continue an activity of several steps, and yield its decisions once it has any."""
        self._under_way, began = under_way, time.time()
        part = next(under_way, None)
        if self.times.trace is not None:
            self.times.trace.note("probe", began, time.time() - began)
        while part is not None:
            yield part
            part = next(under_way, _DONE)
            if part is _DONE:
                self._under_way = None
                return

    def _renew(self, planner: merging.Planner, measuring: Iterator[Measurements | None]) -> Iterator[Decision | None]:
        """Collective. Measure and plan, a part at each ``next``, and yield None; yield the changes last.

        Before the first plan that may be the cutoff of dense="partial", if it is still to be chosen.
        """
        is_first, latest = self._latest is None, None
        for latest in measuring:
            if latest is None:
                yield None
        assert latest is not None
        cutoff = self.buffers.config.compression.partial
        if is_first and cutoff is not None and not cutoff.final:
            chosen = choose_cutoff(self.buffers, planner_of(self.buffers, planner), latest)
            yield Decision(cutoff=chosen)
            if chosen.elements != cutoff.elements:
                return  # this agreement ends here; the next one measures and plans
        yield from self._plan(planner, latest)

    def _recheck(self, planner: merging.Planner, step: int) -> Iterator[Decision]:
        """Collective. Compare times with the prediction, and plan again, or probe first, where they have changed."""
        look, finding = self._measurer.look(), Finding.KEEP
        assert self._latest is not None
        if self.buffers.comm.rank == 0:
            load = profile(self.buffers, look.ready, step).load
            finding = self._drift.look(self.buffers.plan, self._latest, look.ready, look.travel, load)
        finding = Finding(number_of_rank_0(self.buffers, finding))
        if self._settled.is_clear:  # a clear gain has to be seen twice
            finding = Finding.PROBE
        if finding is Finding.KEEP:
            self._keep()
            return
        if finding is Finding.PROBE and self._is_known:  # the earlier run's choice was for another network
            self._settled.reopen()
        if finding is Finding.PROBE:
            yield from self._go_on(self._renew(planner, self._measurer.measure(step, look)))
        else:
            known = self._latest
            costs = MeasuredCosts(known.sparsify, known.exchange, known.dense, known.message)
            yield from self._go_on(self._plan(planner, self._measurer.with_costs(step, look.ready, costs)))

    def _advance_trial(self, trial: PlanTrial) -> Decision:
        """Collective. Return the trial's next plan, and at its end the one to continue with, by the slowest rank."""
        if not trial.count_step():
            return Decision()
        following = number_of_rank_0(self.buffers, trial.following())
        if following >= 0:
            return self._changed_to(trial.begin_turn(following))
        self._trial = None
        columns = gather_seconds(self.buffers, np.array(trial.seconds()), np.array(trial.doubts()))
        seconds, doubts = (every.max(axis=0) for every in columns)
        number = number_of_rank_0(self.buffers, self._best_of_trial(seconds.tolist(), doubts.tolist()))
        taken = self._tried[number]
        plan, self.measured, self._latest = self._settle_on(taken), taken.measured, taken.measured
        if self._chooses:
            self._settled.why = quantiser_choice.why(self._tried, seconds.tolist())
        else:
            self._why = candidates.why(self._tried, seconds.tolist(), number)
            self._why_exchange = candidates.why_exchange(self._tried, seconds.tolist())
        self.times.restart()
        self._steps = FIRST
        return self._changed_to(plan)

    def _best_of_trial(self, seconds: list[float], doubts: list[float]) -> int:
        """Return the number of the candidate to continue with.

        ``seconds``, ``doubts``: of a step, on the slowest rank.
        """
        if self._chooses:
            return self._settled.best(
                self._tried, self.buffers.config.compression.compressor.candidates, seconds, doubts
            )
        best = wire_choice.best(seconds, [each.delivered for each in self._tried])
        return plan_trial.taken(best, seconds, doubts)

    def _settle_on(self, taken: Candidate) -> merging.Plan:
        """Return the plan of a candidate, and record it as the choice."""
        return self._settled.settle(taken, self._step) if self._chooses else taken.plan

    # -- decisions ------------------------------------------------------------------------------------------

    def _plan(self, planner: merging.Planner, latest: Measurements) -> Iterator[Decision | None]:
        """Collective. Plan on rank 0, a part at each ``next``, and yield None; yield the change last, if there is one.

        Every rank checks the plans, which travel with their measurements. Where the planner chooses between dense and
        sparse merge buffers, a new plan has to prove its gain in a trial beside its alternatives.
        """
        buffers, usual = self.buffers, self._measurer.whole.typical()
        names, share = [slot.name for slot in buffers.layout.slots], share_of(usual)
        codecs = measure_codecs(buffers, self._values, self._step) if buffers.config.wires else {}
        speeds = measure_quantisers(buffers, self._quantisers()) if self._chooses else {}
        if (codecs or speeds) and share < math.inf:  # measuring took time, too
            yield None
        search: Search | QuantiserSearch
        if self._chooses:
            search = QuantiserSearch(planner, buffers, latest, speeds, self._step, usual, self._settled)
        else:
            search = Search(planner, buffers, latest, codecs, self._step, usual, stays=self.measured is not None)

        def decide() -> dict[str, Any]:
            found = search.go_on(share)
            return {} if found is None else candidates.dumps(found)

        def reject(decision: dict[str, Any]) -> str:
            found = candidates.loads(decision) if decision else []
            return next(filter(None, (why_plan_does_not_fit(each.plan, names) for each in found)), "")

        who, timeout = repr(planner), buffers.config.guards.timeout
        while not (decision := decide_on_rank_0(buffers.comm, decide, reject, timeout, decider=who)):
            yield None
        self._is_known = False
        self._tried = candidates.loads(decision)
        chosen, self._latest = self._tried[0].plan, self._tried[0].measured
        if len(self._tried) == 1:
            if self._chooses and self._settled.is_open:
                self._settled.why = quantiser_choice.HOPELESS_OTHERS
            chosen = self._settle_on(self._tried[0])
        self._drift.restart()
        if buffers.config.wires:
            self._why = candidates.why_without_trial(self._tried[0], bool(codecs))
        if len(self._tried) > 1:
            self._trial = PlanTrial(*(each.plan for each in self._tried))
        elif all(chosen.dense) and buffers.config.chooses_dense and not self._chooses:
            finish = predicted_finish(chosen, self._latest)
            self._why_exchange = f"dense is predicted to end after {1e3 * finish:.3g} ms, before anything else"
        change = self._changed_to(chosen)
        if self.measured is None or change.plan is not None:
            self.measured = self._latest
        yield change

    def _quantisers(self) -> list[str]:
        """Return the names of all quantisers among the candidates, and of the one in use."""
        assert self.buffers.quantiser is not None
        return list(dict.fromkeys([*self.buffers.config.quantisers, self.buffers.quantiser.name]))

    def _changed_to(self, plan: merging.Plan) -> Decision:
        """Return the decision for ``plan``: none if it is the one in use. A new codec is noted in the trace."""
        codec = send_mode(plan).codec
        if self.times.trace is not None and codec != send_mode(self.buffers.plan).codec:
            self.times.trace.note(f"values in {candidates.named(codec)}", time.time(), 0.0)
        return Decision(plan=plan if plan != self.buffers.plan else None)
