# SPDX-License-Identifier: Apache-2.0
"""Cut a merge buffer into several messages: pure, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import merging
from agmerge.exchanges.send_mode import send_modes
from agmerge.tensors.layout import ALIGNMENT, Segment, Slot


def why_parts_impossible(plan: merging.Plan) -> str:
    """Return why the merge buffers of ``plan`` cannot travel in its parts; empty if they can."""
    for buffer, (count, parts, mode) in enumerate(zip(plan.counts, plan.parts, send_modes(plan), strict=True)):
        if parts > 1 and count > 1 and mode.ahead:
            return (
                f"merge buffer {buffer} has {parts} parts, but each of its {count} tensors is sparsified ahead, "
                "before it is complete. Use 1 part, or sparsify='behind'"
            )
    return ""


def split(group: Sequence[Segment], parts: int) -> list[list[Segment]]:
    """Cut the segments of one message into at most ``parts`` messages.

    Every sparse segment is cut into ``parts`` pieces, as far as it is long enough, and each message has one of each;
    dense segments go with the first.
    """
    messages: list[list[Segment]] = [[] for _ in range(parts)]
    for segment in group:
        for message, piece in zip(
            messages, cut(segment, parts) if segment.tensor_class.sparse else [segment], strict=False
        ):
            message.append(piece)
    return [message for message in messages if message]


def cut(segment: Segment, parts: int) -> list[Segment]:
    """Cut ``segment``, of whole tensors, into at most ``parts`` pieces of about the same length.

    Cuts are multiples of ``ALIGNMENT``, and between two tensors, or else two rows of one, where such a place is
    within a quarter of a piece's length: row-wise sparsifiers then see whole rows.
    """
    each = segment.length / parts
    places = {_place(segment, segment.start + i * each, each / 4) for i in range(1, parts)}
    cuts = sorted(places | {segment.start, segment.stop})
    if len(cuts) == 2:
        return [segment]
    return [
        Segment(
            segment.tensor_class,
            tuple(slot for slot in segment.slots if slot.offset < stop and start < slot.end),
            (start, stop),
        )
        for start, stop in pairwise(cuts)
    ]


def _place(segment: Segment, goal: float, tolerance: float) -> int:
    """Choose where to cut near ``goal``: between tensors, else between rows, else anywhere."""
    slot = next(slot for slot in segment.slots if goal < slot.end)
    row = math.prod(slot.shape[1:]) if len(slot.shape) > 1 else 1
    places = [slot.offset, slot.end]
    places += [_nearest(slot, goal, math.lcm(row, ALIGNMENT)), _nearest(slot, goal, ALIGNMENT)]
    return next((place for place in places if abs(place - goal) <= tolerance), places[-1])


def _nearest(slot: Slot, goal: float, step: int) -> int:
    """Return the place nearest to ``goal``: a multiple of ``step`` behind where the tensor begins, or its end."""
    return min(slot.offset + round((goal - slot.offset) / step) * step, slot.end)
