"""Measure the first steps, plan by them, and look again every so often: what changes a plan, and when.

Everything here happens between steps, at steps that every rank counts alike, with nothing in flight. Rank 0
decides from what all ranks have told; a plan is checked by every rank against its own model before it is used.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

import merging
from agmerge.backends.handshake import gather_bytes
from agmerge.exchanges.message.format import slot_bytes
from agmerge.exchanges.routing import AHEAD
from agmerge.metrics.clock import Seconds
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.options.config import AUTO
from agmerge.planning.cost_probe import MeasuredCosts, probe
from agmerge.planning.cutoff_choice import settle
from agmerge.planning.plan_trial import Trial
from agmerge.step.agreement import broadcast_json, raise_on_all_ranks, why_plan_does_not_fit, with_mode
from agmerge.step.gradient_energy import Energies, left_behind
from agmerge.step.merge_buffers import SPARSE, MergeBuffers
from merging import Measurements
from merging.budgets import loads
from merging.measured import sent_whole

FIRST = 10  # steps that are measured before the first plan
STEADY = (0.8, 1.25)  # an exchange within these, of what it took after the plan was made, is as it was
LATE = 0.15  # of the finish: backward that moved by less is as it was
DOUBTFUL = 1.5  # times as late: a plan that is predicted to end later is not tried
SPREAD = 10.0  # by importance, a tensor's density is at most so many times the mean, and at least 1 / so many
TWICE = 2  # looks in a row that must see a change
KEEP, PLAN, PROBE = range(3)  # what a look finds: all is well; plan anew; measure costs anew, then plan


class Replanner:
    """The planner of one session at work. ``measured``: what the plan in use was made from."""

    def __init__(self, session: MergeBuffers, averages: RunningStepTimes) -> None:
        self.session, self.averages = session, averages
        self.measured: Measurements | None = None
        self._latest: Measurements | None = None  # the last ones, from which no better plan came
        self._steps = 0
        self._usual = 1.0  # seconds of exchanges, measured / predicted, right after the plan was made
        self._seen: list[int] = []  # findings of the looks since then
        self._trial: Trial | None = None
        self._said = False

    def after_step(self, step: int) -> merging.Plan | None:
        """Collective. A new plan, now and then. ``step``: the one to come. All ranks count steps alike."""
        config, planner = self.session.config, self.session.config.planner
        by_times = planner is not None and planner.timed and config.groups is None
        self._steps += 1
        if self.session.energy is not None and self._steps == FIRST:
            self._share_out()
        if planner is None or self.session.comm.size == 1 or not (by_times or self._chooses):
            return None
        if self._latest is None:
            return self._first(planner, step) if self._steps == FIRST else None
        if self._trial is not None:
            return self._tried(self._trial)
        every = getattr(planner, "check_every", 0)
        if not every or self._steps % every:
            return None
        ready, travel = self._told(self.averages.ready(), self.averages.travel())
        self.averages.restart()
        finding = self._agree(self._look(ready.max(axis=0), travel, step) if self.session.comm.rank == 0 else KEEP)
        if finding == KEEP:
            return None
        return self._plan(planner, self._measure(step, ready.max(axis=0), probing=finding == PROBE))

    def _first(self, planner: merging.Planner, step: int) -> merging.Plan | None:
        """The first plan. Collective."""
        latest = self._measure(step)
        rule = self.session.config.partial
        if rule is not None and not rule.settled:
            if settle(self.session, self._by_groups(planner), latest):
                return None  # the session ends here; the next one measures and plans
        return self._plan(planner, latest)

    def _tried(self, trial: Trial) -> merging.Plan | None:
        """The trial's next plan, and in the end the fastest one, by the slowest rank. Collective at the end."""
        following = trial.after_step()
        if not trial.over:
            return following
        self._trial = None
        seconds = self._told(np.array(trial.seconds()))[0].max(axis=0)
        chosen = trial.plans[self._agree(int(seconds.argmin()))]
        if all(chosen.dense):
            compressed = min(took for took, plan in zip(seconds, trial.plans, strict=True) if not all(plan.dense))
            self._say(f"{1e3 * seconds.min():.3g} ms a step, compressed {1e3 * compressed:.3g} ms")
        self.averages.restart()
        self._steps = FIRST
        return chosen if chosen != self.session.plan else None

    def _say(self, figures: str) -> None:
        if self.session.comm.rank == 0 and not self._said:
            self._said = True
            warnings.warn(
                f"agmerge sends gradients dense, which is faster on this machine and network: {figures}. Nothing is "
                "compressed; exchange='sparse' compresses always",
                stacklevel=2,
            )

    def measure(self, step: int) -> Measurements:
        """Collective. Measure now; the plan stays. Collective."""
        latest = self._measure(step)
        told = broadcast_json(self.session.comm, {"measured": latest.dumps()}, self.session.config.timeout)
        self.measured = self._latest = Measurements.loads(told["measured"])
        self._seen = []
        return self.measured

    @property
    def _chooses(self) -> bool:
        """Whether merge buffers go dense or sparse by what that costs."""
        config = self.session.config
        return config.exchange == AUTO and config.sparsifier is not None

    def _share_out(self) -> None:
        """Give every sparse tensor its number of elements, by the energy of all ranks' gradients. Collective."""
        session, sparsifier = self.session, self.session.config.sparsifier
        assert session.energy is not None and sparsifier is not None
        (energy,) = self._told(session.energy.of(session.layout.slots))
        session.energy = None
        slots = [slot for slot in session.layout.slots if slot.lane.sparse]
        mean = np.where(np.isfinite(energy), energy, 0.0).mean(axis=0)
        density = sparsifier.density
        energies, numel = [mean[slot.index] for slot in slots], [slot.numel for slot in slots]
        given = loads(numel, energies, density, least=density / SPREAD, most=min(1.0, density * SPREAD))
        shares = [0] * len(session.layout.slots)
        for slot, elements in zip(slots, given.tolist(), strict=True):
            shares[slot.index] = max(1, elements)
        told = broadcast_json(session.comm, {"shares": shares}, session.config.timeout)
        session.shares = tuple(told["shares"])

    # -- what is measured -----------------------------------------------------------------------------------

    def _measure(self, step: int, ready: Seconds | None = None, *, probing: bool = True) -> Measurements:
        """All that planning needs, the same on every rank but for rounding: rank 0's counts."""
        if ready is None:
            ready = self._told(self.averages.ready())[0].max(axis=0)
            self.averages.restart()
        if probing or self._latest is None:
            typical = self.averages.typical()
            finish = self._told(np.array([0.0 if typical is None else typical.finish]))[0].max()
            found = probe(self.session, step, float(ready[-1]), float(finish))
        else:
            was = self._latest
            found = MeasuredCosts(was.sparsify, was.exchange, was.dense, was.message)
        config = self.session.config
        return Measurements(
            profile=profile(self.session, ready, step, self._noise()),
            **found._asdict(),
            modes=config.modes,
            workers=self.session.comm.size,
            facts=(
                ("backend", self.session.comm.name),
                ("compressor", repr(config.sparsifier or config.cast)),
                ("step", str(step)),
                ("torch", torch.__version__),
            ),
        )

    def _noise(self) -> Energies | None:
        """What selection leaves behind of each tensor, the mean over ranks; None where nothing is kept."""
        slots = self.session.layout.slots
        kept = {name: tensor for (kind, name), tensor in self.session.state().items() if kind == "residual"}
        mine = left_behind(slots, kept if self.session.config.sparsifier is not None else {})
        mean = self._told(mine)[0].mean(axis=0)
        return mean if np.isfinite(mean).all() and mean.any() else None

    def _told(self, *mine: Seconds) -> list[Seconds]:
        """What every rank has measured: one array of shape (W, ...) for each argument."""
        data = np.concatenate(mine).astype(np.float64).tobytes()
        comm, timeout = self.session.comm, self.session.config.timeout
        rows = np.array([np.frombuffer(row) for row in gather_bytes(comm, data, "times", timeout)])
        return np.split(rows, np.cumsum([len(part) for part in mine])[:-1], axis=1)

    # -- what is decided ------------------------------------------------------------------------------------

    def _look(self, ready: Seconds, travel: Seconds, step: int) -> int:
        """Rank 0's finding. The rank that came last to an exchange saw it as it is; the others waited for that one."""
        assert self._latest is not None
        ratio = float(travel.min(axis=0).sum() / takes(self.session.plan, self._latest).sum())
        if not self._seen:
            self._usual = ratio
        finding = KEEP
        was = self._latest.profile
        if not np.array_equal(profile(self.session, ready, step).load, was.load):
            return PLAN  # another density: no doubt about it
        if abs(ready[-1] - was.backward.sum()) > LATE * finish(self.session.plan, self._latest):
            finding = PLAN
        if not STEADY[0] <= ratio / self._usual <= STEADY[1]:
            finding = PROBE
        self._seen.append(finding)
        lately = self._seen[-TWICE:]
        return min(lately) and max(lately) if len(lately) == TWICE else KEEP

    def _agree(self, finding: int) -> int:
        told = torch.tensor([finding], dtype=torch.int64)
        self.session.comm.broadcast(told, 0, "finding").wait(self.session.config.timeout)
        return int(told)

    def _plan(self, planner: merging.Planner, latest: Measurements) -> merging.Plan | None:
        """Rank 0 plans; the plan, what it was made from, and its rivals travel, and every rank checks them. Collective.

        Where merge buffers go dense or sparse by choice, a new plan has to show what it promises, see ``_rivals``.
        """
        comm, timeout, plan = self.session.comm, self.session.config.timeout, self.session.plan
        told: dict[str, Any] = {}
        if comm.rank == 0:
            try:
                chosen = self._better(planner, latest)
                tried = [chosen, *self._rivals(planner, latest, chosen)]
                told = {"plans": [one.dumps() for one in tried], "measured": latest.dumps()}
            except Exception as error:  # the others wait for word: whatever it is, they get it
                told = {"problem": f"{planner!r}: {error}"}
        told = broadcast_json(comm, told, timeout)
        names = [slot.name for slot in self.session.layout.slots]
        plans = [merging.Plan.loads(text) for text in told.get("plans", ())]
        raise_on_all_ranks(
            comm,
            told.get("problem") or next(filter(None, (why_plan_does_not_fit(one, names) for one in plans)), ""),
            timeout,
        )
        chosen, self._latest, self._seen = plans[0], Measurements.loads(told["measured"]), []
        if len(plans) > 1:
            self._trial = Trial(*plans)
        elif all(chosen.dense) and self._chooses:
            self._say(f"predicted to end after {1e3 * finish(chosen, self._latest):.3g} ms")
        if self.measured is None or chosen != plan:
            self.measured = self._latest
        return chosen if chosen != plan else None

    def _better(self, planner: merging.Planner, latest: Measurements) -> merging.Plan:
        """The planner's plan, or after the first one the plan in use, unless a new one gains enough."""
        chosen, current = self._planned(planner, latest), self.session.plan
        gain = getattr(planner, "gain", 0.0)
        if self.measured is not None and finish(current, latest) <= finish(chosen, latest) * (1 + gain):
            return current
        return chosen

    def _by_groups(self, planner: merging.Planner) -> merging.Planner:
        """The planner, unless the script's groups say which tensors share a message."""
        return planner if self.session.config.groups is None else Fixed(counts=self.session.plan.counts)

    def _planned(self, planner: merging.Planner, latest: Measurements) -> merging.Plan:
        planner = self._by_groups(planner)
        plan, mode = merging.best(planner, latest)
        most = getattr(planner, "parts", 1) if SPARSE[self.session.config.exchange].pipelines_parts else 1
        return with_mode(merging.divide(plan, latest.profile, latest.costs, mode, most) if most > 1 else plan, mode)

    def _rivals(self, planner: merging.Planner, latest: Measurements, chosen: merging.Plan) -> list[merging.Plan]:
        """What is tried beside a new plan: all dense and all compressed, if predicted to end not much later."""
        if latest.dense is None or (self.measured is not None and chosen == self.session.plan):
            return []
        others = [all_dense(self._by_groups(planner), latest), self._planned(planner, replace(latest, dense=None))]
        bound = DOUBTFUL * finish(chosen, latest)
        return [one for one in others if one != chosen and finish(one, latest) < bound]


