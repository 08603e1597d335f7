# SPDX-License-Identifier: Apache-2.0
"""Choose what gradients are sent as: dense, in how many bits, and by which exchange. There is one rule.

Modes are ordered, the most exact one first. The best plan of each mode is a candidate, unless it is predicted to be
hopeless. Trials of whole steps decide: the most exact candidate with a step about as long as the fastest one's is
taken. A less exact mode replaces the one in use only if it was clearly faster twice. All of this is rank 0's, from the
measurements of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import ClassVar

import merging
import sparsifiers
from agmerge.exchanges.message.scaled import value_codec
from agmerge.exchanges.routing import OKTOPK, OWN, SendMode, exchanged_by, send_mode, with_send_mode
from agmerge.exchanges.table import EXCHANGES
from agmerge.planning.coding import FAR, MIXED, Coding, CountedZeros, in_coding, loses_by_zeros, measure_codings
from agmerge.planning.cost_probe import measured_class
from agmerge.planning.measuring import bytes_of_element, profile
from agmerge.planning.plan_trial import Candidate
from agmerge.step.agreed_state import with_mode
from agmerge.step.config import AUTO
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.plan_status import Activity, PlanStatus
from merging import Measurements, Pieces
from merging.measured import sent_whole
from merging.pieces import pieces_of
from sparsifiers import Kind
from sparsifiers.quantising.base import NONE

# The rule.

ABOUT = 1.05  # times the fastest step: a trial cannot tell such steps from it
HOPELESS = 1.5  # times the fastest predicted step: slower candidates are not tried
# The same, if messages travel under the next step: predictions add to a step what it hides, as long as itself at most.
HOPELESS_LATE = 2.0
MOST = 3  # modes that are tried, beside other exchanges of selections
CLEAR = 1.2  # times as fast, in two trials, has a less exact candidate to be to replace the one in use
AGAIN = 1000  # steps after the choice of a quantiser until there may be another one


def name_of(mode: SendMode, *, is_dense: bool = False) -> str:
    """Return the name of a send mode: a quantiser, or exchange and codec of selections where they are not the usual."""
    words = [word for word in (mode.exchange, mode.codec, mode.quantiser) if word != OWN]
    return NONE if is_dense else " ".join(words) or OWN


def exactness(candidate: Candidate, names: Sequence[str]) -> int:
    """Return the place of a candidate among ``names``, the most exact one first; behind them, if it is none of them."""
    name = name_of(candidate.mode, is_dense=candidate.is_dense and NONE in names)
    return names.index(name) if name in names else len(names)  # the plan of an earlier run may have other modes


def taken(tried: Sequence[Candidate], names: Sequence[str], seconds: Sequence[float], doubts: Sequence[float]) -> int:
    """Return the number of the candidate to continue with: the most exact one that is about as fast as the fastest.

    ``seconds``: of a step with each, on the slowest rank. ``doubts``: by how much these vary. ``names``: of all modes.
    """
    limit = ABOUT * min(seconds)
    near = [number for number, took in enumerate(seconds) if took - doubts[number] <= limit]
    return min(near, key=lambda number: (exactness(tried[number], names), seconds[number]))


class Choice:
    """Choice of one agreement. All ranks call alike; rank 0 decides.

    A quantiser stays for long: it is chosen for a number of workers, and the plan records that. What selections are
    sent as is open to every new plan, since it depends on density.

    ``buffers``: the merge buffers in use. ``zeros``: of what they have quantised; None: nothing is quantised by choice.
    """

    def __init__(self, buffers: MergeBuffers, zeros: CountedZeros | None) -> None:
        self._buffers, self._zeros, self._workers = buffers, zeros, buffers.comm.size
        self.quantises = zeros is not None  # quantisers are among the modes
        self._selected = 0  # elements in a step, when plans were last made
        self._binds = True  # the choice was made with as many
        self.is_clear = False  # a less exact candidate was clearly faster in the last trial: try again
        self._share = 0.0  # of coordinates in blocks that mix zeros and other values, when it was last measured
        self.take_over(buffers.plan, 0)

    def take_over(self, plan: merging.Plan, step: int) -> None:
        """Adopt the quantiser of an earlier agreement or run, if it was chosen for the same number of workers.

        ``step``: the one to come.
        """
        mode = send_mode(plan)
        fits = self.quantises and mode.quantiser != OWN and mode.workers == self._workers
        self._chosen = name_of(mode, is_dense=all(plan.dense)) if fits else ""  # the name of the mode; "": none is
        self._step = step  # the step to come when it was chosen, or when this agreement began
        self._tried: Sequence[Candidate] = ()  # of the last choice
        self._seconds: Sequence[float] = ()  # of a step with each; none: it was chosen by predictions

    @property
    def names(self) -> Sequence[str]:
        """Return the names of all modes, the most exact one first."""
        config = self._buffers.config
        if self.quantises:
            choice, workers = config.compression.compressor, self._workers
            return [name for name in choice.candidates if workers <= choice.most_workers.get(name, workers)]
        modes = product((OWN, *config.exchanges), (OWN, *config.wires))
        return [NONE, *(name_of(SendMode(exchange=exchange, codec=codec)) for exchange, codec in modes)]

    @property
    def _quantizers(self) -> list[str]:
        """Return the names of quantizers among the modes, the most exact one first."""
        return [name for name in self.names if name != NONE]

    @property
    def is_open(self) -> bool:
        """Return whether a choice is missing. What selections are sent as never is: plans go on with what is in use."""
        return self.quantises and not self._chosen

    @property
    def _left_out(self) -> tuple[str, ...]:
        """Return the quantisers that zeros rule out; (): all, if there is no other candidate."""
        names = self._quantizers
        noisy = tuple(filter(loses_by_zeros, names)) if self._share > MIXED else ()
        return noisy if len(noisy) < len(names) or self._buffers.config.chooses_dense else ()

    def is_ruled_out(self) -> bool:
        """Collective. Return whether zeros rule out what is in use; they are measured if they could."""
        if self._zeros is None or self._chosen in ("", NONE) or not loses_by_zeros(self._chosen):
            return False
        self._share = self._zeros.share()
        return self._chosen in self._left_out

    def is_on(self, candidate: Candidate) -> bool:
        """Return whether this is of the chosen mode."""
        return name_of(candidate.mode, is_dense=candidate.is_dense) == self._chosen

    def may_change(self, step: int) -> bool:
        """Return whether another mode may be chosen before this step."""
        is_due = step - self._step >= AGAIN or self._chosen in self._left_out
        return not self.quantises or self.is_open or is_due

    def search(
        self, planner: merging.Planner, latest: Measurements, step: int, usual: float
    ) -> Pieces[list[Candidate]]:
        """Collective. Measure codings, if there are several, and return the search for the plans to try.

        ``latest``: the measurements, with what is in use. ``step``: the one to come. ``usual``: seconds of a step.
        """
        buffers, config = self._buffers, self._buffers.config
        now, names = (buffers.wire, (OWN, *config.wires)) if config.wires else (OWN, (OWN,))
        if self.quantises:
            assert buffers.quantiser is not None
            now, names = buffers.quantiser.name, tuple(self._quantizers)
        known = {now: Coding(now)}
        if self.quantises or config.wires:
            known = measure_codings(buffers, dict.fromkeys((*names, now)), step)
        if self._zeros is not None:
            self._share = self._zeros.share()
        slots = buffers.layout.slots
        selected = sum(buffers.budgets.of_tensor(slot, step) for slot in slots if slot.tensor_class.sparse)
        self._selected, self._binds = selected, selected == self._selected
        largest = known[OWN].size if OWN in known else math.inf  # no codec is to lose something for nothing
        fitting = [name for name in names if name in (OWN, now) or known[name].size < largest]
        allowed = [name for name in fitting if name not in self._left_out]
        return Search(self, planner, buffers, latest, step, usual, known, now, allowed).to_try()

    def best(self, tried: Sequence[Candidate], seconds: Sequence[float], doubts: Sequence[float]) -> int:
        """Return the number of the candidate to continue with after a trial: by :func:`taken`, if none was chosen.

        An earlier choice is replaced only by a more exact candidate, or by one that was clearly faster twice.
        """
        chosen, names = taken(tried, self.names, seconds, doubts), self.names
        in_use = [number for number, each in enumerate(tried) if self._binds and self.is_on(each)]
        now = min(in_use, key=seconds.__getitem__, default=None)
        if now is None or exactness(tried[chosen], names) <= exactness(tried[now], names):
            self.is_clear = False
            return chosen
        is_clear = seconds[now] - doubts[now] > CLEAR * seconds[chosen]
        twice = is_clear and self.is_clear
        self.is_clear = is_clear and not twice
        return chosen if twice else now

    def settle(self, tried: Sequence[Candidate], number: int, seconds: Sequence[float], step: int) -> merging.Plan:
        """Return the plan of the candidate that was chosen, and remember why. ``step``: the one to come.

        ``seconds``: of a step with each; none: there was no trial. A quantised plan is labelled with the workers.
        """
        candidate = tried[number]
        is_new, modes = not self.is_on(candidate), {exactness(each, self.names) for each in tried}
        self.is_clear = self.is_clear and bool(seconds)
        if len(modes) > 1 or (is_new and not seconds):  # else merge buffers alone were tried
            self._tried, self._seconds = tried, seconds
        if is_new or (self.may_change(step) and not self.is_clear):
            self._step = step
        self._chosen = name_of(candidate.mode, is_dense=candidate.is_dense)
        return with_send_mode(candidate.plan, workers=self._workers) if self.quantises else candidate.plan

    def why(self) -> str:
        """Return the reason for the choice, with the least seconds of a step in each mode; "": none was made."""
        names, reason = " and ".join(self._left_out), "it was chosen before, for as many workers"
        if self._seconds:
            fastest: dict[str, float] = {}
            for each, took in zip(self._tried, self._seconds, strict=True):
                title = self._title(each)
                fastest[title] = min(took, fastest.get(title, took))
            reason = ", ".join(f"{1e3 * took:.3g} ms per step with {title}" for title, took in fastest.items())
        elif self._tried:
            dense = DENSE_ALONE.format(milliseconds=1e3 * self._tried[0].finish)
            reason = dense if self._tried[0].is_dense else HOPELESS_OTHERS
        elif not self.quantises:
            return ""
        return f"{reason}; {LEFT_OUT.format(names=names, share=self._share)}" if names else reason

    def _title(self, candidate: Candidate) -> str:
        """Return the name of a candidate's mode for texts."""
        name = name_of(candidate.mode, is_dense=candidate.is_dense)
        return name if self.quantises else {NONE: "dense", OWN: "sparse"}.get(name, name)


