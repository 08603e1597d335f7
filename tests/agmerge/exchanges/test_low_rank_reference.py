# SPDX-License-Identifier: Apache-2.0
"""Updates, residuals and bases are those of the papers (tests/references), in float64."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from references.acpsgd import ACPSGD
from references.powersgd import PowerSGD
from support.low_rank_steps import (
    LEFT,
    MATRICES,
    NAMES,
    RIGHT,
    SHAPES,
    Step,
    distance,
    drawn,
    first_basis,
    matrix,
    steps_of,
)
from torch import Tensor

import sparsifiers

RANKS = 3
References = Mapping[str, "PowerSGD | ACPSGD"]  # by name of the tensor


def assert_spans(rows: Tensor, columns: Tensor, tolerance: float) -> None:
    """Two bases, one of rows and one of columns, are of one space."""
    exact = torch.linalg.qr(columns).Q
    assert (rows.T.double() @ rows.double() - exact @ exact.T).norm() < tolerance


def compare(seen: list[list[Step]], references: References, tolerance: float = 1e-10) -> None:
    """``tolerance``: relative, of float64: products of matrices are added up in another order than ours."""
    for step in range(len(seen[0])):
        for name, reference in references.items():
            exact = reference.step([matrix(of_rank[step].gradients[name]) for of_rank in seen])
            for of_rank, error in zip(seen, reference.errors, strict=True):
                assert distance(matrix(of_rank[step].update(name)), exact) <= tolerance
                assert distance(matrix(of_rank[step].residuals[name]), error) <= tolerance
            side, basis = seen[0][step].bases[name]
            if isinstance(reference, PowerSGD):
                assert side == RIGHT
                assert_spans(basis, reference.q, 100 * tolerance)
            else:
                assert side == (LEFT if reference.is_left else RIGHT) and reference.basis is not None
                assert_spans(basis, reference.basis, 100 * tolerance)


def acpsgd(seen: list[list[Step]], name: str, rank: int) -> ACPSGD:
    """Which of two bases is kept of the first step says when a tensor's left factors are sent: see below."""
    return ACPSGD(len(seen), first_basis(name, SHAPES[name], rank), keeps_left=seen[0][0].bases[name][0] == LEFT)


def powersgd(name: str, rank: int, seed: int = 0) -> PowerSGD:
    return PowerSGD(RANKS, first_basis(name, SHAPES[name], rank, seed))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_acpsgd_is_the_papers_after_a_first_step_of_both_factors(rank: int) -> None:
    seen = steps_of(RANKS, drawn, 20, compression="acpsgd", rank=rank)
    references = {name: acpsgd(seen, name, rank) for name in MATRICES}
    assert {reference.keeps_left for reference in references.values()} == {True, False}
    compare(seen, references)


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
    seen = steps_of(RANKS, lambda rank, step: drawn(rank, step, torch.float32), 4, compression=name, rank=2)
    make = {"powersgd": lambda tensor: powersgd(tensor, 2), "acpsgd": lambda tensor: acpsgd(seen, tensor, 2)}[name]
    compare(seen, {tensor: make(tensor) for tensor in MATRICES}, 1e-4)


def test_the_rank_and_the_seed_of_each_tensor_are_its_own() -> None:
    compressor = sparsifiers.PowerSGD({"tall|conv": 1, "square": 3}, seed=9)  # 4 of what no pattern names
    seen = steps_of(RANKS, drawn, 20, compression=compressor)
    ranks = {"conv": 1, "wide": 4, "tall": 1, "square": 3}
    compare(seen, {name: powersgd(name, rank, seed=9) for name, rank in ranks.items()})


def test_the_first_basis_is_drawn_from_seed_and_name_by_a_generator_of_its_own() -> None:
    """The same numbers for all versions: those of a fixed algorithm, made orthonormal."""
    source = np.random.Generator(np.random.PCG64([5, zlib.crc32(b"layer.weight")]))
    exact = torch.from_numpy(2 * source.random((3, 70)) - 1).T
    assert_spans(first_basis("layer.weight", (40, 7, 10), 3, seed=5).T, exact, 1e-5)
