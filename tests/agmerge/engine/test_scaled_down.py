# SPDX-License-Identifier: Apache-2.0
"""Factors that are read off a few elements, and norms that say whether they come from a bound."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agmerge.engine.clipping_watch import LOOKS, NormBound, common_factor

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def sparse(seed: int, dtype: torch.dtype = torch.float32, n: int = 4096) -> torch.Tensor:
    """Elements of which some one per cent are not zero, in several orders of magnitude."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=source) * 10 ** torch.randn(n, generator=source)
    return (values * (torch.rand(n, generator=source) < 0.01)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 999), factor=st.floats(1e-3, 10.0), scale=st.sampled_from([1.0, 3.0, 65536.0]))
def test_a_factor_is_read_off_through_a_loss_scale(dtype: torch.dtype, seed: int, factor: float, scale: float) -> None:
    """To a few roundings, of the product and of a scale that was put on and taken off."""
    before = sparse(seed, dtype)
    inverse = torch.tensor(1 / scale, dtype=dtype)
    after = before.clone() if dtype is torch.float16 else before.mul(scale).mul(inverse)
    found = common_factor(before, after.mul(factor))
    assert found == pytest.approx(factor, rel=4 * torch.finfo(dtype).eps)


def test_what_is_untouched_has_the_factor_one() -> None:
    assert common_factor(sparse(1), sparse(1)) == 1.0 == common_factor(torch.zeros(9), torch.zeros(9))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 1e-3 * sparse(2),
        lambda x: x * 0.5 + 1e-4,  # zeros move as well
        lambda x: x.clamp(-1.0, 1.0),
        lambda x: x.sign(),
        lambda x: x * torch.linspace(0.5, 0.6, len(x)),
        lambda x: torch.where(torch.arange(len(x)) < 2000, x, x * 0.5),
        lambda x: x * torch.nan,
        lambda x: x * torch.inf,
    ],
)
def test_what_has_no_common_factor_has_none(change: object) -> None:
    assert callable(change) and common_factor(sparse(1), change(sparse(1))) is None


def test_few_elements_say_nothing() -> None:
    before = torch.zeros(4096)
    before[:7] = torch.randn(7)
    assert common_factor(before, before * 0.5) is None
    before[7] = 1.0
    assert common_factor(before, before * 0.5) == 0.5


def fed(steps: list[tuple[float, float]], dtype: torch.dtype = torch.float32) -> list[bool]:
    """What is known after each scaling: pairs of the factor and the norm that it has left."""
    bound = NormBound()
    return [bound.asks(factor, dtype) and bound.binds(factor, norm, dtype) for factor, norm in steps]


def test_a_bound_is_known_at_the_second_factor_where_norms_are_exact() -> None:
    """Also a small one, though ``clip_grad_norm_`` divides by a little more than the norm."""
    assert fed([(0.5, 1.0), (0.25, 1.0)]) == [False, True]
    small = [(1e-6 / (norm + 1e-6), 1e-6 * norm / (norm + 1e-6)) for norm in (1e-5, 3e-5)]
    assert small[1][1] > 1.05 * small[0][1] and fed(small) == [False, True]


def test_inexact_norms_and_16_bits_take_more() -> None:
    apart = [(0.5, 1.0), (0.4, 1.0003), (0.3, 1.0002)]
    assert fed(apart) == [False, False, True]
    assert fed([(0.5, 1.0), (0.4, 1.005), (0.3, 0.996), (0.2, 1.003)], torch.bfloat16) == [False, False, False, True]


def test_the_same_factor_says_nothing_and_other_norms_ask_for_more() -> None:
    assert fed([(0.5, 3.0), (0.5, 3.0), (0.5, 3.0)]) == [False] * 3
    assert fed([(0.5, 3.0), (0.4, 2.0), (0.3, 1.0), (0.2, 1.0), (0.1, 1.0)]) == [False, False, False, False, True]


@pytest.mark.parametrize("factor", [1.0, 0.9995, 1.5, 0.0, -0.5, math.nan, math.inf])
def test_what_does_not_make_smaller_is_no_question(factor: float) -> None:
    assert not NormBound().asks(factor, torch.float32)


@given(st.lists(st.tuples(st.floats(0.01, 0.99), st.floats(0.5, 1.5)), min_size=2, max_size=40))
def test_unrelated_norms_are_no_bound_and_are_looked_at_so_often_only(steps: list[tuple[float, float]]) -> None:
    """Where none of them agree to a thousandth: what a script has that divides by its number of tokens."""
    norms = [norm * (1 + 0.01 * place) for place, (_, norm) in enumerate(steps)]
    if all(abs(a / b - 1) > 2e-3 for place, a in enumerate(norms) for b in norms[:place]):
        bound = NormBound()
        asked = 0
        for (factor, _), norm in zip(steps, norms, strict=True):
            if bound.asks(factor, torch.float32):
                asked += 1
                assert not bound.binds(factor, norm, torch.float32)
        assert asked <= LOOKS
