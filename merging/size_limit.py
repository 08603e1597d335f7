# SPDX-License-Identifier: Apache-2.0
"""Size limit of merge buffers: indices in a message are int32."""

from __future__ import annotations

from collections.abc import Sequence

from merging.plan import Plan
from merging.profile import Profile

LIMIT = 2**31


def check_tensors(profile: Profile) -> None:
    """Raise ValueError, with its name, for a tensor that is too large for a merge buffer."""
    index = int(profile.numel.argmax())
    if profile.numel[index] >= LIMIT:
        raise ValueError(
            f"tensor {index} ({profile.names[index]!r}) has {profile.numel[index]} elements, but a merge buffer must "
            "have fewer than 2**31. Split the parameter."
        )


def cut(plan: Plan, profile: Profile) -> Plan:
    """Return `plan` with every merge buffer of 2**31 elements or more cut into runs that stay below.

    The pieces keep the dense flag, the label and the parts. `check_tensors` must have passed.
    """
    numel = profile.numel.tolist()
    pieces = [cut_counts(numel[start:stop], LIMIT) for start, stop in plan.bounds]
    return Plan(
        counts=tuple(count for piece in pieces for count in piece),
        dense=tuple(flag for piece, flag in zip(pieces, plan.dense, strict=True) for _ in piece),
        labels=tuple(label for piece, label in zip(pieces, plan.labels, strict=True) for _ in piece),
        names=plan.names,
        parts=tuple(parts for piece, parts in zip(pieces, plan.parts, strict=True) for _ in piece),
    )


def cut_counts(numel: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return tensors per run when a run is closed before it would reach `limit` elements.

    A tensor that reaches `limit` by itself is a run of its own.
    """
    counts = [0]
    size = 0
    for elements in numel:
        if counts[-1] and size + elements >= limit:
            counts.append(0)
            size = 0
        counts[-1] += 1
        size += elements
    return tuple(counts)
