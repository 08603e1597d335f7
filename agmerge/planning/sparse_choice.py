# SPDX-License-Identifier: Apache-2.0
"""Choice of what selections are sent as: the value codec, the exchange, or all dense. A plan makes it anew."""

from __future__ import annotations

from collections.abc import Sequence

import merging
from agmerge.exchanges.routing import OWN
from agmerge.planning import codec_choice, plan_trial
from agmerge.planning.candidates import Candidate
from agmerge.planning.codec_costs import SampledValues, measure_codecs
from agmerge.planning.sparse_search import SparseSearch
from agmerge.step.merge_buffers import MergeBuffers
from merging import Measurements, Pieces


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
    """Return why the codec of candidate number ``taken`` was chosen. ``seconds``: of a step with each candidate."""
    fastest: dict[str, float] = {}
    for each, took in zip(candidates, seconds, strict=True):
        if not each.is_dense:
            fastest[each.mode.codec] = min(took, fastest.get(each.mode.codec, took))
    chosen = candidates[taken]
    steps = ", ".join(f"{1e3 * took:.3g} ms per step in {named(codec)}" for codec, took in fastest.items())
    return f"it keeps {chosen.delivered:.5g} of the selected energy; {steps}"


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
    return ", ".join(f"{1e3 * took:.3g} ms per step with {name}" for name, took in fastest.items())
