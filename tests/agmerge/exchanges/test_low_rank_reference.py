"""Updates, residuals and bases are those of the papers, computed without the library, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.low_rank_steps import (
    LEFT,
    MATRICES,
    NAMES,
    RIGHT,
    SHAPES,
    Reference,
    Step,
    drawn,
    first_basis,
    matrix,
    steps_of,
)
from torch import Tensor

import sparsifiers

STEPS, RANKS = 20, 3


def as_array(tensor: Tensor) -> np.ndarray:
    return matrix(tensor).numpy()


def assert_close(found: Tensor, exact: np.ndarray, tolerance: float) -> None:
    assert np.linalg.norm(as_array(found) - exact) <= tolerance * np.linalg.norm(exact)


def assert_spans(basis: Tensor, exact: np.ndarray, tolerance: float) -> None:
    """Two bases, one of rows and one of columns, are of one space."""
    rows = as_array(basis)
    assert np.linalg.norm(rows.T @ rows - exact @ exact.T) < tolerance


def compare(seen: list[list[Step]], references: dict[str, Reference], tolerance: float) -> None:
    for step in range(STEPS):
        for name, reference in references.items():
            exact = reference.step([as_array(of_rank[step].gradients[name]) for of_rank in seen])
            for rank, of_rank in enumerate(seen):
                assert_close(of_rank[step].update(name), exact, tolerance)
                assert_close(of_rank[step].residuals[name], reference.residuals[rank], tolerance)
            side, basis = seen[0][step].bases[name]
            assert side == reference.side, (step, name)
            assert_spans(basis, reference.basis, 100 * tolerance)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_the_papers(rank: int) -> None:
    seen = steps_of(RANKS, drawn, STEPS, compression="powersgd", rank=rank)
    compare(seen, {name: Reference(RANKS, False, first_basis(name, SHAPES[name], rank)) for name in MATRICES}, 1e-10)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_acpsgd_is_the_papers_after_a_first_step_of_both_factors(rank: int) -> None:
    """Which of the two bases it keeps of that step says when a tensor's left factors are sent: see below."""
    seen = steps_of(RANKS, drawn, STEPS, compression="acpsgd", rank=rank)
    first = {name: side for name, (side, _) in seen[0][0].bases.items()}
    references = {
        name: Reference(RANKS, True, first_basis(name, SHAPES[name], rank), first=first[name]) for name in MATRICES
    }
    assert set(first.values()) == {LEFT, RIGHT}
    compare(seen, references, 1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_sides_are_dealt_out_so_that_steps_are_about_as_long(seed: int) -> None:
    """Two steps differ by less than the two factors of one tensor do."""
    source = np.random.default_rng(seed)
    shapes = {f"t{number}": tuple(source.integers(12, 100, 2).tolist()) for number in range(6)}
    seen = steps_of(1, lambda rank, step: drawn(rank, step, shapes=shapes), 2, compression="acpsgd", rank=2)[0]
    lengths = [sum(basis.numel() for _, basis in one.bases.values()) for one in seen]
    assert abs(lengths[0] - lengths[1]) <= max(2 * abs(n - m) for n, m in shapes.values())


@pytest.mark.parametrize("name", NAMES)
def test_in_float32_it_is_that_to_rounding(name: str) -> None:
    """Of a few steps: rounding turns bases a little more each time."""
    seen = steps_of(2, lambda rank, step: drawn(rank, step, torch.float32), 4, compression=name, rank=2)
    for tensor in MATRICES:
        side = seen[0][0].bases[tensor][0]
        reference = Reference(2, name == "acpsgd", first_basis(tensor, SHAPES[tensor], 2), first=side)
        for step in range(4):
            exact = reference.step([as_array(of_rank[step].gradients[tensor]) for of_rank in seen])
            assert_close(seen[0][step].update(tensor), exact, 1e-4)
            assert_close(seen[1][step].residuals[tensor], reference.residuals[1], 1e-4)


def test_the_rank_and_the_seed_of_each_tensor_are_its_own() -> None:
    compressor = sparsifiers.PowerSGD({"tall|conv": 1, "square": 3}, seed=9)  # 4 of what no pattern names
    seen = steps_of(RANKS, drawn, STEPS, compression=compressor)
    ranks = {"conv": 1, "wide": 4, "tall": 1, "square": 3}
    compare(
        seen,
        {name: Reference(RANKS, False, first_basis(name, SHAPES[name], ranks[name], seed=9)) for name in MATRICES},
        1e-10,
    )


def test_the_first_basis_is_drawn_from_seed_and_name_by_a_generator_of_its_own() -> None:
    """The same numbers for all versions: those of a fixed algorithm, made orthonormal."""
    import zlib

    source = np.random.Generator(np.random.PCG64([5, zlib.crc32(b"layer.weight")]))
    exact = np.linalg.qr((2 * source.random((3, 70)) - 1).T)[0]
    assert_spans(torch.from_numpy(first_basis("layer.weight", (40, 7, 10), 3, seed=5)), exact, 1e-5)
