# SPDX-License-Identifier: Apache-2.0
"""randomk draws evenly, alike everywhere, without repetition, and from nothing but (seed, key, step)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsifiers
from sparsifiers.randomk import permuted


def chi_square_is_plausible(counts: np.ndarray, spread: float = 1.0) -> bool:
    """Whether equal expectations explain the counts: the statistic within four deviations. spread: of a count."""
    expected, freedom = counts.mean(), counts.size - 1
    statistic = float(((counts - expected) ** 2).sum() / expected / spread)
    return abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@given(n=st.integers(1, 3000), key=st.text(max_size=5))
def test_a_permutation(n: int, key: str) -> None:
    assert np.array_equal(np.sort(permuted(n, n, key)), np.arange(n))


@given(n=st.integers(1, 2**31), share=st.floats(0, 1))
def test_a_part_is_unique_in_range_and_the_beginning_of_the_whole(n: int, share: float) -> None:
    count = int(share * min(n, 500))
    found, more = permuted(n, count, "a"), permuted(n, min(n, 500), "a")
    assert len(np.unique(found)) == count
    assert count == 0 or int(found.max()) < n
    assert np.array_equal(found, more[:count])


def test_the_draw_never_changes() -> None:
    assert permuted(1000, 8, "0/3/layer").tolist() == [448, 832, 271, 276, 500, 368, 158, 326]
    assert permuted(2**31 - 1, 4, "0/3/layer").tolist() == [1224906375, 574417998, 1493694230, 1612731693]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "k", "draws"), [(2, 1, 1000), (3, 2, 1000), (5, 2, 3000), (6, 3, 3000), (12, 2, 3000), (33, 1, 2000)]
)
def test_every_subset_is_as_likely(n: int, k: int, draws: int) -> None:
    subsets = {subset: place for place, subset in enumerate(combinations(range(n), k))}
    counts = np.zeros(len(subsets))
    for step in range(draws):
        counts[subsets[tuple(sorted(permuted(n, k, f"0/{step}/a").tolist()))]] += 1
    assert chi_square_is_plausible(counts)


@pytest.mark.parametrize(("n", "k", "draws"), [(1000, 100, 800), (65_537, 655, 200), (5_000_000, 50_000, 5)])
def test_every_stretch_gets_its_part(n: int, k: int, draws: int) -> None:
    counts, apart = np.zeros(500), np.zeros(100)
    for step in range(draws):
        drawn = permuted(n, k, f"0/{step}/a").astype(np.int64)
        counts += np.bincount(drawn * 500 // n, minlength=500)
        apart += np.bincount(np.diff(drawn) % n * 100 // n, minlength=100)
    assert chi_square_is_plausible(counts, 1 - k / n)
    assert chi_square_is_plausible(apart)


def test_the_test_of_evenness_sees_unevenness() -> None:
    generator = np.random.default_rng(0)
    assert chi_square_is_plausible(generator.multinomial(50_000, np.full(500, 1 / 500)))
    odds = 1 + 0.3 * np.sin(np.arange(500))
    assert not chi_square_is_plausible(generator.multinomial(50_000, odds / odds.sum()))
    assert not chi_square_is_plausible(np.full(500, 100))


def draw(*, seed: int = 0, key: str = "a", step: int = 0, n: int = 10_000, k: int = 100) -> list[int]:
    return sparsifiers.get("randomk", seed=seed).select(torch.zeros(n), k=k, key=key, step=step).trimmed().tolist()


def test_seed_key_and_step_draw_apart() -> None:
    requests = product((0, 1, -1), ("ab", "ba", ""), (0, 1, 10))
    draws = [draw(seed=seed, key=key, step=step) for seed, key, step in requests]
    for one, other in combinations(draws, 2):
        assert len(set(one) & set(other)) < 10  # of 100 in 10,000 about one is met by chance
    assert draw(seed=1, key="1", step=1) != draw(seed=11, key="1", step=0)


def test_values_history_and_other_sparsifiers_do_not_matter() -> None:
    randomk = sparsifiers.get("randomk")
    for step in (5, 3, 3):
        vector = torch.randn(10_000, generator=torch.Generator().manual_seed(step))
        found = randomk.select(vector, k=100, key="a", step=step)
        assert found.count == 100
        assert found.trimmed().tolist() == draw(step=step)


def test_another_process_draws_the_same() -> None:
    code = (
        "import torch, sparsifiers\n"
        "found = sparsifiers.get('randomk', seed=4).select(torch.ones(9999), k=50, key='x', step=6)\n"
        "import sys; sys.stdout.write(' '.join(map(str, found.trimmed().tolist())))"
    )
    here = " ".join(map(str, draw(seed=4, key="x", step=6, n=9999, k=50)))
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.stdout, done.stderr) == (here, "")


def test_more_of_the_same_draw() -> None:
    assert set(draw(k=50)) < set(draw(k=400))
    assert draw(n=77, k=77) == list(range(77))


def test_no_value_is_read() -> None:
    selection = sparsifiers.get("randomk").select(torch.empty(1000, device="meta"))
    assert selection.indices.device.type == "meta"
    assert selection.indices.shape == (10,)


@pytest.mark.parametrize("seed", [0.5, True, None, "0"])
def test_the_seed_is_an_integer(seed: object) -> None:
    with pytest.raises(TypeError, match="randomk: seed must be an int"):
        sparsifiers.get("randomk", seed=seed)
