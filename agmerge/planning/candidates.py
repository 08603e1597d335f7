"""Search for the plans to try, with the value codec of each: on rank 0, from the measurements of all ranks.

They are the plan that is predicted to be the best, and the one in use, for predictions may be wrong. Where the planner
chooses merge buffers to send dense, also the best plan with all dense and with all compressed. Where values may be
rounded, also the best plan with a rounding codec, or without, unlike the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import merging
from agmerge.exchanges.message.values import value_codec
from agmerge.exchanges.send_mode import OKTOPK, OWN, SendMode, send_mode, with_send_mode
from agmerge.exchanges.traffic import exchanged_by
from agmerge.planning import plan_trial, wire_choice
from agmerge.planning.cost_probe import measured_lane
from agmerge.planning.measuring import bytes_of_element, profile
from agmerge.planning.plan_choice import best_plan, planner_of, predicted_finish
from agmerge.planning.wire_choice import FAR, LEAST, Codec, in_wire
from agmerge.step.agreement import with_mode
from agmerge.step.merge_buffers import MergeBuffers
from merging import Measurements, Pieces
from merging.measured import sent_whole
from merging.pieces import pieces_of


@dataclass(frozen=True)
class Candidate:
    """Plan that the next steps may be sent by, with its prediction."""

    plan: merging.Plan
    measured: Measurements  # the basis of its prediction
    delivered: float = 1.0  # share of the energy of the selection that receivers read

    @property
    def finish(self) -> float:
        """Return when the last exchange is predicted to end, in seconds since backward began."""
        return predicted_finish(self.plan, self.measured)

    @property
    def mode(self) -> SendMode:
        """Return the send mode of the plan: of one that is all dense, codec and exchange do not matter."""
        mode = send_mode(self.plan)
        return replace(mode, codec=OWN, exchange=OWN) if self.is_dense else mode

    @property
    def shape(self) -> tuple[int, int, str, str]:
        """Return the numbers of messages and dense merge buffers, the codec and the exchange."""
        return sum(self.plan.parts), sum(self.plan.dense), self.mode.codec, self.mode.exchange

    @property
    def is_dense(self) -> bool:
        """Return whether nothing is selected."""
        return all(self.plan.dense)


def dumps(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return candidates as a record of plain values, in which equal measurements occur once."""
    texts = {each.plan: each.measured.dumps() for each in candidates}
    distinct = list(dict.fromkeys(texts.values()))
    rows = [(each.plan.dumps(), distinct.index(texts[each.plan]), each.delivered) for each in candidates]
    return {"rows": rows, "measured": distinct}


def loads(record: Mapping[str, Any]) -> list[Candidate]:
    """Return the candidates that :func:`dumps` was given."""
    measured = [Measurements.loads(text) for text in record["measured"]]
    return [Candidate(merging.Plan.loads(plan), measured[index], share) for plan, index, share in record["rows"]]


