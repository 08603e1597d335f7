# SPDX-License-Identifier: Apache-2.0
"""Candidates: plans that the next steps may be sent by. A few steps are trained with each of several.

A predicted gain has to show in the time of whole steps. Plans take turns several times, so that a changing load of the
machine affects all of them. Of the steps of each the fastest third counts, since other load only adds; by how much
others take longer is the doubt about it. A trial that is under way is kept in checkpoints: a run that resumes goes on
with it.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

import merging
from agmerge.exchanges.routing import OWN, SendMode, send_mode
from agmerge.planning.measuring import predicted
from agmerge.step.agreed_state import why_plan_does_not_fit
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.version import __version__
from merging import Measurements, storage


@dataclass(frozen=True)
class Candidate:
    """Plan that the next steps may be sent by, with its prediction. Candidates travel from rank 0 as plain values."""

    plan: merging.Plan
    measured: Measurements  # the basis of its prediction

    @cached_property
    def finish(self) -> float:
        """Return when the last exchange is predicted to end, in seconds since backward began."""
        return predicted(self.plan, self.measured).finish

    @property
    def is_dense(self) -> bool:
        """Return whether nothing is compressed."""
        return all(self.plan.dense)

    @property
    def mode(self) -> SendMode:
        """Return the send mode of the plan: of one that is all dense, codec and exchange do not matter."""
        mode = send_mode(self.plan)
        return replace(mode, codec=OWN, exchange=OWN) if self.is_dense else mode


def dumps(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return candidates as a record of plain values, in which equal measurements occur once."""
    texts = [each.measured.dumps() for each in candidates]
    distinct = list(dict.fromkeys(texts))
    rows = [(each.plan.dumps(), distinct.index(text)) for each, text in zip(candidates, texts, strict=True)]
    return {"rows": rows, "measured": distinct}


def loads(record: Mapping[str, Any]) -> list[Candidate]:
    """Return the candidates that :func:`dumps` was given."""
    measured = [Measurements.loads(text) for text in record["measured"]]
    return [Candidate(merging.Plan.loads(plan), measured[index]) for plan, index in record["rows"]]


# Turns of plans.

TURN = 3  # steps of a plan until the next one has its turn; the first of them is not counted
ROUNDS = 3  # most turns of a plan
HOPELESS = 1.4  # times as long as each step of another plan: where all of one turn are, there is no further turn,
SURE = 2  # nor where all of so many turns are longer at all


class PlanTrial:
    """Trial of plans in turn, ``TURN`` steps each, with this rank's step times; rank 0 chooses the next turn."""

    def __init__(self, *plans: merging.Plan) -> None:
        """Begin with the first of ``plans`` in the next step."""
        self.plans = plans
        self._counted: list[list[float]] = [[] for _ in plans]  # seconds of steps
        self._turns = [0] * len(plans)  # begun, of each plan
        self._last_end = time.perf_counter()
        self.begin_turn(0)

    def begin_turn(self, number: int) -> merging.Plan:
        """Begin the turn of a plan, by its number, and return it."""
        self._turns[number] += 1
        self._now, self._steps = number, 0  # the plan in use, and its steps in this turn
        return self.plans[number]

    def count_step(self) -> bool:
        """Count a step that has ended; return whether the turn of the plan in use is over: equal on all ranks."""
        now = time.perf_counter()
        self._steps += 1
        if self._steps > 1:
            self._counted[self._now].append(now - self._last_end)
        self._last_end = now
        return self._steps == TURN

    def following(self) -> int:
        """Return the number of the plan that has the next turn, now that one is over; -1: the trial is over."""
        if min(self._turns) == 0:
            return self._turns.index(0)
        left = [number for number in range(len(self.plans)) if not self._is_out(number)]
        waiting = [number for number in left if self._turns[number] < ROUNDS]
        return min(waiting, key=self._turns.__getitem__) if waiting and len(left) > 1 else -1

    def _is_out(self, number: int) -> bool:
        """Return whether a plan, which has had a turn as all have, is certainly not the fastest one."""
        seconds = self.seconds()
        best = min(range(len(seconds)), key=seconds.__getitem__)
        is_sure = min(self._turns[number], self._turns[best]) >= SURE
        most = (1.0 if is_sure else HOPELESS) * max(self._counted[best])
        return number != best and min(self._counted[number]) > most

    def seconds(self) -> list[float]:
        """Return the seconds of a step with each plan on this rank: the mean of the fastest third."""
        return [statistics.fmean(sorted(seconds)[: max(1, len(seconds) // 3)]) for seconds in self._counted]

    def doubts(self) -> list[float]:
        """Return by how much steps with each plan differ on this rank: from :meth:`seconds` to their median."""
        return [statistics.median(steps) - fast for steps, fast in zip(self._counted, self.seconds(), strict=True)]

    def saved(self) -> dict[str, Any]:
        """Return the turns and times so far, as plain values, for :meth:`resume`."""
        return {"counted": self._counted, "turns": self._turns, "now": self._now}

    def resume(self, saved: Mapping[str, Any]) -> merging.Plan:
        """Go on with a saved trial of the same plans, and return the plan whose turn begins again."""
        self._counted, self._turns = [[*each] for each in saved["counted"]], [*saved["turns"]]
        self._turns[saved["now"]] -= 1
        return self.begin_turn(saved["now"])


# Trials in checkpoints.

_KIND = "agmerge.Trial"


class KeptTrial(NamedTuple):
    """Trial of plans in an earlier run."""

    tried: list[Candidate]  # none: costs were being measured, for the first time
    turns: dict[str, Any]  # and times so far, as :meth:`PlanTrial.saved` returns them
    fits: bool  # it is of these tensors, and was made among workers as these are; rank 0's counts


def kept(buffers: MergeBuffers, tried: Sequence[Candidate], turns: Mapping[str, Any]) -> str:
    """Return a trial under way as text, with a checksum: see :class:`KeptTrial`."""
    return storage.seal(_KIND, {"place": _place_of(buffers), "tried": dumps(tried), "turns": turns})


def read(text: str, buffers: MergeBuffers) -> KeptTrial | None:
    """Return the trial of a text; None for a text that is damaged or of another version."""

    def build(place: str, tried: Mapping[str, Any], turns: dict[str, Any]) -> KeptTrial:
        plans, names = loads(tried), [slot.name for slot in buffers.layout.slots]
        misfits = [why_plan_does_not_fit(each.plan, names) for each in plans]
        return KeptTrial(plans, turns, place == _place_of(buffers) and not any(misfits))

    with suppress(ValueError):
        return storage.unseal(text, _KIND, build)
    return None


def _place_of(buffers: MergeBuffers) -> str:
    """Return a digest of what times of steps depend on: arguments, backend, workers, and how many of them share a host.

    Other hosts of a cluster are as good as these. Rank 0's counts.
    """
    comm = buffers.comm
    facts = [buffers.config.facts(), comm.name, comm.size, comm.local_size, __version__, torch.get_num_threads()]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
