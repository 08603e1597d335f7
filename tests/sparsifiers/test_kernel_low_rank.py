# SPDX-License-Identifier: Apache-2.0
"""The compiled loops of low rank: one pass gives what several give, and what all ranks compute has the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from sparsifiers import native
from sparsifiers import thin_factors as loops

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="the compiled loops were not built"),
    pytest.mark.usefixtures("one_thread"),
]
SameBits = Callable[[Tensor, Tensor], bool]

SHAPES = [
    (1, 1),
    (2, 3),
    (5, 17),
    (4, 16),
    (17, 5),
    (7, 1000),
    (30, 129),
    (64, 1031),
    (300, 384),
]  # the last is streamed
RANKS = (1, 2, 3, 4, 5, 8, 16, 33)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIALS = torch.tensor([0.0, -0.0, 1.4e-45, -1e-40, 1e-38, 6e-8, 1e30, -3e38, 65504.0])


@pytest.fixture(params=native.LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    before, wanted = native.level(), native.LEVELS.index(request.param)
    if native.set_level(wanted) < wanted:
        native.set_level(before)
        pytest.skip("this processor has not that instruction set")
    yield wanted
    native.set_level(before)


@pytest.fixture(autouse=True)
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops for factors of so many rows that they are left to torch otherwise."""
    monkeypatch.setattr(loops, "FEW", loops.MOST)
    monkeypatch.setattr(loops, "NEAR", 1 << 20)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def hard(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    some = SPECIALS[torch.randint(len(SPECIALS), shape, generator=source)]
    return draw(*shape, seed=seed).where(torch.rand(shape, generator=source) < 0.7, some)


def near(actual: Tensor, expected: Tensor, terms: Tensor, sums: int = 1) -> bool:
    """Tell whether the difference is that of some roundings; ``terms``: what the magnitudes add up to, elementwise."""
    return bool(((actual.double() - expected).abs() <= 1e-6 * sums**0.5 * terms + 1e-44).all())


@pytest.mark.parametrize("shift", [0, 1])
def test_a_product_is_made_in_one_order(level: int, shift: int, same_bits: SameBits) -> None:
    for n, m in SHAPES:
        for r in RANKS:
            left, right = hard(r, n, seed=r), hard(r, m, seed=r + 1)
            room = torch.full((shift + n * m + 1,), 7.0)
            out = room[shift:-1].view(n, m)
            assert loops.product(left, right, 1 / 3, out)
            expected = left[0].unsqueeze(1) * right[0]
            for k in range(1, r):
                expected += left[k].unsqueeze(1) * right[k]
            expected *= 1 / 3
            assert torch.equal(out.isnan(), expected.isnan())
            assert same_bits(out.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))
            assert (room[:shift] == 7).all() and room[-1] == 7