# The plans to try.


@dataclass(frozen=True, repr=False, kw_only=True)
class FixedCounts(merging.Planner):
    """Planner that keeps a partition; which merge buffers are dense, and in how many messages, is still chosen."""

    name: ClassVar[str] = "fixed"
    timed: ClassVar[bool] = False
    counts: tuple[int, ...]  # tensors per merge buffer

    def partition(self, profile: merging.Profile, costs: merging.Costs, mode: str) -> merging.Plan:
        return merging.Plan(self.counts)


def planner_of(buffers: MergeBuffers, planner: merging.Planner) -> merging.Planner:
    """Return the planner, unless the script's groups say which tensors share a message."""
    return planner if buffers.config.merging.groups is None else FixedCounts(counts=buffers.plan.counts)


@dataclass
class Search:
    """Search for the plans to try, from one set of measurements."""

    choice: Choice  # the one so far
    planner: merging.Planner  # makes plans
    buffers: MergeBuffers  # in use
    latest: Measurements  # with the coding in use
    step: int  # the one to come
    usual: float  # seconds of a step as it is
    known: Mapping[str, Coding]  # costs of codings, by name
    now: str  # the coding in use
    allowed: Sequence[str]  # codings that may be chosen, the most exact one first
    converted: dict[str, Measurements] = field(default_factory=dict)  # to another coding, by name

    def to_try(self) -> Pieces[list[Candidate]]:
        """Return, in pieces, the candidates to try, or other plans of the same mode while that stays.

        The plan in use alone: no other one is worth a change.
        """
        if not self.choice.may_change(self.step):
            return (yield from self._same())
        found = []
        for name in self.allowed:
            found.append((yield from self._best(name)))
        if NONE in self.choice.names and self.latest.dense is not None:
            found.append((yield from self._dense()))
        if self.choice.quantises:
            return self._near(found)
        likely = found[taken(found, self.choice.names, [*map(self._seconds, found)], [0.0] * len(found))]
        if self.choice.is_on(likely) and not self.choice.is_clear and not self._is_worth(likely):
            return [self._current]
        return (yield from self._with_selections(self._near(found)))

    @cached_property
    def _current(self) -> Candidate:
        """Return the plan in use."""
        return Candidate(self.buffers.plan, self.latest)

    def _seconds(self, candidate: Candidate) -> float:
        """Return the predicted seconds of a step, with what a step takes beside its exchange in any plan."""
        return max(0.0, self.usual - self._current.finish) + candidate.finish

    def _is_worth(self, other: Candidate) -> bool:
        """Return whether a candidate of the mode in use gains enough over the plan in use to replace it."""
        gain = 1 + self.planner.min_gain
        return other.plan != self._current.plan and not self._current.finish <= other.finish * gain

    def _same(self) -> Pieces[list[Candidate]]:
        """Return, in pieces, the plan in use, after a better one of the same mode if there is one."""
        is_dense = self._current.is_dense and self.latest.dense is not None
        best = (yield from self._dense()) if is_dense else (yield from self._best(self.now))
        best = Candidate(with_send_mode(best.plan, workers=self._current.mode.workers), best.measured)
        return [best, self._current] if self._is_worth(best) else [self._current]

    def _near(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that are not hopeless, in their order.

        The mode in use is always among them, unless zeros rule it out: trying it costs nothing.
        """
        is_on = self.choice.is_on
        fastest = min(found, key=self._seconds)
        exact = min(found, key=lambda each: exactness(each, self.choice.names))
        updates = self.buffers.config.sync.updates
        limit = HOPELESS_LATE if updates is not None and updates.overlap > 0 else HOPELESS
        limit *= self._seconds(fastest)
        near = [each for each in found if each is fastest or self._seconds(each) < limit or is_on(each)]
        while len(near) > MOST:
            between = [each for each in near if each not in (fastest, exact) and not is_on(each)]
            near.remove(max(between, key=self._seconds))
        return near

    def _with_selections(self, near: list[Candidate]) -> Pieces[list[Candidate]]:
        """Return, in pieces, candidates with those that are tried beside them where selections are sent.

        Predictions of which merge buffers go dense may be wrong, so a plan without any is tried, too; and so is the
        plan in use, unless one with as many messages, sent in the same mode, is. A planner that never plans again is
        trusted in that.
        """
        limit = HOPELESS * min(map(self._seconds, near))
        fastest = min((each for each in near if not each.is_dense), key=self._seconds, default=None)
        more = []
        if fastest is not None and any(fastest.plan.dense):
            more.append((yield from self._best(fastest.mode.codec, compressed=True)))
        more += yield from self._sums(fastest)
        if self.planner.recheck_every and _shape(self._current) not in map(_shape, (*near, *more)):
            more.append(self._current)
        plans = {each.plan: each for each in near}
        for each in more:
            if self._seconds(each) < limit:
                plans.setdefault(each.plan, each)
        return list(plans.values())

    def _sums(self, usual: Candidate | None) -> Pieces[list[Candidate]]:
        """Return, in pieces, the best plan with each exchange that may replace the usual one, in the same codec.

        Only those that are predicted to end before the usual one: the prediction assumes that backward hides their
        later rounds, too. Once one of them is in use, it stays, since the usual one's costs are no longer measured.

        ``usual``: the fastest candidate that selects; None: none is near.
        """
        buffers = self.buffers
        if buffers.exchange != OWN or not buffers.config.exchanges:
            return []
        usual = usual or (yield from self._best(self.now, compressed=True))
        tensor_class, name = measured_class(buffers.layout), usual.mode.codec
        codec = name if buffers.config.wires else buffers.wire
        value, curve = value_codec(codec, tensor_class.dtype), usual.measured.exchange
        each = value.size(FAR) / FAR
        index = bytes_of_element(buffers, tensor_class, self.step, codec) - each
        found = []
        for exchange in buffers.config.exchanges if value.has_zero else (OKTOPK,):
            cost = exchanged_by(exchange, curve, buffers.across.size, index, each, coded=codec != OWN)
            measured = replace(usual.measured, exchange=cost)
            plan = yield from self._plan(measured)
            found.append(Candidate(with_send_mode(plan, codec=name, exchange=exchange), measured))
        return [each for each in found if each.finish < usual.finish and not each.is_dense]

    def _best(self, name: str, *, compressed: bool = False) -> Pieces[Candidate]:
        """Return, in pieces, the best plan in a coding, which is not all dense. ``compressed``: no merge buffer is."""
        measured = self._in(name)
        plan = None if compressed else (yield from self._plan(measured))
        if plan is None or all(plan.dense):  # all dense is another candidate
            plan = yield from self._plan(replace(measured, dense=None))
        if self.choice.quantises:
            return Candidate(with_send_mode(plan, quantiser=name), measured)
        exchange = self.buffers.exchange if self.buffers.config.exchanges else OWN
        return Candidate(with_send_mode(plan, codec=name, exchange=exchange), measured)

    def _dense(self) -> Pieces[Candidate]:
        """Return, in pieces, the best plan with all merge buffers dense."""
        measured = self._in(self.now if self.choice.quantises else OWN)
        whole = sent_whole(measured)
        planner = planner_of(self.buffers, self.planner)
        plan = yield from pieces_of(planner.plan, whole.profile, whole.costs, "dense")
        mode = "behind" if "behind" in measured.modes else measured.modes[0]  # the same as for a plan with a choice
        plan = replace(with_mode(plan, mode), dense=(True,) * len(plan.counts))
        return Candidate(with_send_mode(plan, quantiser=self.now) if self.choice.quantises else plan, measured)

    def _plan(self, measured: Measurements) -> Pieces[merging.Plan]:
        """Return, in pieces, the plan that is predicted to end first, divided into messages if that helps."""
        planner = planner_of(self.buffers, self.planner)
        plan, mode = yield from pieces_of(merging.best, planner, measured)
        if planner.max_messages > 1 and EXCHANGES[self.buffers.exchange].pipelines_parts:
            most = planner.max_messages
            plan = yield from pieces_of(merging.divide, plan, measured.profile, measured.costs, mode, most)
        return with_mode(plan, mode)

    def _in(self, name: str) -> Measurements:
        """Return the measurements converted to a coding."""
        if name == self.now:
            return self.latest
        if name not in self.converted:
            buffers, quantises = self.buffers, self.choice.quantises
            codec, quantiser = (None, sparsifiers.quantiser(name)) if quantises else (name, None)
            ready = self.latest.profile.backward.cumsum()
            load = profile(buffers, ready, self.step, codec=codec, quantiser=quantiser).load
            codings, workers = (self.known[self.now], self.known[name]), buffers.across.size
            self.converted[name] = in_coding(self.latest, load, *codings, workers, quantises=quantises)
        return self.converted[name]


def _shape(candidate: Candidate) -> tuple[int, int, str, str]:
    """Return the numbers of messages and dense merge buffers, the codec and the exchange."""
    plan, mode = candidate.plan, candidate.mode
    return sum(plan.parts), sum(plan.dense), mode.codec, mode.exchange


# The record for reports: what planning does on one rank, what is in use, and why.

HOPELESS_OTHERS = f"every other candidate is predicted to take {HOPELESS:g} times as long"
DENSE_ALONE = "uncompressed gradients are predicted to be faster, {milliseconds:.3g} ms"
LEFT_OUT = "{names} left out: {share:.0%} of coordinates lie in blocks that mix zeros and other values"
NONE_SELECTED = "no sparsifier is in use"
ALONE = "there is one worker, which sends nothing"
UNTIL = "candidates are tried until about step {until}"


def status_of(
    buffers: MergeBuffers, choice: Choice, now: Activity, measured: Measurements | None, bytes_probed: int, until: int
) -> PlanStatus:
    """Return the status of planning with these merge buffers and this choice.

    ``until``: the step, counted from 1, before which a choice that is open is likely to be made.
    """
    config, quantiser = buffers.config, buffers.quantiser
    wire, exchange = config.compression.wire, config.merging.exchange
    selects = Kind.SPARSE in config.compression.compressor.kinds
    open_why = ALONE if buffers.comm.size == 1 else UNTIL.format(until=until)
    why = choice.why() or (open_why if now is not Activity.SETTLED else "")
    if buffers.comm.size == 1 or now is Activity.FIXED:
        why = ALONE if buffers.comm.size == 1 else "the plan is fixed"
    wire_why = "these options leave no choice" if wire == AUTO else f"you set wire={wire!r}"
    if config.wires:
        wire_why = why or "no other format was tried"
    exchange_why = f"you set exchange={exchange!r}"
    if config.exchanges:
        exchange_why = why or "no other exchange was tried"
    elif config.chooses_dense:
        exchange_why = f"exchange={exchange!r} compresses if that is faster: {why or 'no other exchange was tried'}"
    quantiser_why = "no quantizer is in use" if quantiser is None else "you set it"
    if config.quantisers:
        quantiser_why = open_why if choice.is_open else why or "no other format was tried"
    is_quantised = quantiser is not None and not all(buffers.plan.dense)
    return PlanStatus(
        wire=buffers.wire,
        wire_why=wire_why if selects else NONE_SELECTED,
        exchange=buffers.exchange,
        exchange_why=exchange_why if selects or (config.chooses_dense and not config.quantises) else NONE_SELECTED,
        quantiser=quantiser.name if quantiser is not None and is_quantised else NONE,
        bits=quantiser.bits if quantiser is not None and is_quantised else None,
        quantiser_why=quantiser_why,
        activity=now,
        bytes_probed=bytes_probed,
        measured=measured,
    )
