# SPDX-License-Identifier: Apache-2.0
"""Plans that the next steps may be sent by, and what is predicted of them. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

import merging
from agmerge.exchanges.routing import AHEAD, OWN, SendMode, send_mode
from agmerge.exchanges.table import EXCHANGES
from agmerge.metrics.step_times import Seconds
from agmerge.step.agreed_state import with_mode
from agmerge.step.merge_buffers import MergeBuffers
from merging import Measurements, Pieces
from merging.measured import sent_whole
from merging.pieces import pieces_of


@dataclass(frozen=True)
class Candidate:
    """Plan that the next steps may be sent by, with its prediction. Candidates travel from rank 0 as plain values."""

    plan: merging.Plan
    measured: Measurements  # the basis of its prediction

    @cached_property
    def finish(self) -> float:
        """Return when the last exchange is predicted to end, in seconds since backward began."""
        return predicted_finish(self.plan, self.measured)

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


# The best plans for given measurements. ``planner`` is the one in training, ``buffers`` the merge buffers in use.


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


def best_plan(planner: merging.Planner, buffers: MergeBuffers, measured: Measurements) -> Pieces[merging.Plan]:
    """Return, in pieces, the plan with which steps are predicted to end first, divided into messages if that helps."""
    fitting = planner_of(buffers, planner)
    plan, mode = yield from pieces_of(merging.best, fitting, measured)
    if fitting.max_messages > 1 and EXCHANGES[buffers.exchange].pipelines_parts:
        most = fitting.max_messages
        plan = yield from pieces_of(merging.divide, plan, measured.profile, measured.costs, mode, most)
    return with_mode(plan, mode)


def all_dense(planner: merging.Planner, buffers: MergeBuffers, measured: Measurements) -> Pieces[merging.Plan]:
    """Return, in pieces, the planner's plan if all merge buffers were dense."""
    whole = sent_whole(measured)
    plan = yield from pieces_of(planner_of(buffers, planner).plan, whole.profile, whole.costs, "dense")
    mode = "behind" if "behind" in measured.modes else measured.modes[0]  # the same as for a plan with a choice
    return replace(with_mode(plan, mode), dense=(True,) * len(plan.counts))


# Predictions.


def mode_of(plan: merging.Plan, measured: Measurements) -> str:
    """Return the mode in which ``plan`` is to be predicted: "ahead" by its labels, else the other allowed one."""
    return AHEAD if send_mode(plan).ahead else next((mode for mode in measured.modes if mode != AHEAD), AHEAD)


def predicted_finish(plan: merging.Plan, measured: Measurements) -> float:
    """Return when the last exchange is predicted to end, in seconds since backward began."""
    return merging.predict(plan, measured.profile, measured.costs, mode_of(plan, measured)).finish


def predicted_exchange_seconds(plan: merging.Plan, measured: Measurements) -> Seconds:
    """Return the seconds that each merge buffer's exchange is predicted to take, (m,)."""
    timeline = merging.predict(plan, measured.profile, measured.costs, mode_of(plan, measured))
    return np.array([span.end - span.start for span in timeline.spans])
