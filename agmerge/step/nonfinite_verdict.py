"""What all ranks do about gradients that are infinite or NaN: the same, at the same step.

Judged once all messages of a step are here. Until ``step()`` nothing of an attempt is kept, so there is little to undo.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import torch

from agmerge.backends.handshake import gather_texts
from agmerge.errors import NonFiniteError, and_more
from agmerge.step.round import Round
from agmerge.tensors.nonfinite import SKIP

MOST_IN_A_ROW = 100  # skipped steps: a scaler halves its scale at each, and has found the right one long before


def judge(attempt: Round, attach: Callable[[Round], None]) -> NonFiniteError | None:
    """Collective. What becomes of an attempt whose messages are all here: ``attach`` makes its updates the gradients.

    Where a rank has found something, the attempt is withdrawn: all updates are infinite, or there is an error, for the
    caller to raise and the same on every rank. Collective where there is an error.
    """
    error = _verdict(attempt) if attempt.nonfinite else None
    if error is None:
        attach(attempt)
    attempt.withdraw()
    return error


def _verdict(attempt: Round) -> NonFiniteError | None:
    session, stats = attempt.session, attempt.stats
    policy = session.config.nonfinite
    if policy == SKIP:
        stats.skipped(session.layout.numel, session.tensors.numel)
        if stats.skipped_in_a_row < MOST_IN_A_ROW:
            gradients = [arena.gradients for arena in session.arenas.values()]
            for one in gradients if session.shards is None else [session.shards.gradients]:
                for update in one.values():
                    update.fill_(torch.inf)  # so that every GradScaler backs off
            return None
    found = gather_texts(session.comm, json.dumps(attempt.watch.where()).encode(), "nonfinite", session.config.timeout)
    where = _told([json.loads(names) for names in found])
    if policy == SKIP:
        return NonFiniteError(
            f"{stats.skipped_in_a_row} steps in a row were skipped, because gradients were not finite; in this one: "
            f"{where}. Look at the loss, the data and the learning rate: training does not recover by itself"
        )
    return NonFiniteError(
        f"gradients are infinite or NaN: {where}. Parameters and residuals are as before this step. Call zero_grad() "
        "to go on without it; nonfinite='skip' leaves out such steps, and scaler= is for float16 under autocast"
    )


def _told(found: Iterable[list[str]]) -> str:
    """Who found what, in words."""
    parts = []
    for rank, names in enumerate(found):
        if names:
            parts.append(f"rank {rank}: {and_more(names)}")
    return "; ".join(parts)
