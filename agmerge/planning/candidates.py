"""Find the plans to try, with the value codec of each: on rank 0, from what all ranks have measured.

Beside the plan that is predicted to be the best is the one in use, for predictions may be wrong. Where merge buffers go
dense or sparse by choice, all dense and all compressed are, too; and where values may be rounded, the best one that
rounds them, or does not, whichever the first one is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import merging
from agmerge.exchanges.message.values import value_codec
from agmerge.exchanges.traffic import exchanged_by
from agmerge.exchanges.way import OKTOPK, OWN, with_exchange, with_wire
from agmerge.planning import plan_trial, wire_choice
from agmerge.planning.cost_probe import measured_lane
from agmerge.planning.measuring import bytes_of_element, profile
from agmerge.planning.plan_choice import best_plan, planner_of, predicted_finish
from agmerge.planning.wire_choice import FAR, LEAST, Codec, in_wire
from agmerge.step.agreement import with_mode
from agmerge.step.merge_buffers import MergeBuffers
from merging import Measurements
from merging.measured import sent_whole


@dataclass(frozen=True)
class Candidate:
    """Hold one way to go on. Its plan's labels say how it sends, see :class:`agmerge.exchanges.way.Way`."""

    plan: merging.Plan
    measured: Measurements  # what is predicted of it goes by
    delivered: float = 1.0  # share of the energy of what is selected that receivers read
    wire: str = OWN  # the value codec of what is selected
    exchange: str = OWN  # of what is selected

    @property
    def finish(self) -> float:
        """Return when the last exchange is predicted to end, in seconds since backward began."""
        return predicted_finish(self.plan, self.measured)

    @property
    def shape(self) -> tuple[int, int, str, str]:
        """Return in how many messages it sends, how many of them whole, and how the others."""
        return sum(self.plan.parts), sum(self.plan.dense), self.wire, self.exchange

    @property
    def is_dense(self) -> bool:
        """Tell whether nothing is selected, so that the value codec has no say."""
        return all(self.plan.dense)