class Search:
    """Search for the plans to try, from one set of measurements.

    Args:

        planner: makes plans.
        buffers: the merge buffers in use.
        latest: the measurements, in the value codec in use.
        codecs: those that may be chosen, by name, with the one in use; the gradient's own dtype first. Empty: no codec
            was measured, and the one in use stays.
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
        self._known: dict[tuple[str, ...], merging.Plan] = {}  # plans that :meth:`_made` has made
        self._measured = {buffers.wire: latest}  # converted to each codec, by name
        self._overhead = max(0.0, usual - predicted_finish(buffers.plan, latest))  # seconds, in any plan

    def to_try(self, stays: bool) -> Pieces[list[Candidate]]:
        """Return, in pieces, the candidate to continue with, and after it those that a trial compares it with.

        ``stays``: the plan in use was made from times, and is kept where no other one is worth a change.
        """
        chosen, current = (yield from self.chosen()), self.current()
        if stays and (chosen.plan == current.plan or not self.is_worth(chosen, current)):
            return [current]
        return [chosen, *(yield from self.others(chosen))]

    def _made(self, make: Pieces[merging.Plan], *key: str) -> Pieces[merging.Plan]:
        """Return, in pieces, the plan of this key, made by ``make`` unless it was made before."""
        if key not in self._known:
            self._known[key] = yield from make
        return self._known[key]

    def current(self) -> Candidate:
        """Return the plan in use."""
        return self._candidate(self._buffers.plan, self._latest, self._buffers.wire)

    def chosen(self) -> Pieces[Candidate]:
        """Return, in pieces, the candidate with the fewest predicted seconds per delivered share of the energy."""
        found = yield from self._codings()
        return found[wire_choice.best([self._seconds(each) for each in found], [each.delivered for each in found])]

    def is_worth(self, chosen: Candidate, current: Candidate) -> bool:
        """Return whether ``chosen`` gains enough over the plan in use to replace it."""
        gain = 1 + self._planner.min_gain
        codecs = chosen.mode.codec, current.mode.codec
        if codecs[0] == codecs[1] or chosen.is_dense or current.is_dense:
            return not current.finish <= chosen.finish * gain
        if OWN in codecs or current.delivered < LEAST:
            return True  # the choice of a codec already includes a margin
        scores = [self._seconds(each) / each.delivered for each in (current, chosen)]
        return not scores[0] <= scores[1] * gain

    def others(self, chosen: Candidate) -> Pieces[list[Candidate]]:
        """Return, in pieces, the plans to try beside ``chosen``: those that are not predicted to end much later.

        The plan in use is one of these, unless one with as many messages, sent in the same mode, is tried, or the
        planner never plans again.
        """
        doubted = bool(self._planner.recheck_every)  # predictions of a planner that never plans again are trusted
        codings = yield from self._codings()
        codec = chosen.mode.codec
        found = [each for each in codings if each.mode.codec != codec and (doubted or codec != OWN)]
        if chosen.measured.dense is not None:
            planner = planner_of(self._buffers, self._planner)
            whole = yield from self._made(all_dense(planner, chosen.measured), "dense", self._codec_of(chosen))
            found.append(self._candidate(whole, chosen.measured, OWN))
            found.append((yield from self._best(self._codec_of(chosen), compressed=True)))
        latest_end = plan_trial.DOUBTFUL * chosen.finish
        plans = {chosen.plan: chosen}
        for each in [*found, *(yield from self._sums(chosen))]:
            yield
            if each.finish < latest_end:
                plans.setdefault(each.plan, each)
        current = self.current()
        is_other = current.shape not in [each.shape for each in plans.values()]
        if doubted and is_other and current.finish < latest_end:
            plans[current.plan] = current
        return list(plans.values())[1:]

    def _seconds(self, candidate: Candidate) -> float:
        """Return the predicted seconds of a step."""
        return self._overhead + candidate.finish

    def _sums(self, chosen: Candidate) -> Pieces[list[Candidate]]:
        """Return, in pieces, the best plan with each exchange that may replace the usual one, in the same codec.

        Only those that are predicted to end before the usual one: the prediction assumes that backward hides their
        later rounds, too. Once one of them is in use, it stays, since the usual one's costs are no longer measured.
        """
        buffers = self._buffers
        if buffers.exchange != OWN or not buffers.config.exchanges:
            return []
        usual = (yield from self._best(buffers.wire, compressed=True)) if chosen.is_dense else chosen
        lane, codec = measured_lane(buffers.layout), self._codec_of(usual)
        value = value_codec(codec, lane.dtype)
        each = value.size(FAR) / FAR
        index = bytes_of_element(buffers, lane, self._step, codec) - each
        found = []
        for name in buffers.config.exchanges if value.has_zero else (OKTOPK,):
            coded, curve = codec != OWN, usual.measured.exchange
            measured = replace(
                usual.measured, exchange=exchanged_by(name, curve, buffers.across.size, index, each, coded=coded)
            )
            plan = yield from self._made(best_plan(self._planner, buffers, measured), "sum", name, codec)
            found.append(self._candidate(plan, measured, codec, name))
        return [each for each in found if each.finish < usual.finish and not each.is_dense]

    def _codings(self) -> Pieces[list[Candidate]]:
        """Return, in pieces, the best plan without rounding, and the best one in a rounding codec, if there are any.

        The second uses the codec that is best with the plans known so far: planning for each codec would take long.
        """
        if not self._codecs:
            return [(yield from self._best(self._buffers.wire))]
        exact = yield from self._best(OWN)
        enough = [codec for codec in self._codecs.values() if codec.wire != OWN and codec.delivered >= LEAST]
        if not enough:
            return [exact]
        sketches = [exact.plan]
        if any(exact.plan.dense):
            sketches.append((yield from self._best(OWN, compressed=True)).plan)
        finishes = []
        for codec in enough:
            finishes.append(min(predicted_finish(plan, self._in(codec.wire)) for plan in sketches))
            yield
        seconds = [self._overhead + finish for finish in finishes]
        promising = enough[wire_choice.best(seconds, [codec.delivered for codec in enough])].wire
        return [exact, (yield from self._best(promising))]

    def _best(self, wire: str, *, compressed: bool = False) -> Pieces[Candidate]:
        """Return, in pieces, the best plan in a codec. ``compressed``: without dense merge buffers."""
        measured = self._in(wire)
        assumed = replace(measured, dense=None) if compressed else measured
        key = ("compressed" if compressed else "best", wire)
        plan = yield from self._made(best_plan(self._planner, self._buffers, assumed), *key)
        return self._candidate(plan, measured, wire)

    def _candidate(
        self, plan: merging.Plan, measured: Measurements, wire: str, exchange: str | None = None
    ) -> Candidate:
        """Return the candidate of a plan with a codec and an exchange (None: the one in use).

        A plan that selects nothing gets neither.
        """
        if all(plan.dense):
            return Candidate(plan, self._in(OWN if self._codecs else self._buffers.wire))
        if self._buffers.config.wires:  # else the script has chosen the codec
            plan = with_send_mode(plan, codec=wire)
        if self._buffers.config.exchanges:
            plan = with_send_mode(plan, exchange=exchange or self._buffers.exchange)
        return Candidate(plan, measured, self._codecs[wire].delivered if wire in self._codecs else 1.0)

    def _codec_of(self, candidate: Candidate) -> str:
        """Return the codec of a candidate; where codecs are no choice, the one in use."""
        return candidate.mode.codec if self._codecs else self._buffers.wire

    def _in(self, wire: str) -> Measurements:
        """Return the measurements converted to a codec."""
        if wire not in self._measured:
            now, other = self._codecs[self._buffers.wire], self._codecs[wire]
            ready = self._latest.profile.backward.cumsum()
            load = profile(self._buffers, ready, self._step, wire=wire).load
            self._measured[wire] = in_wire(self._latest, load, now, other, self._buffers.across.size)
        return self._measured[wire]


def all_dense(planner: merging.Planner, measured: Measurements) -> Pieces[merging.Plan]:
    """Return, in pieces, the planner's plan if all merge buffers were dense."""
    whole = sent_whole(measured)
    plan = yield from pieces_of(planner.plan, whole.profile, whole.costs, "dense")
    mode = "behind" if "behind" in measured.modes else measured.modes[0]  # the same as for a plan with a choice
    return replace(with_mode(plan, mode), dense=(True,) * len(plan.counts))


