# SPDX-License-Identifier: Apache-2.0
"""The kit passes the low-rank compressors and catches each one that breaks a single clause."""

from __future__ import annotations

from typing import Any

import pytest

import sparsifiers
from sparsifiers import ACPSGD, LowRank, PowerSGD, conformance


@pytest.mark.parametrize("compressor", [*sparsifiers.low_rank_names(), "PowerSGD", "acp", PowerSGD, ACPSGD], ids=str)
def test_every_low_rank_compressor_conforms(compressor: Any) -> None:
    conformance.check(compressor)


def test_options_reach_the_compressor() -> None:
    with pytest.raises(TypeError, match="no option 'sed'"):
        conformance.check("powersgd", sed=7)


class Other(LowRank):
    name = "other"
    alternates = True


class Selecting(Other):
    @property
    def selects(self) -> bool:
        return True


class Dense(Other):
    kind = sparsifiers.Kind.DENSE


class Forgetful(Other):
    memory = "none"


class Momentous(Other):
    memory = "dgc"


class Unnamed(Other):
    name = ""


class Silent(Other):
    alternates = None  # type: ignore[assignment]


class Greedy(Other):
    def rank_of(self, name: str) -> int:
        return super().rank_of(name) + 1


class Prefixed(Other):
    def rank_of(self, name: str) -> int:
        patterns = (rank for pattern, rank in self.patterns if pattern.match(name))
        return self.rank if isinstance(self.rank, int) else next(patterns, 4)


class Vague(Other):
    def options(self) -> dict[str, object]:
        return {"rank": self.rank}


class Wrong(Other):
    def options(self) -> dict[str, object]:
        return {"rank": 1, "seed": self.seed}


class Remembering(Other):
    def state_dict(self) -> dict[str, object]:
        return {"steps": 0}


class Credulous(Other):
    def load_state_dict(self, state: Any) -> None:
        pass


class Careless(Other):
    def __init__(self, rank: Any = 4, seed: Any = 0) -> None:
        super().__init__(max(int(rank), 1) if isinstance(rank, int | float) else rank, seed)


class Seedless(Other):
    def __init__(self, rank: Any = 4, seed: Any = 0) -> None:
        super().__init__(rank, abs(seed) if isinstance(seed, int) and not isinstance(seed, bool) else seed)


def test_one_of_ones_own_conforms() -> None:
    conformance.check(Other)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Selecting, "select nothing"),
        (Dense, "its kind is"),
        (Forgetful, "'none' must keep a residual"),
        (Momentous, "'dgc' must keep a residual, no more"),
        (Unnamed, "its name is ''"),
        (Silent, "alternate"),
        (Greedy, r"are \(6, 6, 6\), not \(5, 5, 5\)"),
        (Prefixed, r"are \(1, 1, 1\), not \(1, 2, 4\)"),
        (Vague, "lacks rank or seed"),
        (Wrong, r"options\(\) makes"),
        (Remembering, "keeps state"),
        (Credulous, "state of something else"),
        (Careless, "rank=0 is accepted"),
        (Seedless, "seed=-1 is accepted"),
    ],
)
def test_a_broken_clause_is_named(broken: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        conformance.check(broken)
