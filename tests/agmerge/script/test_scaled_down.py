# SPDX-License-Identifier: Apache-2.0
"""What a script has made of a few elements: nothing, one factor for all, or something else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agmerge.script.clipping_watch import common_factor, is_scaled

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
    assert common_factor(sparse(1), sparse(1)) == 1.0 and is_scaled(torch.zeros(9), torch.zeros(9), 1.0)


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


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 999), scale=st.sampled_from([1.0, 3.0, 1000.0, 65536.0]))
def test_a_loss_scale_that_is_put_on_and_taken_off_is_no_change(dtype: torch.dtype, seed: int, scale: float) -> None:
    before = sparse(seed, dtype)
    after = before if dtype is torch.float16 else before.mul(scale).mul(torch.tensor(1 / scale, dtype=dtype))
    assert is_scaled(before, after, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_that_has_changed_is_a_change(dtype: torch.dtype) -> None:
    before = sparse(1, dtype)
    for change in (0.5, 1.1, 0.0, torch.nan):
        after = before.clone()
        after[int(before.abs().argmax())] *= change
        assert not is_scaled(before, after, 1.0)