def dumps(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return candidates as what a record may hold: what several of them go by is in it once."""
    texts = {each.plan: each.measured.dumps() for each in candidates}
    distinct = list(dict.fromkeys(texts.values()))
    rows = [
        (each.plan.dumps(), distinct.index(texts[each.plan]), each.delivered, each.wire, each.exchange)
        for each in candidates
    ]
    return {"rows": rows, "measured": distinct}


def loads(record: Mapping[str, Any]) -> list[Candidate]:
    """Return the candidates that :func:`dumps` was given."""
    measured = [Measurements.loads(text) for text in record["measured"]]
    return [Candidate(merging.Plan.loads(plan), measured[index], *rest) for plan, index, *rest in record["rows"]]


class _Interrupted(Exception):
    """Say that there is no more time until after the next step."""


class Search:
    """Look for the plans to try, from one set of measurements, over several steps where that takes long.

    Args:
        planner: who makes plans.
        buffers: the merge buffers in use.
        latest: what was measured, in the value codec in use.
        codecs: those that may be taken, by name, with the one in use; the gradient's own dtype first. Empty: nothing is
            known, and the one in use stays.
        step: the one to come.
        usual: seconds of a step as it is.
    """

    def __init__(
        self,
        planner: merging.Planner,
        buffers: MergeBuffers,
        latest: Measurements,
        codecs: Mapping[str, Codec],
        step: int,
        usual: float,
    ) -> None:
        self._planner, self._buffers, self._latest, self._codecs, self._step = planner, buffers, latest, codecs, step
        self._known: dict[tuple[str, ...], merging.Plan] = {}  # what :meth:`_made` has
        self._measured = {buffers.wire: latest}  # as it would be in a codec, by name
        self._until, self._has_planned = 0.0, False  # when this part of the search ends, once it has made a plan
        self._rest = max(0.0, usual - predicted_finish(buffers.plan, latest))  # seconds of a step that no plan changes

    def to_try(self, seconds: float, *, stays: bool) -> list[Candidate] | None:
        """Return what to go on with, and after it what a trial compares it with; None: ask again after the next step.

        Args:
            seconds: that this may take now; one plan is made in any case.
            stays: the plan in use was made from times, and is kept where no other one is worth a change.
        """
        self._until, self._has_planned = time.perf_counter() + seconds, False
        try:
            chosen, current = self.chosen(), self.current()
            if stays and (chosen.plan == current.plan or not self.is_worth(chosen, current)):
                return [current]
            return [chosen, *self.others(chosen)]
        except _Interrupted:
            return None

    def _made(self, make: Callable[[], merging.Plan], *key: str) -> merging.Plan:
        """Return the plan of this name, which ``make`` makes unless it is there. Raises :class:`_Interrupted`."""
        if key not in self._known:
            if self._has_planned and time.perf_counter() > self._until:
                raise _Interrupted
            self._known[key], self._has_planned = make(), True
        return self._known[key]

    def current(self) -> Candidate:
        """Return the plan in use."""
        return self._candidate(self._buffers.plan, self._latest, self._buffers.wire)

    def chosen(self) -> Candidate:
        """Return the candidate with the fewest predicted seconds for what arrives."""
        ways = self._codings
        return ways[wire_choice.best([self._seconds(each) for each in ways], [each.delivered for each in ways])]

    def is_worth(self, chosen: Candidate, current: Candidate) -> bool:
        """Tell whether ``chosen`` gains so much over the plan in use that it is taken in its place."""
        gain = 1 + self._planner.min_gain
        if chosen.wire == current.wire or chosen.is_dense or current.is_dense:
            return not current.finish <= chosen.finish * gain
        if OWN in (chosen.wire, current.wire) or current.delivered < LEAST:
            return True  # whether rounding is worth it has been decided, with a margin
        scores = [self._seconds(each) / each.delivered for each in (current, chosen)]
        return not scores[0] <= scores[1] * gain

    def others(self, chosen: Candidate) -> list[Candidate]:
        """Return what to try beside ``chosen``: what is predicted to end not much later, the plan in use for one.

        That one is left out where as many messages that are sent alike are tried, and where a planner makes one plan.
        """
        doubted = bool(self._planner.recheck_every)  # what the plans of others promise is not
        found = [each for each in self._codings if each.wire != chosen.wire and (doubted or chosen.wire != OWN)]
        if chosen.measured.dense is not None:
            planner = planner_of(self._buffers, self._planner)
            whole = self._made(lambda: _all_dense(planner, chosen.measured), "dense", chosen.wire)
            found.append(self._candidate(whole, chosen.measured, OWN))
            found.append(self._best(chosen.wire, compressed=True))
        latest_end = plan_trial.DOUBTFUL * chosen.finish
        plans = {chosen.plan: chosen}
        for each in [*found, *self._sums(chosen)]:
            if each.finish < latest_end:
                plans.setdefault(each.plan, each)
        current = self.current()
        is_other = current.shape not in [each.shape for each in plans.values()]
        if doubted and is_other and current.finish < latest_end:
            plans[current.plan] = current
        return list(plans.values())[1:]

    def _seconds(self, candidate: Candidate) -> float:
        """Return the predicted seconds of a step."""
        return self._rest + candidate.finish

    def _sums(self, chosen: Candidate) -> list[Candidate]:
        """Return the best plan with each exchange that may take the place of the usual one, in the codec of ``chosen``.

        Those are left out that are not predicted to end before the usual one: of their later rounds it is predicted
        that backward hides them, too. Once one of them is in use, it stays: what the usual one takes is not measured.
        """
        buffers = self._buffers
        if buffers.exchange != OWN or not buffers.config.exchanges:
            return []
        usual = self._best(buffers.wire, compressed=True) if chosen.is_dense else chosen
        lane = measured_lane(buffers.layout)
        value = value_codec(usual.wire, lane.dtype)
        each = value.size(FAR) / FAR
        index = bytes_of_element(buffers, lane, self._step, usual.wire) - each
        found = []
        for name in buffers.config.exchanges if value.has_zero else (OKTOPK,):
            coded, curve = usual.wire != OWN, usual.measured.exchange
            measured = replace(
                usual.measured, exchange=exchanged_by(name, curve, buffers.across.size, index, each, coded=coded)
            )
            plan = self._made(partial(best_plan, self._planner, buffers, measured), "sum", name, usual.wire)
            found.append(self._candidate(plan, measured, usual.wire, name))
        return [each for each in found if each.finish < usual.finish and not each.is_dense]

    @cached_property
    def _codings(self) -> list[Candidate]:
        """Return the best plan in each value codec that comes into question: one that rounds nothing, one that does.

        The second is in the codec that is best with the plans that there are: planning for each would take long.
        """
        if not self._codecs:
            return [self._best(self._buffers.wire)]
        exact = self._best(OWN)
        enough = [codec for codec in self._codecs.values() if codec.wire != OWN and codec.delivered >= LEAST]
        if not enough:
            return [exact]
        sketches = [exact.plan]
        if any(exact.plan.dense):
            sketches.append(self._best(OWN, compressed=True).plan)
        finishes = [min(predicted_finish(plan, self._in(codec.wire)) for plan in sketches) for codec in enough]
        seconds = [self._rest + finish for finish in finishes]
        promising = enough[wire_choice.best(seconds, [codec.delivered for codec in enough])].wire
        return [exact, self._best(promising)]

    def _best(self, wire: str, *, compressed: bool = False) -> Candidate:
        """Return the best plan in a codec. ``compressed``: in which nothing goes dense."""
        measured = self._in(wire)
        assumed = replace(measured, dense=None) if compressed else measured
        key = ("compressed" if compressed else "best", wire)
        return self._candidate(
            self._made(lambda: best_plan(self._planner, self._buffers, assumed), *key), measured, wire
        )

    def _candidate(
        self, plan: merging.Plan, measured: Measurements, wire: str, exchange: str | None = None
    ) -> Candidate:
        """Return a plan with a codec and an exchange (None: the one in use), no use for a plan that selects nothing."""
        if all(plan.dense):
            wire = OWN if self._codecs else self._buffers.wire
            return Candidate(plan, self._in(wire), wire=wire)
        if self._buffers.config.wires:  # else the script has said which one
            plan = with_wire(plan, wire)
        exchange = exchange or self._buffers.exchange
        if self._buffers.config.exchanges:
            plan = with_exchange(plan, exchange)
        delivered = self._codecs[wire].delivered if wire in self._codecs else 1.0
        return Candidate(plan, measured, delivered, wire, exchange)

    def _in(self, wire: str) -> Measurements:
        """Return what was measured as it would be in a codec."""
        if wire not in self._measured:
            now, other = self._codecs[self._buffers.wire], self._codecs[wire]
            ready = self._latest.profile.backward.cumsum()
            load = profile(self._buffers, ready, self._step, wire=wire).load
            self._measured[wire] = in_wire(self._latest, load, now, other, self._buffers.across.size)
        return self._measured[wire]


def _all_dense(planner: merging.Planner, measured: Measurements) -> merging.Plan:
    """Return the planner's plan if everything went dense."""
    whole = sent_whole(measured)
    plan = planner.plan(whole.profile, whole.costs, "dense")
    mode = "behind" if "behind" in measured.modes else measured.modes[0]  # as a plan with a choice has it
    return replace(with_mode(plan, mode), dense=(True,) * len(plan.counts))


def why(candidates: Sequence[Candidate], seconds: Sequence[float], taken: int) -> str:
    """Say why the wire of the candidate number ``taken`` was: seconds of a step with each of ``candidates``."""
    fastest: dict[str, float] = {}
    for each, took in zip(candidates, seconds, strict=True):
        if not each.is_dense:
            fastest[each.wire] = min(took, fastest.get(each.wire, took))
    chosen = candidates[taken]
    steps = ", ".join(f"{1e3 * took:.3g} ms a step in {named(wire)}" for wire, took in fastest.items())
    return f"{chosen.delivered:.5g} of the energy that is selected arrives; {steps}"


def why_without_trial(candidate: Candidate, measured: bool) -> str:
    """Say why the wire of ``candidate`` is used without a trial. ``measured``: codecs were."""
    if not measured:
        return "no values were at hand to measure codecs on, so it stays"
    if candidate.wire == OWN:
        return "no codec of fewer bits is predicted to gain enough, or too little arrives"
    return f"{candidate.delivered:.5g} of the energy that is selected arrives, and it is predicted to be faster"


def named(wire: str) -> str:
    """Return what a wire is called in texts."""
    return "the gradient's own dtype" if wire == OWN else wire


def why_exchange(candidates: Sequence[Candidate], seconds: Sequence[float]) -> str:
    """Say what steps took with the exchanges of ``candidates``, the best plan of each, in ``seconds``."""
    fastest: dict[str, float] = {}
    for each, took in zip(candidates, seconds, strict=True):
        name = "dense" if each.is_dense else "sparse" if each.exchange == OWN else each.exchange
        fastest[name] = min(took, fastest.get(name, took))
    return ", ".join(f"{1e3 * took:.3g} ms a step with {name}" for name, took in fastest.items())
