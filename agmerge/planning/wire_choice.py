"""Choose the value codec: the fewest seconds for what arrives. Pure functions; rank 0 asks them.

What rounding leaves behind is sent later, so a step of which the share d arrives counts for as much: of all codecs
the one with the least seconds / d is taken, if that is clearly less than with the gradient's own dtype. One of which
too little arrives is none of them: see ``LEAST``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import merging
from merging import Curve, Measurements
from merging.checks import Elements

FAR = 1 << 31  # elements: where a curve of one point has another one
GAIN = 0.01  # share of a step's seconds: a codec that loses something has to gain more
LEAST = 0.9999  # of the energy that is selected: a codec of which less arrives is not taken, see docs/parity.md


@dataclass(frozen=True)
class Codec:
    """Say what a value codec does to the values that training selects now, on all ranks."""

    wire: str
    size: float  # bytes of an element in a message, with its index
    delivered: float  # share of the energy that is selected which receivers read
    encode: float  # seconds a value
    decode: float  # seconds a value


def best(seconds: Sequence[float], delivered: Sequence[float]) -> int:
    """Return the number of the way with the least seconds / delivered, the first of equals.

    Ways that lose something have to gain more than ``GAIN``, as a share, over the best one that does not, if there is
    one. A way of which nothing arrives is none.
    """
    scores = [took / share if share > 0 else float("inf") for took, share in zip(seconds, delivered, strict=True)]
    exact = [number for number, share in enumerate(delivered) if share == 1.0]
    first = int(np.argmin(scores))
    stays = min(exact, key=scores.__getitem__, default=first)
    return first if scores[first] * (1 + GAIN) < scores[stays] else stays


def in_wire(measured: Measurements, load: Elements, now: Codec, other: Codec, workers: int) -> Measurements:
    """Return what was measured in the codec ``now`` as it would be in another one.

    An exchange takes what one of as many bytes took, and what reading all ranks' values takes more or less. A message
    takes the processor as long as it did, and what writing takes more or less.

    Args:
        load: (n,), as :func:`agmerge.planning.measuring.profile` has it for the other codec.
        workers: whose values each rank reads.
    """
    profile = merging.Profile(**{**measured.profile.plain(), "load": load})
    exchange = stretched(measured.exchange, now.size / other.size)
    return replace(
        measured,
        profile=profile,
        exchange=tilted(exchange, workers * (other.decode - now.decode)),
        message=None if measured.message is None else tilted(measured.message, other.encode - now.encode),
    )


def stretched(curve: Curve, factor: float) -> Curve:
    """Return the curve over ``factor`` times as many elements."""
    points: dict[int, float] = {}
    for elements, seconds in zip(curve.elements, curve.seconds, strict=True):
        points[round(elements * factor)] = seconds
    return Curve(tuple(points), tuple(points.values()))


def tilted(curve: Curve, slope: float) -> Curve:
    """Return the curve with ``slope`` seconds more for each element; it stays one that does not fall, from 0 on."""
    if slope == 0.0:
        return curve
    at = curve.elements if len(curve.elements) > 1 else (*curve.elements, FAR)
    seconds = np.maximum.accumulate(np.maximum(0.0, curve(np.array(at)) + slope * np.array(at)))
    return Curve(at, tuple(seconds.tolist()))
