# SPDX-License-Identifier: Apache-2.0
"""Common decision of all ranks about gradients that are infinite or NaN, at the same step.

It is made once all messages of a step have arrived. Nothing of an attempt is kept before ``step()``, so there is little
to undo.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch

from agmerge.backends.handshake import gather_texts
from agmerge.errors import AGMergeError, NonFiniteError, and_more
from agmerge.step.round import Round
from agmerge.tensors.nonfinite import SKIP

MOST_IN_A_ROW = 100  # skipped steps: a scaler halves its scale at each, and has found the right one long before


GIVEN_UP = (
    "AGM119: Step {step} is abandoned on all ranks: {why}. Parameters and residuals are unchanged. Call zero_grad() "
    "to continue with the next batch, or end the script."
)


def resolve_nonfinite(attempt: Round) -> AGMergeError | None:
    """Collective. Decide about an attempt in which a rank has found an infinity or NaN, or has given up.

    Either all updates become infinite, so that every GradScaler backs off, and None is returned; or the result is an
    error, the same on every rank, for the caller to raise. With every gradient finite, nothing happens.
    """
    if not attempt.nonfinite:
        return None
    buffers, totals = attempt.buffers, attempt.totals
    config = buffers.config
    policy = config.guards.nonfinite
    if config.sync.updates is None and policy == SKIP:
        totals.skipped(buffers.layout.numel, buffers.flat.tensors.numel)
        if totals.skipped_in_a_row < MOST_IN_A_ROW:
            for slot in buffers.layout.slots:
                if slot.index not in buffers.flat.in_place:  # a gradient of this rank, until its update is read
                    buffers.flat.updates.of(slot).fill_(torch.inf)
            return None
    own = json.dumps([attempt.guard.given_up, attempt.guard.parameters_found()])
    texts = gather_texts(buffers.comm, own.encode(), "nonfinite", buffers.config.guards.timeout)
    said = [json.loads(text) for text in texts]
    why = "; ".join(f"rank {rank} {words}" for rank, (words, _) in enumerate(said) if words)
    if why:
        return AGMergeError(GIVEN_UP.format(step=attempt.step, why=why))
    where = _described([names for _, names in said])
    if config.sync.updates is not None:
        return NonFiniteError(
            f"AGM106: Gradients or updated parameters are infinite or NaN: {where}. The shared parameters are "
            "unchanged. Call zero_grad() to continue without this step. nonfinite='skip' skips such steps on the "
            "affected rank. If the parameters are not finite, load a checkpoint.",
            where,
        )
    if policy == SKIP:
        return NonFiniteError(
            f"AGM108: {totals.skipped_in_a_row} steps in a row were skipped because of infinite or NaN gradients; in "
            f"this step: {where}. Training does not recover by itself. Check the loss, the data and the learning rate.",
            where,
        )
    return NonFiniteError(
        f"AGM106: Gradients are infinite or NaN: {where}. Parameters and residuals are unchanged. Call zero_grad() to "
        "continue without this step. nonfinite='skip' skips such steps, and scaler= supports float16 under autocast.",
        where,
    )


def _described(names_by_rank: Iterable[list[str]]) -> str:
    """Return a text that names the parameters that each rank has found."""
    return "; ".join(f"rank {rank}: {and_more(names)}" for rank, names in enumerate(names_by_rank) if names)
