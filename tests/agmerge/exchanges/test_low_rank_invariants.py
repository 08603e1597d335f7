# SPDX-License-Identifier: Apache-2.0
"""What always holds of PowerSGD and ACP-SGD, in float64 to its last digits: of any gradients, rank and number of ranks.

Section 4 of the papers' common ground: conservation, residuals orthogonal to what was sent, updates that depend on the
mean alone, orthonormal bases, and equal replicas. That residuals do not drift is in `test_low_rank_published.py`.
"""

from __future__ import annotations

import pytest
import torch
from support import digest
from support.low_rank_steps import (
    LEFT,
    MATRICES,
    NAMES,
    RIGHT,
    SHAPES,
    Step,
    accumulated,
    distance,
    drawn,
    matrix,
    mean,
    overlap,
    steps_of,
)
from torch import Tensor

both = pytest.mark.parametrize("name", NAMES)


def single(rank: int, step: int) -> dict[str, Tensor]:
    return drawn(rank, step, torch.float32)


def left_is_sent(name: str, seen: list[Step], step: int, tensor: str) -> bool:
    """Whether the update of a step is of the space of a right basis: the one kept by the step before says."""
    return name == "acpsgd" and step > 0 and seen[step - 1].bases[tensor][0] == RIGHT


# -- nothing is lost ------------------------------------------------------------------------------------------------


def assert_nothing_lost(seen: list[list[Step]], step: int, tensor: str, tolerance: float) -> None:
    before = mean([accumulated(of_rank, step, tensor) for of_rank in seen])
    after = mean([of_rank[step].residuals.get(tensor, torch.zeros_like(before)) for of_rank in seen])
    assert distance(seen[0][step].update(tensor) + after, before) < tolerance, (step, tensor)


@both
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_update_and_residuals_are_what_there_was(name: str, rank: int, size: int) -> None:
    seen = steps_of(size, drawn, 12, compression=name, rank=rank)
    for tensor in SHAPES:
        for step in range(12):
            assert_nothing_lost(seen, step, tensor, 1e-13)
        updates = sum(of.update(tensor) for of in seen[0])
        gradients = sum(mean([of_rank[step].gradients[tensor] for of_rank in seen]) for step in range(12))
        rest = mean([of_rank[-1].residuals.get(tensor, torch.zeros(SHAPES[tensor])) for of_rank in seen])
        assert distance(updates + rest, gradients) < 1e-13


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_of_rows_or_columns_is_special(name: str, dtype: torch.dtype) -> None:
    """Beside multiples of what loops go by, and with factors of more rows than compiled ones have."""
    shapes = {"odd": (131, 257), "thin": (1000, 9), "flat": (7, 1203), "many": (301, 290), "one": (2, 3, 5, 7)}
    ranks = {"many": 131, "odd": 7, "one": 1}
    source = [lambda rank, step: drawn(rank, step, dtype, shapes), lambda rank, step: drawn(0, step, dtype, shapes)]
    seen = steps_of(2, source[dtype == torch.bfloat16], 5, compression=name, rank=ranks)
    for tensor in shapes:
        assert [len(one.bases[tensor][1]) for one in seen[0]] == [ranks.get(tensor, 4)] * 5
        for step in range(5):
            assert_nothing_lost(seen, step, tensor, 2e-6 if dtype == torch.float32 else 4e-3)
            rest, update = seen[1][step].residuals[tensor], seen[1][step].update(tensor)
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            assert overlap(rest, update, left_is_sent(name, seen[1], step, tensor)) < tolerance


@both
def test_each_rank_has_sent_its_own_projection(name: str) -> None:
    """What a rank has sent is of its own: as many dimensions as the rank, none left of them, and their mean is U."""
    seen = steps_of(3, drawn, 6, compression=name, rank=2)
    for tensor in MATRICES:
        for step in range(6):
            sent = [matrix(accumulated(of, step, tensor) - of[step].residuals[tensor]) for of in seen]
            assert distance(mean(sent), matrix(seen[0][step].update(tensor))) < 1e-13
            for rank, of_rank in enumerate(seen):
                largest, *_, third = torch.linalg.svdvals(sent[rank])[:3].tolist()
                assert third < 1e-13 * largest
                # The same whole, orthogonally divided: Pythagoras.
                parts = sent[rank].norm() ** 2 + of_rank[step].residuals[tensor].norm() ** 2
                assert float(parts / accumulated(of_rank, step, tensor).norm() ** 2) == pytest.approx(1, abs=1e-13)


@both
@pytest.mark.parametrize("size", [1, 2, 3])
def test_residuals_are_orthogonal_to_what_was_sent(name: str, size: int) -> None:
    seen = steps_of(size, drawn, 8, compression=name, rank=2)
    for tensor in MATRICES:
        for step in range(8):
            for of_rank in seen:
                rest, update = of_rank[step].residuals[tensor], of_rank[step].update(tensor)
                assert overlap(rest, update, left_is_sent(name, of_rank, step, tensor)) < 1e-13
                if left_is_sent(name, of_rank, step, tensor):
                    basis = of_rank[step - 1].bases[tensor][1]
                    assert (matrix(rest) @ basis.T).norm() < 1e-13 * rest.norm()


