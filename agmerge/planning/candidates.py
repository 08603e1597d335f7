# SPDX-License-Identifier: Apache-2.0
"""Plans that the next steps may be sent by, with their predictions; they travel from rank 0 as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import merging
from agmerge.exchanges.routing import OWN, SendMode, send_mode
from agmerge.planning.codec_choice import predicted_finish
from agmerge.step.agreed_state import with_mode
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


def step_times(seconds: Iterable[tuple[str, float]]) -> str:
    """Return names with the seconds of a step, as text, such as ``"70.9 ms per step with eden-4"``."""
    return ", ".join(f"{1e3 * took:.3g} ms per step with {name}" for name, took in seconds)


def all_dense(planner: merging.Planner, measured: Measurements) -> Pieces[merging.Plan]:
    """Return, in pieces, the planner's plan if all merge buffers were dense."""
    whole = sent_whole(measured)
    plan = yield from pieces_of(planner.plan, whole.profile, whole.costs, "dense")
    mode = "behind" if "behind" in measured.modes else measured.modes[0]  # the same as for a plan with a choice
    return replace(with_mode(plan, mode), dense=(True,) * len(plan.counts))
