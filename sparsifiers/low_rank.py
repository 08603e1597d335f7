# SPDX-License-Identifier: Apache-2.0
"""Low-rank compressors, PowerSGD and ACP-SGD: their options. The mathematics is the exchange's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from numbers import Integral

from sparsifiers.base import Compressor, Kind
from sparsifiers.name_patterns import compiled

RANK = 4  # the default

Ranks = int | Mapping[str, int] | Sequence[tuple[str, int]]


class LowRank(Compressor):
    """Base class of compressors that send two thin factors of a matrix, projected on a basis that all ranks share.

    A tensor of two or more dimensions counts as a matrix: its first dimension by all others. If the factors have as
    many values as the tensor, it is sent uncompressed. The basis is kept with the plan, not in the compressor.

    Args:
        rank (int or dict): Rank of the factors. Or ``{pattern: rank}``, with regular expressions that must match the
            full parameter name. Default: 4, also for parameters without a match.
        seed (int): Seed of the first basis, the same on all ranks. Default: 0.

    Raises:
        ValueError: For a rank that is not a whole number above 0, an invalid pattern, or an empty dict.
    """

    kind = Kind.LOW_RANK
    memory = "residual"
    alternates: bool  # a step sends one factor, the left and the right one in turn; else both, one after the other

    def __init__(self, rank: Ranks = RANK, seed: int = 0) -> None:
        """Check the options, as the class says."""
        self.rank: int | tuple[tuple[str, int], ...] = _ranks(rank)
        if not isinstance(seed, Integral) or isinstance(seed, bool) or seed < 0:
            raise ValueError(f"{self.name}: seed={seed!r}: expected a whole number >= 0")
        self.seed: int = int(seed)
        patterns = () if isinstance(self.rank, int) else self.rank
        self.patterns: tuple[tuple[re.Pattern[str], int], ...] = tuple(
            (re.compile(pattern), value) for pattern, value in patterns
        )

    def rank_of(self, name: str) -> int:
        """Return the rank for the parameter of this name."""
        if isinstance(self.rank, int):
            return self.rank
        return next((rank for pattern, rank in self.patterns if pattern.fullmatch(name)), RANK)

    def name_patterns(self) -> Mapping[str, Sequence[re.Pattern[str]]]:
        return {"rank": [pattern for pattern, _ in self.patterns]}

    def shrinks(self, name: str, shape: Sequence[int]) -> bool:
        if len(shape) < 2:
            return False
        n, m = shape[0], math.prod(shape[1:])
        return min(self.rank_of(name), n, m) * (n + m) < n * m

    def options(self) -> dict[str, object]:
        return {"rank": self.rank, "seed": self.seed}


class PowerSGD(LowRank):
    """Send both factors in each step, in two rounds: PowerSGD.

    Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
    NeurIPS 2019, Algorithm 1, with a warm start. The residual is of this rank's own matrix, not of the average.
    """

    name = "powersgd"
    alternates = False


class ACPSGD(LowRank):
    """Send one factor in each step, left and right alternately: ACP-SGD. The first step sends both.

    Zhang, Zhang, Shi, Chu and Li, "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning",
    ICDCS 2023, Algorithm 1.
    """

    name = "acpsgd"
    alternates = True


def _ranks(rank: Ranks) -> int | tuple[tuple[str, int], ...]:
    """Return the rank, or pairs of pattern and rank, checked."""
    if isinstance(rank, Mapping | Sequence) and not isinstance(rank, str):
        pairs: tuple[tuple[str, int], ...] = tuple(rank.items() if isinstance(rank, Mapping) else rank)
        if not pairs:
            raise ValueError("rank={}: expected a number, or at least one pattern that matches full parameter names")
        for pattern, value in pairs:
            try:
                compiled(pattern)
            except ValueError as error:
                raise ValueError(f"rank={{{pattern!r}: {value!r}}}: {error}") from None
        return tuple((pattern, _whole(value)) for pattern, value in pairs)
    return _whole(rank)


def _whole(rank: object) -> int:
    """Return one rank as an int. ValueError for anything else."""
    if not isinstance(rank, Integral) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank={rank!r}: expected a whole number > 0, or {{pattern: number}}")
    return int(rank)