def why(candidates: Sequence[Candidate], seconds: Sequence[float], taken: int) -> str:
    """Return why the wire of candidate number ``taken`` was chosen. ``seconds``: of a step with each candidate."""
    fastest: dict[str, float] = {}
    for each, took in zip(candidates, seconds, strict=True):
        if not each.is_dense:
            fastest[each.mode.codec] = min(took, fastest.get(each.mode.codec, took))
    chosen = candidates[taken]
    steps = ", ".join(f"{1e3 * took:.3g} ms a step in {named(wire)}" for wire, took in fastest.items())
    return f"{chosen.delivered:.5g} of the energy that is selected arrives; {steps}"


def why_without_trial(candidate: Candidate, measured: bool) -> str:
    """Return why the wire of ``candidate`` is used without a trial. ``measured``: whether codecs were measured."""
    if not measured:
        return "no values were at hand to measure codecs on, so it stays"
    if candidate.mode.codec == OWN:
        return "no codec of fewer bits is predicted to gain enough, or too little arrives"
    return f"{candidate.delivered:.5g} of the energy that is selected arrives, and it is predicted to be faster"


def named(wire: str) -> str:
    """Return the name of a wire for texts."""
    return "the gradient's own dtype" if wire == OWN else wire


def why_exchange(candidates: Sequence[Candidate], seconds: Sequence[float]) -> str:
    """Return a text with the ``seconds`` of a step for each exchange of ``candidates``, with its best plan."""
    fastest: dict[str, float] = {}
    for each, took in zip(candidates, seconds, strict=True):
        name = "dense" if each.is_dense else "sparse" if each.mode.exchange == OWN else each.mode.exchange
        fastest[name] = min(took, fastest.get(name, took))
    return ", ".join(f"{1e3 * took:.3g} ms a step with {name}" for name, took in fastest.items())
