# SPDX-License-Identifier: Apache-2.0
"""Choose the bits of gradients: the most exact candidate with a step about as long as the fastest one's.

On rank 0, from the measurements of all ranks. Predictions select the candidates to try; trials of whole steps decide.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

import merging
import sparsifiers
from agmerge.exchanges.routing import OWN, send_mode, with_send_mode
from agmerge.planning.candidates import Candidate, all_dense, step_times
from agmerge.planning.codec_choice import best_plan, planner_of, predicted_finish, stretched, tilted
from agmerge.planning.cost_probe import measured_class
from agmerge.planning.measuring import bytes_of_quantised, gather_seconds, profile
from agmerge.step.merge_buffers import MergeBuffers
from merging import Measurements, Pieces
from sparsifiers.quantising.base import NONE
from sparsifiers.quantising.draws import Draws

# Measure costs of quantisers here: processor time, and zeros that take bits. Convert measurements to another one.

SIZE = 256  # coordinates of a block
BLOCKS = 256  # timed
TURNS = 3  # times; the fastest counts


@dataclass(frozen=True)
class Speed:
    """Costs of a quantiser, on the slowest rank."""

    name: str
    size: float  # bytes of an element in a message, scales included
    encode: float  # seconds an element
    decode: float  # seconds an element


def measure_quantisers(buffers: MergeBuffers, names: Iterable[str]) -> dict[str, Speed]:
    """Collective. Return the costs of quantisers of these names, equal on every rank. Milliseconds, between steps."""
    tensor_class = measured_class(buffers.layout)
    made = {name: sparsifiers.quantiser(name) for name in names}
    own = np.array([_seconds(quantiser, tensor_class.device) for quantiser in made.values()])
    encode, decode = (column.max(axis=0) for column in gather_seconds(buffers, *own.T))
    return {
        name: Speed(name, bytes_of_quantised(buffers, tensor_class, quantiser), float(encode[i]), float(decode[i]))
        for i, (name, quantiser) in enumerate(made.items())
    }


class CountedZeros:
    """Count of zeros beside other values, in what the last step before planning has sent or could send in few bits."""

    def __init__(self, buffers: MergeBuffers) -> None:
        self._buffers = buffers
        self._is_on = False  # the step to come is counted
        self._last = (0, 0)  # coordinates in mixed blocks, and all, of this rank

    def end_step(self) -> None:
        """Take the count of a step that has ended. If it has sent nothing, the count before stays."""
        if self._is_on:
            counts = self._buffers.store.end_zeros()
            self._last = counts if counts[1] else self._last

    def begin_step(self, step: int, is_wanted: bool) -> None:
        """Count the zeros of ``step``, the one to come, if that is wanted. It costs one pass over gradients."""
        self._is_on = is_wanted
        if is_wanted:
            self._buffers.store.start_zeros()

    def share(self) -> float:
        """Collective. Return the share of all ranks' coordinates in mixed blocks: the same on every rank."""
        mixed, coordinates = gather_seconds(self._buffers, *np.array([self._last], dtype=float).T)
        return float(mixed.sum() / max(coordinates.sum(), 1.0))


def _seconds(quantiser: sparsifiers.Quantiser, device: torch.device) -> tuple[float, float]:
    """Return the seconds an element to encode and to decode, on this rank."""
    values = torch.linspace(-1.0, 1.0, BLOCKS * SIZE, device=device)
    out = torch.empty(BLOCKS * quantiser.record_bytes(SIZE), dtype=torch.uint8, device=device)
    encode = decode = float("inf")
    for _ in range(TURNS):
        began = _now(device)
        quantiser.encode(values, SIZE, Draws(0), out)
        encoded = _now(device)
        quantiser.decode_sum([out], [Draws(0)], SIZE, 1.0, values)
        encode, decode = min(encode, encoded - began), min(decode, _now(device) - encoded)
    return encode / values.numel(), decode / values.numel()


def _now(device: torch.device) -> float:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)  # between steps: nothing else runs
    return time.perf_counter()


