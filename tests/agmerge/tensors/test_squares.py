# SPDX-License-Identifier: Apache-2.0
"""Sums of squares: the same bits by every instruction set and without the compiled loops, and right to float64."""

from __future__ import annotations

import pytest
import torch

from agmerge.step.gradient_norm import PART, squares_of, squares_of_all
from sparsifiers import native

SIZES = [0, 1, 15, 16, 17, 255, 256, 257, 1000, PART + 300]


def by_every_way(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> set[float]:
    before, found = native.level(), set()
    try:
        for level in range(len(native.LEVELS)):
            native.set_level(level)
            found.add(float(squares_of(tensor)))
    finally:
        native.set_level(before)
    with monkeypatch.context() as without:
        without.setattr(native, "library", None)
        found.add(float(squares_of(tensor)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_all_ways_give_the_same_bits(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype is torch.float16 and not 1e-4 < scale < 1e4:
        scale = 0.5
    for size in SIZES:
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
        values = (drawn * scale).to(dtype)
        (total,) = by_every_way(values, monkeypatch)
        assert total == pytest.approx(float(values.double().square().sum()), rel=1e-12)


def test_complex_numbers_count_by_their_magnitudes() -> None:
    values = torch.tensor([3 + 4j, 1j, -2], dtype=torch.complex64)
    assert squares_of(values) == squares_of(values.conj()) == 30.0


def test_what_is_not_finite_shows() -> None:
    values = torch.ones(300)
    values[270] = torch.inf
    assert squares_of(values) == float("inf")
    values[3] = torch.nan
    assert squares_of(values) != squares_of(values)


def test_parts_of_many_tensors_add_up_to_all_of_them() -> None:
    given = [torch.full((n,), 2.0) for n in (3, 0, 5)]
    assert squares_of_all(given) == [12.0, 0.0, 20.0]
    away = [tensor.to("meta") for tensor in given]
    (alone,) = squares_of_all(away)  # one part a device, without those that are empty
    assert isinstance(alone, torch.Tensor) and alone.shape == () and alone.dtype == torch.float64