@dataclass(frozen=True, repr=False, kw_only=True)
class Fixed(merging.Planner):
    """The partition that there is."""

    name: ClassVar[str] = "fixed"
    timed: ClassVar[bool] = False
    counts: tuple[int, ...]

    def partition(self, profile: merging.Profile, costs: merging.Costs, mode: str) -> merging.Plan:
        return merging.Plan(self.counts)


def mode(plan: merging.Plan, measured: Measurements) -> str:
    """How ``plan`` is to be predicted."""
    return AHEAD if plan.labels[0] == AHEAD else next(mode for mode in measured.modes if mode != AHEAD)


def finish(plan: merging.Plan, measured: Measurements) -> float:
    """When the last exchange is predicted to end."""
    return merging.predict(plan, measured.profile, measured.costs, mode(plan, measured)).finish


def all_dense(planner: merging.Planner, measured: Measurements) -> merging.Plan:
    """The planner's plan if everything went dense."""
    whole = sent_whole(measured)
    plan = planner.plan(whole.profile, whole.costs, "dense")
    return replace(with_mode(plan, "behind"), dense=(True,) * len(plan.counts))


def takes(plan: merging.Plan, measured: Measurements) -> Seconds:
    """The seconds that each merge buffer's exchange is predicted to take, (m,)."""
    timeline = merging.predict(plan, measured.profile, measured.costs, mode(plan, measured))
    return np.array([span.end - span.start for span in timeline.spans])


