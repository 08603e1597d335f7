# SPDX-License-Identifier: Apache-2.0
"""Traffic of exchanges, by the number of workers: pure functions, for predictions.

A selection travels as indices and values. With W workers, k elements, i bytes an index and v bytes a value, a rank
receives ``(W - 1) k (i + v)`` bytes of an all-gather (``sparse``). A sparse all-reduce (``oktopk``) brings it
``2 k (i + v) (W - 1) / W``. Where all agree on the indices (``masked``), it receives ``k (i + 2 v) (W - 1) / W``. Each
may send as many, so a link that is shared has W times that.
"""

from __future__ import annotations

from dataclasses import dataclass

from agmerge.exchanges.oktopk.histogram import BINS
from agmerge.exchanges.oktopk.regions import POINTS
from merging import Curve

WORD = 4  # bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes and rounds of an exchange of k elements of every rank, as one rank receives them."""

    rounds: int  # collectives, each of which begins when the one before has ended
    indices: float  # bytes, for each byte that k indices take
    values: float  # bytes, for each byte that k values take
    fixed: float = 0.0  # bytes, however many elements there are

    def received(self, indices: float, values: float) -> float:
        """Return the bytes that a rank receives; of k elements, k indices and k values have so many bytes."""
        return self.indices * indices + self.values * values + self.fixed


def traffic_of(exchange: str, workers: int, *, coded: bool) -> Traffic:
    """Return the traffic of a message of selections; ``coded``: values have a codec of their own.

    The surplus of oktopk, which depends on the values, is left out. KeyError for an exchange that has no such figures.
    """
    others = workers - 1
    part = others / workers
    return {
        "sparse": Traffic(1, others, others),
        # Votes, and an all-reduce; or every rank's values of a share, and the sums of shares.
        "masked": Traffic(3 if coded else 2, part, 2 * part),
        "oktopk": Traffic(6, 2 * part, 2 * part, others * WORD * (POINTS + workers + 3) + 2 * part * WORD * BINS),
    }[exchange]


def exchanged_by(exchange: str, sparse: Curve, workers: int, index: float, value: float, *, coded: bool) -> Curve:
    """Return the seconds of an exchange over elements, from those of ``sparse``, which were measured.

    A message takes as long as one of ``sparse`` that brings as many bytes, and a start-up more for each further round.

    Args:
        index, value: bytes of an element that is selected.
        coded: values have a codec of their own.
    """
    one, other = (traffic_of(name, workers, coded=coded) for name in ("sparse", exchange))
    start = (other.rounds - 1) * sparse(0)
    points = {0: start + sparse(other.fixed / one.received(index, value))}
    for elements, seconds in zip(sparse.elements, sparse.seconds, strict=True):
        as_many = (elements * one.received(index, value) - other.fixed) / (other.received(index, value) - other.fixed)
        if as_many >= 1:
            points[round(as_many)] = start + seconds
    return Curve(tuple(points), tuple(points.values()))
