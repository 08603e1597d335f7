# SPDX-License-Identifier: Apache-2.0
"""Choice of the number of messages of each merge buffer, for a given partition."""

from __future__ import annotations

from dataclasses import replace

from merging.checks import whole
from merging.costs import Costs
from merging.pieces import Pieces, in_pieces
from merging.plan import Plan
from merging.profile import Profile
from merging.timeline import check_mode, predict

MOST = 8
SMALLEST = 2**18  # elements of work: selected from in 0.1 to 0.3 ms (measured), about the start-up of a message
GAIN = 0.03  # of the finish: least gain of a division, since predictions are not more exact


@in_pieces
def divide(plan: Plan, profile: Profile, costs: Costs, mode: str, most: int = MOST) -> Pieces[Plan]:
    """Divide merge buffers into parts if the step is predicted to end sooner.

    While one part is sent, the next is selected and encoded. Every part costs a start-up. From the last merge buffer to
    the first, 2, 4, ... parts of at least ``SMALLEST`` values are tried. A division is kept if it shortens the step by
    more than ``GAIN``. Uncompressed merge buffers, those without selection, and those of several tensors with
    ``"ahead"`` are never divided. The idea is that of CaSync (HiPress, SOSP 2021) and Espresso (EuroSys 2023).

    Args:
        plan (Plan): The merge buffers. Its own parts are dropped.
        profile (Profile): Sizes and times of the tensors.
        costs (Costs): Costs of selection and messages.
        mode (str): ``"dense"``, ``"ahead"`` or ``"behind"``.
        most (int): Largest number of parts. Default: 8.

    Raises:
        ValueError: For an unknown mode, a plan that does not fit the profile, or ``most`` below 1.
    """
    check_mode(mode)
    most = whole("divide: most", most, least=1)
    plan = replace(plan, parts=())
    finish = predict(plan, profile, costs, mode).finish
    if mode == "dense":
        return plan
    for buffer in reversed(range(len(plan.counts))):
        start, stop = plan.bounds[buffer]
        if plan.dense[buffer] or (mode == "ahead" and stop - start > 1):
            continue
        largest = min(most, int(profile.work[start:stop].sum()) // SMALLEST)
        ends = [(finish * (1 - GAIN), plan)]
        for power in range(1, largest.bit_length()):
            yield
            parts = (*plan.parts[:buffer], 2**power, *plan.parts[buffer + 1 :])
            divided = replace(plan, parts=parts)
            ends.append((predict(divided, profile, costs, mode).finish, divided))
        end, better = min(ends, key=lambda pair: pair[0])
        if better is not plan:
            finish, plan = end, better
    return plan
