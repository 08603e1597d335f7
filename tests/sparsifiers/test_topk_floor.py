# SPDX-License-Identifier: Apache-2.0
"""The sample's guess is cheap to be wrong about, but should seldom be: that is where the speed comes from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsifiers import largest, native
from sparsifiers.largest import bit_view, compiled_sample, magnitude_mask, sampled_floor

pytestmark = pytest.mark.usefixtures("loops")
CONTINUOUS = ["gaussian", "student2", "spikes", "block-scaled", "ascending", "descending"]


def guess(vector: Tensor, k: int) -> tuple[int, np.ndarray]:
    bits, mask = bit_view(vector).numpy(), magnitude_mask(vector.dtype)
    if native.available():
        return native.sampled_floor(bits, mask, *compiled_sample(len(bits), k)), bits & mask
    return sampled_floor(bits, mask, k), bits & mask


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize(("k", "most"), [(1, 12_000), (100, 3000), (1000, 4500), (10_000, 20_000), (300_000, 390_000)])
def test_a_little_more_than_k_keys_exceed_it(name: str, k: int, most: int, draw: Callable[..., Tensor]) -> None:
    floor, keys = guess(draw(name, 1_000_000), k)
    if native.available():
        most = max(2 * most, 15_000)  # a smaller sample: what it lets through is carried for less
    assert k <= np.count_nonzero(keys > floor) <= most


def test_it_is_seldom_too_high() -> None:
    generator = torch.Generator().manual_seed(0)
    short = 0
    for _ in range(300):
        floor, keys = guess(torch.randn(70_000, generator=generator), 700)
        short += int(np.count_nonzero(keys > floor) < 700)
    assert short <= 1


def test_the_vector_is_read_once_when_it_holds(monkeypatch: pytest.MonkeyPatch, draw: Callable[..., Tensor]) -> None:
    scans = []
    where, name = (native, "largest_above") if native.available() else (largest, "scan")
    scan = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *arguments: scans.append(arguments[3]) or scan(*arguments))
    for name in CONTINUOUS:
        vector = draw(name, 1_000_000)
        largest.largest_magnitudes(bit_view(vector).numpy(), magnitude_mask(vector.dtype), 10_000)
    assert len(scans) == len(CONTINUOUS)
    assert min(scans) > 0


def test_every_part_of_the_vector_is_sampled() -> None:
    for part in range(10):
        vector = torch.zeros(100_007)
        vector[part * 10_001 : (part + 1) * 10_001] = 1.0
        floor, keys = guess(vector, 500)
        assert floor == keys.max() - 1


def test_it_reads_a_small_part_of_the_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", None)

    class Counting(np.ndarray):
        read = 0

        def __getitem__(self, places: np.ndarray) -> np.ndarray:
            Counting.read += len(places)
            return np.asarray(self)[places]

    sampled_floor(np.arange(1_000_000, dtype=np.int32).view(Counting), 2**31 - 1, 10_000)
    assert 1000 < Counting.read < 20_000


@pytest.mark.parametrize("n", [8, 9, 100])
def test_without_enough_samples_every_key_exceeds_it(n: int) -> None:
    assert guess(torch.rand(n), n // 2)[0] == -1


def test_no_generator_of_the_process_is_touched() -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    guess(torch.rand(100_000, generator=torch.Generator().manual_seed(1)), 1000)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