def test_projections(level: int) -> None:
    for n, m in SHAPES:
        for r in RANKS:
            matrix, left, right = draw(n, m, seed=1), draw(r, n, seed=2), draw(r, m, seed=3)
            wide = matrix.double(), left.double(), right.double()
            magnitudes = [part.abs() for part in wide]
            own_left, own_right = torch.full((r, n), torch.nan), torch.full((r, m), torch.nan)
            assert loops.project_on_right(matrix, right, own_left)
            assert near(own_left, wide[2] @ wide[0].t(), magnitudes[2] @ magnitudes[0].t(), m)
            assert loops.project_on_left(matrix, left, own_right)
            assert near(own_right, wide[1] @ wide[0], magnitudes[1] @ magnitudes[0], n)
            rest = matrix.clone()
            assert loops.take_off(rest, left, right)
            terms = magnitudes[0] + magnitudes[1].t() @ magnitudes[2]
            assert near(rest, wide[0] - wide[1].t() @ wide[2], terms, r)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_a_sum_that_is_projected_is_torchs(level: int, dtype: torch.dtype, shift: int, same_bits: SameBits) -> None:
    for n, m in SHAPES:
        for r in (1, 4, 5, 16):
            residual, gradient = hard(n, m, seed=1), hard(n, m, seed=2).clamp(-6e4, 6e4).to(dtype)
            left, right = draw(r, n, seed=2), draw(r, m, seed=3)
            expected = torch.add(residual, gradient)
            for side in ("right", "left"):
                room = torch.full((shift + n * m + 1,), 7.0)
                matrix = room[shift:-1].view(n, m)
                if side == "right":
                    out, again = torch.full((r, n), torch.nan), torch.empty(r, n)
                    assert loops.add_and_project_on_right(matrix, residual, gradient, right, out) is True
                    assert loops.project_on_right(matrix, right, again)
                else:
                    out, again = torch.full((r, m), torch.nan), torch.empty(r, m)
                    assert loops.add_and_project_on_left(matrix, residual, gradient, left, out) is True
                    assert loops.project_on_left(matrix, left, again)
                assert same_bits(matrix, expected) and same_bits(out.nan_to_num(), again.nan_to_num())
                assert (room[:shift] == 7).all() and room[-1] == 7


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_a_gradient_is_copied_in_the_pass_that_reads_it(level: int, shift: int, same_bits: SameBits) -> None:
    for n, m in SHAPES:
        residual, gradient, matrix = draw(n, m, seed=1), hard(n, m, seed=2), torch.empty(n, m)
        left, right = draw(4, n, seed=2), draw(4, m, seed=3)
        on_right, on_left = (right, torch.empty(4, n)), (left, torch.empty(4, m))
        sums = [
            partial(loops.add_and_project_on_right, matrix, residual, gradient, *on_right),
            partial(loops.add_project_on_right_and_take_off, matrix, residual, gradient, *on_right),
            partial(loops.add_and_project_on_left, matrix, residual, gradient, *on_left),
        ]
        for make in sums:
            room = torch.full((shift + n * m + 1,), 7.0)
            assert make(room[shift:-1].view(n, m)) is True
            assert same_bits(room[shift:-1].view(n, m), gradient)
            assert (room[:shift] == 7).all() and room[-1] == 7
            assert make(torch.empty(n * m + 1)) is None and make(torch.empty(n, m, dtype=torch.float64)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_pass_leaves_what_three_leave(level: int, dtype: torch.dtype) -> None:
    for n, m in SHAPES:
        for r in RANKS:
            residual, gradient = draw(n, m, seed=1), draw(n, m, seed=2, dtype=dtype)
            right, out, again = draw(r, m, seed=3), torch.empty(r, n), torch.empty(r, n)
            matrix, expected = torch.empty(n, m), residual + gradient
            assert loops.add_project_on_right_and_take_off(matrix, residual, gradient, right, out) is True
            assert loops.project_on_right(expected, right, again) and torch.equal(out, again)
            wide = expected.double() - out.double().t() @ right.double()
            assert near(matrix, wide, expected.abs() + out.double().abs().t() @ right.double().abs(), r)
            assert loops.take_off(expected, out, right) and torch.equal(matrix, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_that_is_not_finite_is_seen(level: int, dtype: torch.dtype) -> None:
    n, m, r = 5, 149, 2  # some in many registers, some in one, some in none
    residual, left, right = torch.full((n, m), 3e38), torch.zeros(r, n), torch.zeros(r, m)
    gradient = torch.ones(n, m).to(dtype)
    matrix, on_left, on_right = torch.empty(n, m), torch.empty(r, n), torch.empty(r, m)
    for value in (torch.nan, torch.inf, -torch.inf, None):
        for place in range(n * m):
            broken = gradient if value is None else gradient.flatten().index_fill(0, torch.tensor(place), value)
            arguments = (matrix, residual, broken.view(n, m))
            finite = value is None
            assert loops.add_and_project_on_right(*arguments, right, on_left) is finite
            assert loops.add_and_project_on_left(*arguments, left, on_right) is finite
            assert loops.add_project_on_right_and_take_off(*arguments, right, on_left) is finite
            others = torch.arange(n) != place // m
            assert torch.equal(matrix[others], torch.add(residual, gradient)[others])  # the pass was finished
    if dtype != torch.float16:
        assert loops.add_and_project_on_right(matrix, residual, residual.to(dtype), right, on_left) is False
        assert loops.add_and_project_on_left(matrix, residual, residual.to(dtype), left, on_right) is False


def test_every_half_is_read(level: int) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        gradient = every.view(dtype)
        gradient = gradient.where(gradient.isfinite(), torch.zeros((), dtype=dtype)).view(16, 4096)
        for width in (4096, 9):
            part = gradient[:, :width].contiguous()
            matrix, out = torch.empty(16, width), torch.empty(1, 16)
            zeros = torch.zeros(16, width)
            assert loops.add_and_project_on_right(matrix, zeros, part, torch.zeros(1, width), out)
            assert torch.equal(matrix, part.float())


@pytest.mark.parametrize("seed", range(3))
def test_orthonormal_rows_have_the_same_bits_at_every_level(level: int, seed: int, same_bits: SameBits) -> None:
    factors = [hard(r, length, seed=seed) for r, length in ((1, 1), (3, 3), (4, 1000), (16, 17), (33, 129))]
    own = [factor.clone() for factor in factors]
    assert loops.orthonormalize(own)
    native.set_level(0)
    for factor, rows in zip(factors, own, strict=True):
        assert loops.orthonormalize([factor]) and same_bits(factor, rows)
        assert torch.dist(rows.double() @ rows.double().t(), torch.eye(len(rows))) < 1e-5


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    n, m, r = 6, 8, 2
    matrix, left, right = torch.ones(n, m), torch.ones(r, n), torch.ones(r, m)
    before = matrix.clone()
    for other in (
        right.double(),
        torch.ones(m, r).t(),
        torch._neg_view(right),
        right.to("meta"),
        right[:, :-1],
        right[0],
    ):
        assert not loops.product(left, other, 1.0, matrix)
        assert not loops.project_on_right(matrix, other, left)
        assert not loops.take_off(matrix, left, other)
        assert loops.add_and_project_on_right(matrix, before, before, other, left) is None
    for other in (left.double(), torch.ones(n, r).t(), left[:1]):
        assert not loops.project_on_left(matrix, other, right)
        assert loops.add_and_project_on_left(matrix, before, before, other, right) is None
    for other in (before.double(), before.view(m, n), before.to(torch.int32)):
        assert loops.add_project_on_right_and_take_off(matrix, before, other, right, left) is None
    wide = torch.ones(loops.MOST + 1, 200)
    assert not loops.product(wide, wide, 1.0, torch.empty(200, 200))
    assert not loops.orthonormalize([torch.ones(3, 2)])
    assert not loops.orthonormalize([torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64)])
    assert loops.orthonormalize([])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # several of torch's threads are faster
    assert not loops.take_off(matrix, left, right) and loops.product(left, right, 1.0, torch.empty(n, m))
    monkeypatch.setattr(native, "library", None)
    assert not loops.product(left, right, 1.0, torch.empty(n, m)) and not loops.orthonormalize([left])
    assert torch.equal(matrix, before)
