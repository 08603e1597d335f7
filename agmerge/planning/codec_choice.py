# SPDX-License-Identifier: Apache-2.0
"""Choice of the value codec: the fewest seconds per delivered share of the energy. Pure functions, for rank 0.

Quantisation errors are sent later, so a step that delivers the share d counts for d: of all codecs the one with the
least seconds / d is chosen, if that is clearly less than with the gradient's own dtype. A codec that delivers too
little is excluded: see ``LEAST``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import merging
from merging import Curve, Measurements
from merging.checks import Elements

FAR = 1 << 31  # elements: where a curve of one point has another one
GAIN = 0.01  # share of a step's seconds: a codec that rounds has to gain more
LEAST = 0.9999  # of the selected energy: a codec that delivers less is not chosen, see benchmarks/notebook/parity.md


@dataclass(frozen=True)
class Codec:
    """Costs and losses of a value codec on the values that training selects now, on all ranks."""

    name: str
    size: float  # bytes of an element in a message, with its index
    delivered: float  # share of the selected energy that receivers read
    encode: float  # seconds a value
    decode: float  # seconds a value


def best(seconds: Sequence[float], delivered: Sequence[float]) -> int:
    """Return the number of the candidate with the least seconds / delivered, the first of equals.

    Candidates that round have to gain more than ``GAIN``, as a share, over the best one that does not, if there is one.
    A candidate that delivers nothing is excluded.
    """
    scores = [took / share if share > 0 else float("inf") for took, share in zip(seconds, delivered, strict=True)]
    exact = [number for number, share in enumerate(delivered) if share == 1.0]
    first = int(np.argmin(scores))
    stays = min(exact, key=scores.__getitem__, default=first)
    return first if scores[first] * (1 + GAIN) < scores[stays] else stays


def in_codec(measured: Measurements, load: Elements, now: Codec, other: Codec, workers: int) -> Measurements:
    """Return measurements made in the codec ``now`` as they would be in ``other``.

    An exchange takes as long as one of as many bytes took, plus the difference in decoding all ranks' values. A message
    takes as much processor time as before, plus the difference in encoding.

    Args:

        measured: in ``now``.
        load: (n,), of :func:`agmerge.planning.measuring.profile` for the other codec.
        now, other: of :func:`agmerge.planning.codec_costs.measure_codecs`.
        workers: the number of ranks with values that each rank reads.
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
    """Return the curve with ``slope`` seconds more for each element; it still does not fall, nor below 0."""
    if slope == 0.0:
        return curve
    at = curve.elements if len(curve.elements) > 1 else (*curve.elements, FAR)
    seconds = np.maximum.accumulate(np.maximum(0.0, curve(np.array(at)) + slope * np.array(at)))
    return Curve(at, tuple(seconds.tolist()))
