# SPDX-License-Identifier: Apache-2.0
"""The mathematics of low rank: factors of a matrix, and rows that are orthonormal whatever they were made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from agmerge.exchanges.low_rank import bases
from sparsifiers import native
from tests.support import same_bits

SHAPES = [
    (1, 1),
    (1, 1000),
    (3, 17),
    (4, 16),
    (16, 33),
    (64, 64),
    (2, 100_003),
]


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _with(rows: Tensor, place: int, row: Tensor) -> Tensor:
    rows[place] = row
    return rows


MAKERS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": _draw,
    "zero": lambda r, length: torch.zeros(r, length),
    "one zero row": lambda r, length: _with(_draw(r, length), r // 2, torch.zeros(length)),
    "subnormal": lambda r, length: _draw(r, length) * 1e-41,
    "tiny": lambda r, length: _draw(r, length) * 1e-38,
    "huge": lambda r, length: _draw(r, length).clamp(-3, 3) * 1e38,
    "of all sizes": lambda r, length: _draw(r, length) * torch.logspace(-30, 30, r).unsqueeze(1),
    "all equal": lambda r, length: _draw(1, length).expand(r, length).clone(),
    "dependent": lambda r, length: _with(
        _draw(r, length), -1, (_draw(r, length)[:-1].sum(0) if r > 1 else torch.zeros(length))
    ),
    "almost dependent": lambda r, length: _draw(1, length) + 1e-4 * _draw(r, length),
    "units": lambda r, length: -3 * torch.eye(length)[:r] if length < 2000 else _draw(r, length),
    "ones": lambda r, length: torch.ones(r, length),
    "negative zero": lambda r, length: -torch.zeros(r, length),
    "not finite": lambda r, length: _with(
        _with(_draw(r, length), 0, torch.full((length,), torch.nan)), -1, torch.inf * torch.ones(length)
    ),
}


@pytest.fixture(params=list(MAKERS))
def kind(request: pytest.FixtureRequest) -> str:
    """The name of a kind of rows."""
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """With several threads much is left to torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["numpy", *native.LEVELS])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Without the compiled loops, and with those of one instruction set."""
    before = native.level()
    if request.param == "numpy":
        monkeypatch.setattr(native, "library", None)
        yield "numpy"
        return
    wanted = native.LEVELS.index(request.param)
    if not native.available() or native.set_level(wanted) < wanted:
        native.set_level(before)
        pytest.skip("these loops are not there")
    yield str(request.param)
    native.set_level(before)


def error(rows: Tensor) -> float:
    """Return how far the rows are from orthonormal."""
    wide = rows.double()
    return float((wide @ wide.t() - torch.eye(len(rows), dtype=torch.float64)).abs().max())


# -- orthonormal rows -------------------------------------------------------------------------------------------------


def test_rows_become_orthonormal_whatever_they_are(by: str, kind: str) -> None:
    made = [MAKERS[kind](*shape) for shape in SHAPES]
    bases.orthonormalize(made)
    assert max(map(error, made)) < 1e-6
    again = [rows.clone() for rows in made]
    bases.orthonormalize(again)
    assert all((one - other).abs().max() < 1e-6 for one, other in zip(made, again, strict=True))


def test_all_loops_make_the_same_bits(by: str, kind: str) -> None:
    for shape in SHAPES:
        rows = MAKERS[kind](*shape)
        expected = torch.from_numpy(bases.by_numpy(rows.numpy()))
        bases.orthonormalize([rows])
        assert same_bits(rows, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torchs_operations_on_other_tensors(kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        rows = torch.stack([MAKERS[kind](*shape).to(dtype), torch.zeros(shape, dtype=dtype), _draw(*shape).to(dtype)])
        made = bases.by_torch(rows)
        assert made.dtype == dtype and max(map(error, made)) < (1e-12 if dtype == torch.float64 else 1e-6)
        if kind in ("normal", "tiny", "huge", "of all sizes", "units"):
            expected = torch.from_numpy(bases.by_numpy(rows[0].float().numpy()))
            assert (made[0] - expected).abs().max() < 1e-4


def test_others_are_made_with_torch_each_in_its_place() -> None:
    made = [_draw(4, 30).double(), _draw(4, 30), _draw(30, 4).t(), _draw(3, 20).double(), _draw(4, 30).double() * 1e300]
    before = [rows.clone() for rows in made]
    bases.orthonormalize(made)
    assert max(map(error, made)) < 1e-6
    for rows, old in zip(made, before, strict=True):
        first = old[0].double() / old[0].abs().max()  # the square of 1e300 overflows
        assert torch.allclose(rows[0].double(), first / first.norm())


def test_the_span_and_the_first_row_are_kept(by: str) -> None:
    for r, length in ((1, 5), (4, 100), (16, 1000)):
        rows = _draw(r, length)
        made = rows.clone()
        bases.orthonormalize([made])
        wide = rows.double()
        assert (wide - wide @ made.double().t() @ made.double()).norm() < 1e-5 * wide.norm()
        assert torch.allclose(made[0], rows[0] / rows[0].norm(), atol=1e-6)
        assert (torch.einsum("ij,ij->i", rows, made) > 0).all()  # no sign changes


def test_scales_change_nothing_but_roundings(by: str) -> None:
    rows = _draw(5, 300)
    made = [rows * 2.0**exponent for exponent in (-100, -20, 0, 50, 120)]
    bases.orthonormalize(made)
    assert all(torch.equal(one, made[0]) for one in made)  # powers of two: not even these


def test_what_is_replaced_becomes_what_the_others_have_least_of(by: str) -> None:
    rows = torch.tensor([[0.0, 3.0, 0.0, 4.0], [0.0, 0.0, 0.0, 0.0], [0.0, -6.0, 0.0, -8.0]])
    bases.orthonormalize([rows])
    expected = torch.tensor([[0.0, 0.6, 0.0, 0.8], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    assert torch.allclose(rows, expected)
    full = torch.zeros(3, 3)
    bases.orthonormalize([full])
    assert torch.equal(full, torch.eye(3))


def test_an_initial_basis_depends_on_seed_and_name_alone(by: str) -> None:
    basis = bases.initial_basis(0, "layer.weight", 100, 4)
    assert basis.shape == (4, 100) and error(basis) < 1e-6
    assert same_bits(basis, bases.initial_basis(0, "layer.weight", 100, 4))
    assert not torch.equal(basis, bases.initial_basis(1, "layer.weight", 100, 4))
    assert not torch.equal(basis, bases.initial_basis(0, "layer.bias", 100, 4))


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [1, 4, 5])
def test_a_product_has_the_same_bits_by_all_loops(by: str, r: int) -> None:
    for n, m in ((1, 1), (7, 33), (400, 384), (2, 140_000)):
        left, right, out = _draw(r, n) * 1e-20, _draw(r, m) * 1e-22, torch.empty(n, m)
        bases.product(left, right, 1 / 3, out)
        expected = left[0].unsqueeze(1) * right[0]
        for k in range(1, r):
            expected = expected + left[k].unsqueeze(1) * right[k]
        assert same_bits(out, expected * (1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", [bases.LEFT, bases.RIGHT])
def test_a_pass_is_what_its_parts_are(by: str, side: str, dtype: torch.dtype) -> None:
    for n, m, r in ((1, 1, 1), (7, 33, 2), (300, 384, 4)):
        residual, gradient = _draw(n, m).to(dtype), _draw(m, n).t().contiguous().to(dtype)
        basis = _draw(r, n if side == bases.LEFT else m).to(dtype)
        matrix, out = torch.empty(n, m, dtype=dtype), torch.empty(r, m if side == bases.LEFT else n, dtype=dtype)
        total = residual.double() + gradient
        expected = basis.double() @ (total if side == bases.LEFT else total.t())

        bases.project(residual + gradient, side, basis, out)
        assert torch.dist(out.double(), expected) < 1e-6 * basis.norm() * total.norm()
        for off in (False, True) if side == bases.RIGHT else (False,):
            finite = bases.add_and_project(matrix, residual, gradient, side, basis, out, off=off)
            if by == "numpy" or dtype == torch.float64:
                assert finite is None  # that takes two passes
                continue
            assert finite is True
            assert torch.dist(out.double(), expected) < 1e-6 * basis.norm() * total.norm()
            rest = total - out.double().t() @ basis.double() if off else total
            assert torch.dist(matrix.double(), rest) < 1e-6 * (total.norm() + out.norm() * basis.norm())
            assert off or torch.equal(matrix, residual + gradient)


def test_what_is_left_has_nothing_of_the_basis(by: str) -> None:
    matrix, basis = _draw(50, 70), bases.initial_basis(0, "a", 70, 4)
    left = torch.empty(4, 50)
    bases.project(matrix, bases.RIGHT, basis, left)
    bases.take_off(matrix, left, basis)
    assert (matrix @ basis.t()).abs().max() < 1e-5