def in_quantiser(measured: Measurements, buffers: MergeBuffers, step: int, now: Speed, other: Speed) -> Measurements:
    """Return measurements made with the quantiser ``now`` as they would be with ``other``.

    An exchange takes as long as one of as many bytes took. A rank encodes its gradients, and a share of their mean; it
    decodes as many elements as it has, before the second phase.

    Args:

        measured: with ``now``.
        buffers: of the training.
        step: the one to come.
        now, other: of :func:`measure_quantisers`.
    """
    if now.name == other.name:
        return measured
    ready = measured.profile.backward.cumsum()
    load = profile(buffers, ready, step, quantiser=sparsifiers.quantiser(other.name)).load
    more = other.decode - now.decode + (other.encode - now.encode) / buffers.across.size
    exchange = tilted(stretched(measured.exchange, now.size / other.size), more)
    sparsify = measured.sparsify
    return replace(
        measured,
        profile=type(measured.profile)(**{**measured.profile.plain(), "load": load}),
        exchange=exchange,
        sparsify=None if sparsify is None else tilted(sparsify, other.encode - now.encode),
    )


ABOUT = 1.05  # times the fastest step: a trial cannot tell such steps from it
HOPELESS = 1.5  # times the fastest predicted step: slower candidates are not tried
HOPELESS_OTHERS = f"every other candidate is predicted to take {HOPELESS:g} times as long"
MOST = 3  # candidates that are tried
CLEAR = 1.2  # times as fast, in two trials, has a less exact candidate to be to replace the one in use
AGAIN = 1000  # steps after a choice until there may be another one
FEW_BITS = 2  # a quantiser of so many or fewer is left out if zeros take one of them from more than:
MIXED = 1 / 8  # of the quantised coordinates
LEFT_OUT = "{names} left out: {share:.0%} of coordinates lie in blocks that mix zeros and other values"


class QuantiserSearch:
    """Search for the plans to try, from one set of measurements.

    Args:

        planner: makes plans.
        buffers: the merge buffers in use.
        latest: the measurements, with the quantiser in use.
        speeds: of all quantisers among the candidates, by name.
        step: the one to come.
        usual: seconds of a step as it is.
        choice: the one so far.
    """

    def __init__(
        self,
        planner: merging.Planner,
        buffers: MergeBuffers,
        latest: Measurements,
        speeds: Mapping[str, Speed],
        step: int,
        usual: float,
        choice: QuantiserChoice,
    ) -> None:
        self._planner, self._buffers, self._latest, self._speeds, self._step = planner, buffers, latest, speeds, step
        assert buffers.quantiser is not None
        self._now = buffers.quantiser.name
        self._overhead = max(0.0, usual - predicted_finish(buffers.plan, latest))  # seconds, in any plan
        self._choice = choice

    def to_try(self) -> Pieces[list[Candidate]]:
        """Return, in pieces, the candidates to try, or other plans for the same one while that stays."""
        return self._all() if self._choice.may_change(self._step) else self._same()

    def _same(self) -> Pieces[list[Candidate]]:
        """Return, in pieces, the plan in use, after a better one for the same candidate if there is one."""
        current = Candidate(self._buffers.plan, self._latest)
        if all(current.plan.dense) and self._latest.dense is not None:
            best = yield from self._dense()
        else:
            best = yield from self._best(self._now)
        best = Candidate(with_send_mode(best.plan, workers=current.mode.workers), best.measured)
        if best.plan == current.plan or current.finish <= best.finish * (1 + self._planner.min_gain):
            return [current]
        return [best, current]

    def _all(self) -> Pieces[list[Candidate]]:
        """Return, in pieces, the best plan of each candidate that is not hopeless, dense last.

        The candidate in use is always among them, unless zeros rule it out: trying it costs nothing.
        """
        found, names = [], self._buffers.config.compression.compressor.candidates
        for name in self._choice.allowed:
            found.append((yield from self._best(name)))
        if NONE in names and self._latest.dense is not None:
            found.append((yield from self._dense()))
        fastest = min(found, key=self._seconds)
        exact = min(found, key=lambda each: exactness(each, names))
        limit = HOPELESS * self._seconds(fastest)
        near = [each for each in found if self._seconds(each) < limit or self._choice.is_on(each)]
        while len(near) > MOST:
            between = [each for each in near if each not in (fastest, exact) and not self._choice.is_on(each)]
            near.remove(max(between, key=self._seconds))
        return near

    def _seconds(self, candidate: Candidate) -> float:
        """Return the predicted seconds of a step."""
        return self._overhead + candidate.finish

    def _best(self, name: str) -> Pieces[Candidate]:
        """Return, in pieces, the best plan with a quantiser; some merge buffers may be dense, but not all."""
        measured = in_quantiser(self._latest, self._buffers, self._step, self._speeds[self._now], self._speeds[name])
        plan = yield from best_plan(self._planner, self._buffers, measured)
        if all(plan.dense):  # all dense is another candidate
            plan = yield from best_plan(self._planner, self._buffers, replace(measured, dense=None))
        return Candidate(with_send_mode(plan, quantiser=name), measured)

    def _dense(self) -> Pieces[Candidate]:
        """Return, in pieces, the best plan with all merge buffers dense."""
        plan = yield from all_dense(planner_of(self._buffers, self._planner), self._latest)
        return Candidate(with_send_mode(plan, quantiser=self._now), self._latest)


