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
    """Return `plan` with the parts with which it is predicted to end sooner; its own parts are dropped.

    While one part travels, the next is selected and encoded. So of a merge buffer that backward does not hide
    about the smaller of both times is hidden by the other; every part costs a start-up. From the last merge
    buffer to the first, each is tried in 2, 4, ... up to `most` parts of at least `SMALLEST` elements of work. It
    gets the number that ends the step first, if that gains more than the share `GAIN` of the finish. At most
    m log2(most) predictions. Never divided: dense merge buffers, those without selection, and merge buffers of
    several tensors in mode "ahead", which are selected from before they are complete.

    Source: the pipelines of CaSync (HiPress, SOSP 2021) and Espresso (EuroSys 2023); the rule is our own.
    Raises ValueError for an unknown mode, a plan that does not fit the profile, and `most` below 1.
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
