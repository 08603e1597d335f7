# SPDX-License-Identifier: Apache-2.0
"""Search for the plans to try where selections are sent, on rank 0, from the measurements of all ranks.

They are the plan that is predicted to be the best, and the one in use, for predictions may be wrong. Where the planner
chooses merge buffers to send dense, also the best plan with all dense and with all compressed. Where values may be
rounded, also the best plan with a rounding codec, or without, unlike the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import merging
from agmerge.exchanges.message.scaled import value_codec
from agmerge.exchanges.routing import OKTOPK, OWN, exchanged_by, with_send_mode
from agmerge.planning import codec_choice, plan_trial
from agmerge.planning.candidates import Candidate, all_dense, step_times
from agmerge.planning.codec_choice import FAR, LEAST, Codec, best_plan, in_codec, planner_of, predicted_finish
from agmerge.planning.codec_costs import SampledValues, measure_codecs
from agmerge.planning.cost_probe import measured_class
from agmerge.planning.measuring import bytes_of_element, profile
from agmerge.step.merge_buffers import MergeBuffers
from merging import Measurements, Pieces


class SparseSearch:
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
        self._plans: dict[tuple[str, bool], merging.Plan] = {}  # the best ones so far, by codec, and if compressed
        self._measured = {buffers.wire: latest}  # converted to each codec, by name
        self._overhead = max(0.0, usual - predicted_finish(buffers.plan, latest))  # seconds, in any plan

    def to_try(self, stays: bool) -> Pieces[list[Candidate]]:
        """Return, in pieces, the candidate to continue with, and after it those that a trial compares it with.

        These are not predicted to end much later. The plan in use is one of them, unless one with as many messages,
        sent in the same mode, is, or the planner never plans again.

        ``stays``: the plan in use was made from times, and is kept where no other one is worth a change.
        """
        current = self._candidate(self._buffers.plan, self._latest, self._buffers.wire)
        found = yield from self._in_codecs()
        scores = [self._seconds(each) for each in found], [each.delivered for each in found]
        chosen = found.pop(codec_choice.best(*scores))
        if stays and (chosen.plan == current.plan or not self._is_worth(chosen, current)):
            return [current]
        doubted = bool(self._planner.recheck_every)  # predictions of a planner that never plans again are trusted
        codec = chosen.mode.codec
        found = [each for each in found if each.mode.codec != codec and (doubted or codec != OWN)]
        if chosen.measured.dense is not None:
            plan = yield from all_dense(planner_of(self._buffers, self._planner), chosen.measured)
            found.append(self._candidate(plan, chosen.measured, OWN))
            found.append((yield from self._best(self._codec_of(chosen), compressed=True)))
        found += yield from self._sums(chosen)
        latest_end = plan_trial.DOUBTFUL * chosen.finish
        plans = {chosen.plan: chosen}
        for each in found:
            yield
            if each.finish < latest_end:
                plans.setdefault(each.plan, each)
        is_other = current.shape not in [each.shape for each in plans.values()]
        if doubted and is_other and current.finish < latest_end:
            plans[current.plan] = current
        return list(plans.values())

    def _is_worth(self, chosen: Candidate, current: Candidate) -> bool:
        """Return whether ``chosen`` gains enough over the plan in use to replace it."""
        gain = 1 + self._planner.min_gain
        codecs = chosen.mode.codec, current.mode.codec
        if codecs[0] == codecs[1] or chosen.is_dense or current.is_dense:
            return not current.finish <= chosen.finish * gain
        if OWN in codecs or current.delivered < LEAST:
            return True  # the choice of a codec already includes a margin
        scores = [self._seconds(each) / each.delivered for each in (current, chosen)]
        return not scores[0] <= scores[1] * gain

    def _seconds(self, candidate: Candidate) -> float:
        """Return the predicted seconds of a step."""
        return self._overhead + candidate.finish

    def _in_codecs(self) -> Pieces[list[Candidate]]:
        """Return, in pieces, the best plan without rounding, and the best one in a rounding codec, if there are any.

        The second uses the codec that is best with the plans known so far: planning for each codec would take long.
        """
        if not self._codecs:
            return [(yield from self._best(self._buffers.wire))]
        exact = yield from self._best(OWN)
        enough = [codec for codec in self._codecs.values() if codec.name != OWN and codec.delivered >= LEAST]
        if not enough:
            return [exact]
        sketches = [exact.plan]
        if any(exact.plan.dense):
            sketches.append((yield from self._best(OWN, compressed=True)).plan)
        seconds = []
        for codec in enough:
            finish = min(predicted_finish(plan, self._in(codec.name)) for plan in sketches)
            seconds.append(self._overhead + finish)
            yield
        promising = enough[codec_choice.best(seconds, [codec.delivered for codec in enough])].name
        return [exact, (yield from self._best(promising))]

    def _sums(self, chosen: Candidate) -> Pieces[list[Candidate]]:
        """Return, in pieces, the best plan with each exchange that may replace the usual one, in the same codec.

        Only those that are predicted to end before the usual one: the prediction assumes that backward hides their
        later rounds, too. Once one of them is in use, it stays, since the usual one's costs are no longer measured.
        """
        buffers = self._buffers
        if buffers.exchange != OWN or not buffers.config.exchanges:
            return []
        usual = (yield from self._best(buffers.wire, compressed=True)) if chosen.is_dense else chosen
        tensor_class, codec = measured_class(buffers.layout), self._codec_of(usual)
        value, curve = value_codec(codec, tensor_class.dtype), usual.measured.exchange
        each = value.size(FAR) / FAR
        index = bytes_of_element(buffers, tensor_class, self._step, codec) - each
        found = []
        for name in buffers.config.exchanges if value.has_zero else (OKTOPK,):
            cost = exchanged_by(name, curve, buffers.across.size, index, each, coded=codec != OWN)
            measured = replace(usual.measured, exchange=cost)
            plan = yield from best_plan(self._planner, buffers, measured)
            found.append(self._candidate(plan, measured, codec, name))
        return [each for each in found if each.finish < usual.finish and not each.is_dense]

    def _best(self, codec: str, *, compressed: bool = False) -> Pieces[Candidate]:
        """Return, in pieces, the best plan in a codec. ``compressed``: without dense merge buffers."""
        measured, key = self._in(codec), (codec, compressed)
        if key not in self._plans:
            assumed = replace(measured, dense=None) if compressed else measured
            self._plans[key] = yield from best_plan(self._planner, self._buffers, assumed)
        return self._candidate(self._plans[key], measured, codec)

    def _candidate(
        self, plan: merging.Plan, measured: Measurements, codec: str, exchange: str | None = None
    ) -> Candidate:
        """Return the candidate of a plan with a codec and an exchange (None: the one in use).

        A plan that selects nothing gets neither.
        """
        if all(plan.dense):
            return Candidate(plan, self._in(OWN if self._codecs else self._buffers.wire))
        if self._buffers.config.wires:  # else the script has chosen the codec
            plan = with_send_mode(plan, codec=codec)
        if self._buffers.config.exchanges:
            plan = with_send_mode(plan, exchange=exchange or self._buffers.exchange)
        return Candidate(plan, measured, self._codecs[codec].delivered if codec in self._codecs else 1.0)

    def _codec_of(self, candidate: Candidate) -> str:
        """Return the codec of a candidate; where codecs are no choice, the one in use."""
        return candidate.mode.codec if self._codecs else self._buffers.wire

    def _in(self, codec: str) -> Measurements:
        """Return the measurements converted to a codec."""
        if codec not in self._measured:
            now, other = self._codecs[self._buffers.wire], self._codecs[codec]
            ready = self._latest.profile.backward.cumsum()
            load = profile(self._buffers, ready, self._step, codec=codec).load
            self._measured[codec] = in_codec(self._latest, load, now, other, self._buffers.across.size)
        return self._measured[codec]


# Choice of what selections are sent as: the value codec, the exchange, or all dense. A plan makes it anew.


class SparseChoice:
    """Choice of one agreement, with the reasons for it. All ranks call alike; rank 0 decides.

    ``buffers``: the merge buffers in use, with ``values``: a sample of what they have selected.
    """

    is_open = is_clear = False  # a choice that plans make anew is neither missing nor to be confirmed
    quantiser_why = ""

    def __init__(self, buffers: MergeBuffers, values: SampledValues) -> None:
        self._buffers, self._values = buffers, values
        self.has_measured = False  # costs of codecs, for the last plan
        self.codec_why = ""  # of this agreement; "": it was not chosen
        self.exchange_why = ""  # step times by exchange, of this agreement; "": not known

    def take_over(self, plan: merging.Plan, step: int) -> None:
        """Adopt the plan of an earlier agreement or run: there are no reasons for it here."""
        self.codec_why = self.exchange_why = ""

    def is_ruled_out(self) -> bool:
        """Return whether what is in use may not stay: only quantisers may become too noisy."""
        return False

    def search(
        self, planner: merging.Planner, latest: Measurements, step: int, usual: float, *, stays: bool
    ) -> Pieces[list[Candidate]]:
        """Collective. Measure codecs, and return the search for the plans to try, the likely best first.

        Args:

            planner: makes plans.
            latest: the measurements, with the codec in use.
            step: the one to come.
            usual: seconds of a step as it is.
            stays: the plan in use was made from times, and is kept where no other one is worth a change.
        """
        codecs = measure_codecs(self._buffers, self._values.last, step) if self._buffers.config.wires else {}
        self.has_measured = bool(codecs)
        return SparseSearch(planner, self._buffers, latest, codecs, step, usual).to_try(stays)

    def planned(self, tried: Sequence[Candidate], step: int) -> merging.Plan:
        """Return the plan to continue with, the first of those to try. ``step``: the one to come."""
        first, config = tried[0], self._buffers.config
        if config.wires:
            self.codec_why = why_without_trial(first, self.has_measured)
        if len(tried) == 1 and first.is_dense and config.chooses_dense:
            self.exchange_why = f"uncompressed gradients are predicted to be faster, {1e3 * first.finish:.3g} ms"
        return first.plan

    def best(self, tried: Sequence[Candidate], seconds: Sequence[float], doubts: Sequence[float]) -> int:
        """Return the number of the candidate to continue with after a trial.

        ``seconds``: of a step with each, on the slowest rank; ``doubts``: by how much steps with each vary.
        """
        best = codec_choice.best(seconds, [each.delivered for each in tried])
        return plan_trial.taken(best, seconds, doubts)

    def settle(self, tried: Sequence[Candidate], number: int, seconds: Sequence[float], step: int) -> merging.Plan:
        """Return the plan of the candidate that a trial has chosen, and remember why. ``step``: the one to come."""
        self.codec_why = why_codec(tried, seconds, number)
        self.exchange_why = why_exchange(tried, seconds)
        return tried[number].plan


def why_codec(candidates: Sequence[Candidate], seconds: Sequence[float], taken: int) -> str:
    """Return why the codec of candidate number ``taken`` was chosen. ``seconds``: of a step with each candidate.

    If a candidate with another codec was better, the steps have varied by more than the times differ, so the predicted
    one has stayed: see :func:`agmerge.planning.plan_trial.taken`.
    """
    fastest: dict[str, float] = {}
    for each, took in zip(candidates, seconds, strict=True):
        if not each.is_dense:
            fastest[each.mode.codec] = min(took, fastest.get(each.mode.codec, took))
    chosen = candidates[taken]
    steps = ", ".join(f"{1e3 * took:.3g} ms per step in {named(codec)}" for codec, took in fastest.items())
    best = candidates[codec_choice.best(seconds, [each.delivered for each in candidates])]
    is_doubted = best.mode.codec != chosen.mode.codec and not best.is_dense and not chosen.is_dense
    doubt = f"; {named(chosen.mode.codec)} stays, because times of single steps vary by more" if is_doubted else ""
    return f"it keeps {chosen.delivered:.5g} of the selected energy; {steps}{doubt}"


def why_without_trial(candidate: Candidate, measured: bool) -> str:
    """Return why the codec of ``candidate`` is used without a trial. ``measured``: whether codecs were measured."""
    if not measured:
        return "there were no values to measure other formats with"
    if candidate.mode.codec == OWN:
        return "formats with fewer bits are not predicted to be faster, or keep too little energy"
    return f"it keeps {candidate.delivered:.5g} of the selected energy, and is predicted to be faster"


def named(codec: str) -> str:
    """Return the name of a codec for texts."""
    return "the gradient's own dtype" if codec == OWN else codec


def why_exchange(candidates: Sequence[Candidate], seconds: Sequence[float]) -> str:
    """Return a text with the ``seconds`` of a step for each exchange of ``candidates``, with its best plan."""
    fastest: dict[str, float] = {}
    for each, took in zip(candidates, seconds, strict=True):
        name = "dense" if each.is_dense else "sparse" if each.mode.exchange == OWN else each.mode.exchange
        fastest[name] = min(took, fastest.get(name, took))
    return step_times(fastest.items())