# -- what an update depends on --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_do_what_one_does_with_the_mean_gradient(name: str, size: int) -> None:
    def average(rank: int, step: int) -> dict[str, Tensor]:
        return {tensor: mean([drawn(other, step)[tensor] for other in range(size)]) for tensor in SHAPES}

    together = steps_of(size, drawn, 12, compression=name, rank=4)[0]
    alone = steps_of(1, average, 12, compression=name, rank=4)[0]
    for step in range(12):
        for tensor in SHAPES:
            assert distance(together[step].update(tensor), alone[step].update(tensor)) < 1e-11


@both
@pytest.mark.parametrize("rank", [18, 40, 1000])
def test_where_factors_would_be_larger_the_mean_is_exact(name: str, rank: int) -> None:
    """Also with a rank above a matrix's rows and columns: it goes whole, and nothing is left."""
    whole = [tensor for tensor in SHAPES if rank >= min(SHAPES[tensor]) or tensor == "bias"]
    seen = steps_of(2, drawn, 3, compression=name, rank=rank)
    assert "wide" in whole
    for step in range(3):
        for tensor in whole:
            exact = mean([of_rank[step].gradients[tensor] for of_rank in seen])
            assert distance(seen[0][step].update(tensor), exact) < 1e-15
            assert tensor not in seen[0][step].residuals or not seen[0][step].residuals[tensor].any()


@both
@pytest.mark.parametrize("rank", [3, 4, 6])
def test_gradients_of_low_rank_are_exact_from_the_first_step(name: str, rank: int) -> None:
    """Constant ones of rank 3, of which each rank has others that are of the same three columns."""
    shapes = {"a": (40, 30), "b": (24, 60)}

    def thin(rank: int, step: int) -> dict[str, Tensor]:
        del step
        fixed, own = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4 + rank)
        return {
            tensor: torch.randn(n, 3, generator=fixed).double() @ torch.randn(3, m, generator=own).double()
            for tensor, (n, m) in shapes.items()
        }

    seen = steps_of(2, thin, 10, compression=name, rank=rank)
    for step in range(10):
        for tensor in shapes:
            exact = mean([of_rank[step].gradients[tensor] for of_rank in seen])
            assert distance(seen[0][step].update(tensor), exact) < 1e-12, (step, tensor)


# -- bases ------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", ["rank 1", "equal rows", "one element", "zero"])
def test_bases_are_orthonormal_whatever_the_gradient(name: str, kind: str) -> None:
    """Also where the gradient has fewer dimensions than the bases."""

    def thin(rank: int, step: int) -> dict[str, Tensor]:
        gradient = torch.zeros(40, 30)
        if kind == "rank 1":
            source = torch.Generator().manual_seed(step)
            gradient = torch.randn(40, 1, generator=source) * torch.randn(30, generator=source)
        elif kind == "equal rows":
            gradient[3:5] = torch.arange(30.0) - step
        elif kind == "one element":
            gradient[7, (step + rank) % 5] = 2.0
        return {"a": gradient, "b": gradient.clone()}

    for of_step in steps_of(2, thin, 6, compression=name, rank=3)[0]:
        assert all(torch.isfinite(of_step.update(tensor)).all() for tensor in "ab")
        assert all(torch.isfinite(residual).all() for residual in of_step.residuals.values())
        for _, basis in of_step.bases.values():
            assert (basis.double() @ basis.double().T - torch.eye(3)).abs().max() < 1e-6


@both
def test_sides_alternate_where_one_factor_is_sent(name: str) -> None:
    seen = steps_of(2, drawn, 5, compression=name, rank=2)[0]
    for tensor in MATRICES:
        sides = [of_step.bases[tensor][0] for of_step in seen]
        n, m = matrix(seen[0].gradients[tensor]).shape
        assert [of_step.bases[tensor][1].shape for of_step in seen] == [(2, n if side == LEFT else m) for side in sides]
        if name == "powersgd":
            assert sides == [RIGHT] * 5
        else:
            assert all({one, next_one} == {LEFT, RIGHT} for one, next_one in zip(sides, sides[1:], strict=False))


def test_some_lead_with_the_left_side_so_that_steps_are_about_as_long() -> None:
    seen = steps_of(1, drawn, 3, compression="acpsgd", rank=2)[0]
    lengths = [sum(basis.numel() for _, basis in of_step.bases.values()) for of_step in seen]
    shapes = [matrix(torch.zeros(SHAPES[tensor])).shape for tensor in MATRICES]
    in_step = abs(sum(n - m for n, m in shapes)) * 2  # if all had the same side
    assert {side for side, _ in seen[0].bases.values()} == {LEFT, RIGHT}
    assert lengths[0] == lengths[2] and abs(lengths[0] - lengths[1]) < in_step


# -- replicas ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("options", [{}, {"wire": "bf16"}, {"memory": "none"}, {"dense_sum": "ordered"}], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_updates_and_bases_are_the_same_bits_on_all_ranks(name: str, options: dict[str, str], size: int) -> None:
    seen = steps_of(size, single, 6, compression=name, rank=4, **options)
    for step in range(6):
        of_step = [of_rank[step] for of_rank in seen]
        assert len({digest(one.update(tensor) for tensor in SHAPES) for one in of_step}) == 1
        assert len({repr([(tensor, side) for tensor, (side, _) in one.bases.items()]) for one in of_step}) == 1
        assert len({digest(basis for _, basis in one.bases.values()) for one in of_step}) == 1
        if "memory" not in options:
            assert len({digest(one.residuals.values()) for one in of_step}) == size