def profile(session: MergeBuffers, ready: Seconds, step: int, noise: Energies | None = None) -> merging.Profile:
    """The tensors of a session, ready at these times. A load is in selected elements, index and value as they
    are sent; an element that is sent whole has no index, and counts by its bytes."""
    names, numel, work, load = [], [], [], []
    selects = session.config.sparsifier is not None and any(lane.sparse for lane in session.arenas)
    unit = _element_bytes(session, step) if selects else 0.0
    for slot in session.layout.slots:
        sparse = slot.lane.sparse and selects
        names.append(slot.name)
        numel.append(slot.numel)
        work.append(slot.numel if sparse else 0)
        whole = math.ceil(slot.numel * slot.lane.dtype.itemsize / unit) if selects else slot.numel
        load.append(min(session.tensor_budget(slot, step), slot.numel) if sparse else whole)
    return merging.Profile(names, numel, np.diff(ready, prepend=0.0), work=work, load=load, noise=noise)


def _element_bytes(session: MergeBuffers, step: int) -> float:
    """What a selected element of the largest sparse lane takes in a message, index and value, about."""
    lane, length = max(
        ((lane, length) for lane, length in session.layout.lengths.items() if lane.sparse), key=lambda pair: pair[1]
    )
    count = sum(session.tensor_budget(slot, step) for slot in session.layout.slots if slot.lane == lane)
    return slot_bytes(length, min(count, length), lane.dtype, session.config.wire)