def exactness(candidate: Candidate, candidates: Sequence[str]) -> int:
    """Return the place of a candidate among ``candidates``, names with the most exact one first."""
    return candidates.index(NONE if candidate.is_dense and NONE in candidates else candidate.mode.quantiser)


def loses_by_zeros(name: str) -> bool:
    """Return whether a quantiser has too few bits for blocks that mix zeros and other values."""
    quantiser = sparsifiers.quantiser(name)
    return quantiser.masks_zeros and quantiser.bits <= FEW_BITS


def taken(tried: Sequence[Candidate], names: Sequence[str], seconds: Sequence[float], doubts: Sequence[float]) -> int:
    """Return the number of the candidate to continue with: the most exact one that is about as fast as the fastest.

    Args:

        tried: the candidates.
        names: of all, the most exact one first.
        seconds: of a step with each, on the slowest rank.
        doubts: by how much steps with each vary.
    """
    limit = ABOUT * min(seconds)
    near = [number for number, took in enumerate(seconds) if took - doubts[number] <= limit]
    return min(near, key=lambda number: (exactness(tried[number], names), seconds[number]))


class QuantiserChoice:
    """Choice of one agreement, which stays for long. All ranks call alike; rank 0 decides.

    ``buffers``: the merge buffers in use; their plan records for how many workers its quantiser was chosen.
    ``zeros``: of what they have sent.
    """

    codec_why = exchange_why = ""
    has_measured = True  # each search begins with that

    def __init__(self, buffers: MergeBuffers, zeros: CountedZeros) -> None:
        self._buffers, self._zeros, self._workers = buffers, zeros, buffers.comm.size
        self._names = buffers.config.compression.compressor.candidates  # the most exact first
        self._step = 0  # the step to come when it was chosen, or when this agreement began
        self.is_clear = False  # a less exact candidate was clearly faster in the last trial: try again
        self._why = ""  # the step times of the last trial, as text; "": there was none
        self._share = 0.0  # of coordinates in blocks that mix zeros and other values, when it was last measured
        self.take_over(buffers.plan, 0)

    @property
    def quantiser_why(self) -> str:
        """Return the reason for the choice."""
        reason = self._why or "it was chosen before, for as many workers"
        names = " and ".join(self._left_out)
        return f"{reason}; {LEFT_OUT.format(names=names, share=self._share)}" if names else reason

    @property
    def allowed(self) -> tuple[str, ...]:
        """Return the quantisers among the candidates, without those that zeros rule out."""
        return tuple(name for name in self._buffers.config.quantisers if name not in self._left_out)

    @property
    def _left_out(self) -> tuple[str, ...]:
        """Return the quantisers that zeros rule out; (): all, if there is no other candidate."""
        names = self._buffers.config.quantisers
        noisy = tuple(filter(loses_by_zeros, names)) if self._share > MIXED else ()
        return noisy if len(noisy) < len(names) or self._buffers.config.chooses_dense else ()

    def is_ruled_out(self) -> bool:
        """Collective. Return whether zeros rule out what is in use; they are measured if they could."""
        is_dense, name = self._candidate
        if is_dense or name == OWN or not loses_by_zeros(name):
            return False
        self._share = self._zeros.share()
        return self._uses_left_out

    @property
    def _uses_left_out(self) -> bool:
        """Return whether zeros rule out what is in use."""
        is_dense, name = self._candidate
        return not is_dense and name in self._left_out

    def take_over(self, plan: merging.Plan, step: int) -> None:
        """Adopt the choice of an earlier agreement or run, if it was made for the same number of workers.

        ``step``: the one to come.
        """
        mode = send_mode(plan)
        self._candidate = all(plan.dense), mode.quantiser  # the choice: whether all is dense, and the quantiser
        self._is_open, self._step = mode.quantiser == OWN or mode.workers != self._workers, step

    @property
    def is_open(self) -> bool:
        """Return whether no choice has been made so far."""
        return self._is_open

    def is_on(self, candidate: Candidate) -> bool:
        """Return whether this is the chosen candidate."""
        return not self._is_open and (candidate.is_dense, candidate.mode.quantiser) == self._candidate

    def may_change(self, step: int) -> bool:
        """Return whether another candidate may be chosen before this step."""
        return self._is_open or self._uses_left_out or step - self._step >= AGAIN

    def search(
        self, planner: merging.Planner, latest: Measurements, step: int, usual: float, *, stays: bool
    ) -> Pieces[list[Candidate]]:
        """Collective. Measure quantisers, and return the search for the plans to try.

        The arguments are those of :meth:`agmerge.planning.sparse_search.SparseChoice.search`.
        """
        buffers = self._buffers
        assert buffers.quantiser is not None
        names = dict.fromkeys([*buffers.config.quantisers, buffers.quantiser.name])
        speeds = measure_quantisers(buffers, names)
        self._share = self._zeros.share()
        return QuantiserSearch(planner, buffers, latest, speeds, step, usual, self).to_try()

    def planned(self, tried: Sequence[Candidate], step: int) -> merging.Plan:
        """Return the plan to continue with: chosen, if there is nothing to try. ``step``: the one to come."""
        if len(tried) > 1:
            return tried[0].plan
        if self.is_open or not self.is_on(tried[0]):
            self._why = HOPELESS_OTHERS
        return self._settle(tried[0], step)

    def best(self, tried: Sequence[Candidate], seconds: Sequence[float], doubts: Sequence[float]) -> int:
        """Return the number of the candidate to continue with after a trial.

        ``seconds``: of a step with each, on the slowest rank; ``doubts``: by how much steps with each vary. An earlier
        choice is replaced only by a more exact candidate, or by one that was clearly faster twice.
        """
        names = self._names
        chosen = taken(tried, names, seconds, doubts)
        now = next((number for number, each in enumerate(tried) if self.is_on(each)), None)
        if now is None or exactness(tried[chosen], names) <= exactness(tried[now], names):
            self.is_clear = False
            return chosen
        is_clear = seconds[now] - doubts[now] > CLEAR * seconds[chosen]
        twice, self.is_clear = is_clear and self.is_clear, is_clear
        return chosen if twice else now

    def settle(self, tried: Sequence[Candidate], number: int, seconds: Sequence[float], step: int) -> merging.Plan:
        """Return the plan of the candidate that a trial has chosen, and remember why. ``step``: the one to come."""
        if len({(each.is_dense, each.mode.quantiser) for each in tried}) > 1:  # else merge buffers alone were tried
            self._why = why(tried, seconds)
        return self._settle(tried[number], step)

    def _settle(self, candidate: Candidate, step: int) -> merging.Plan:
        """Return the plan of a chosen candidate, labelled with the number of workers."""
        if not self.is_on(candidate) or (self.may_change(step) and not self.is_clear):
            self._step = step
        self._candidate, self._is_open = (candidate.is_dense, candidate.mode.quantiser), False
        return with_send_mode(candidate.plan, workers=self._workers)


def why(tried: Sequence[Candidate], seconds: Sequence[float]) -> str:
    """Return a text with the seconds of a step with each candidate."""
    names = (NONE if each.is_dense else each.mode.quantiser for each in tried)
    return step_times(zip(names, seconds, strict=True))
