# SPDX-License-Identifier: Apache-2.0
"""Budgets, the checks of `select` and `capacity`, Selection's own, and the canonical text."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sparsifiers
from sparsifiers import Request, Selection, Sparsifier, budget
from sparsifiers.base import canonical, check_request


class Recorder(Sparsifier):
    """Selects the first indices and keeps what it was asked."""

    name = "recorder"

    def __init__(self, density: float = 0.01, zeta: float = 2.0, alpha: str = "a") -> None:
        super().__init__(density)
        self.zeta, self.alpha = zeta, alpha
        self.asked: list[Request] = []

    def options(self) -> dict[str, object]:
        return {"zeta": self.zeta, "alpha": self.alpha}

    def _capacity(self, numel: int, request: Request) -> int:
        return (request.k + 1) // 2

    def _select(self, vector: Tensor, request: Request) -> Selection:
        assert not vector.requires_grad
        self.asked.append(request)
        slots = self._capacity(vector.numel(), request)
        return Selection(torch.arange(slots, dtype=torch.int32), torch.tensor(slots - 1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("density", "numel", "expected"),
    [(0.01, 0, 0), (0.01, 1, 1), (0.01, 100, 1), (0.01, 101, 2), (0.001, 999, 1), (1.0, 7, 7), (1, 7, 7)]
    + [(0.5, 3, 2), (1e-12, 10, 1), (0.07, 100, 8), (1.0, 2**31 - 1, 2**31 - 1)],
)
def test_budget(density: float, numel: int, expected: int) -> None:
    assert budget(density, numel) == expected
    assert type(budget(density, numel)) is int


@given(st.floats(min_value=0, max_value=1, exclude_min=True), st.integers(1, 2**31 - 1))
def test_budget_is_the_formula_and_in_range(density: float, numel: int) -> None:
    k = budget(density, numel)
    assert k == max(1, math.ceil(density * numel))
    assert 1 <= k <= numel


@pytest.mark.parametrize("density", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_densities_outside_the_range(density: float) -> None:
    for make in (lambda: sparsifiers.get("topk", density), lambda: budget(density, 10)):
        with pytest.raises(ValueError, match="density must be in"):
            make()


@pytest.mark.parametrize("density", ["0.01", None, True, {"layer": 0.1}])
def test_densities_that_are_no_numbers(density: Any) -> None:
    with pytest.raises(TypeError, match="density must be a number"):
        sparsifiers.get("topk", density)


@pytest.mark.parametrize("numel", [-1, 2**31])
def test_numel_outside_the_range(numel: int) -> None:
    with pytest.raises(ValueError, match=rf"numel must be in \[0, 2\*\*31\), got {numel}"):
        budget(0.5, numel)
    with pytest.raises(ValueError, match=rf"topk\(density=0.01\): numel must be .* got {numel}"):
        sparsifiers.get("topk").capacity(numel)


@pytest.mark.parametrize(("numel", "k"), [(10, 0), (10, 11), (10, -1), (0, 1)])
def test_k_outside_the_range(numel: int, k: int) -> None:
    topk = sparsifiers.get("topk")
    with pytest.raises(ValueError, match=rf"topk\(density=0.01\), key 'fc': k must be in .*got {k}\..*budget"):
        topk.select(torch.zeros(numel), k=k, key="fc")
    with pytest.raises(ValueError, match=rf"topk\(density=0.01\): k must be in .*got {k}\..*budget"):
        topk.capacity(numel, k=k)


@pytest.mark.parametrize("k", [1.0, "1", True, torch.tensor(1)])
def test_k_that_is_no_int(k: Any) -> None:
    with pytest.raises(TypeError, match="k must be an int"):
        sparsifiers.get("topk").select(torch.zeros(10), k=k)


def test_k_may_be_a_numpy_integer() -> None:
    selection = sparsifiers.get("topk").select(torch.arange(10.0), k=np.int64(2))  # type: ignore[arg-type]
    assert selection.trimmed().tolist() == [8, 9]
    assert type(selection.count) is int


@pytest.mark.parametrize("shape", [(), (2, 3), (1, 1)])
def test_vectors_of_another_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"key 'w': vector must be 1-D.*reshape\(-1\)"):
        sparsifiers.get("topk").select(torch.zeros(shape), key="w")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_vectors_of_another_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"vector must be one of .*bfloat16.*, got {dtype}"):
        sparsifiers.get("topk").select(torch.zeros(4).to(dtype))


def test_vectors_that_are_no_strided_tensors() -> None:
    with pytest.raises(TypeError, match="vector must be a torch.Tensor, got ndarray"):
        sparsifiers.get("topk").select(np.zeros(4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layout torch.sparse_coo.*to_dense\(\)"):
        sparsifiers.get("topk").select(torch.zeros(4).to_sparse())


def test_vectors_too_long_for_int32() -> None:
    with pytest.raises(ValueError, match=r"numel must be in .*got 2147483648"):
        sparsifiers.get("topk").select(torch.zeros(1).expand(2**31))


def test_step_counts_from_zero() -> None:
    with pytest.raises(ValueError, match="step must be .*got -1"):
        sparsifiers.get("topk").select(torch.zeros(4), step=-1)
    with pytest.raises(TypeError, match="step must be an int"):
        sparsifiers.get("topk").capacity(4, step=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("shapes", [[(2, 3)], [(2,), (2, 2)], [], [(5, 0)]])
def test_shapes_that_do_not_cover_the_vector(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"shapes have \d elements in \d tensors, but the vector has 5"):
        sparsifiers.get("topk").select(torch.zeros(5), shapes=shapes)
    with pytest.raises(ValueError, match="Pass the shape of every tensor in the vector,"):
        sparsifiers.get("topk").capacity(5, shapes=shapes)


def test_shapes_of_integers_only() -> None:
    with pytest.raises(TypeError, match=r"key 'w': a size in shapes must be an int, got 2.5"):
        sparsifiers.get("topk").select(torch.zeros(5), key="w", shapes=[(2, 2.5)])  # type: ignore[list-item]


def test_a_sparsifier_sees_one_checked_request() -> None:
    recorder = Recorder(0.5)
    recorder.select(torch.zeros(9))
    shapes = [torch.Size([2, 3]), [3], ()]
    recorder.select(torch.zeros(10), k=4, key="conv", step=8, shapes=shapes)
    assert recorder.asked == [
        Request(k=5, key="", step=0, shapes=((9,),)),
        Request(k=4, key="conv", step=8, shapes=((2, 3), (3,), ())),
    ]
    assert recorder.capacity(10, k=4, step=8, shapes=shapes) == 2


def test_a_sparsifier_is_spared_gradients_and_empty_vectors() -> None:
    recorder = Recorder(0.5)
    recorder.select(torch.zeros(9, requires_grad=True))
    assert recorder.select(torch.zeros(0)).count == 0
    assert [request.k for request in recorder.asked] == [5]


def test_a_good_call_formats_no_name() -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    request = check_request(Unprintable(), 0.5, 4, k=None, key="w", step=0, shapes=None)
    assert request.k == 2


def test_selection_is_frozen_and_trims_a_count_of_either_kind() -> None:
    indices = torch.tensor([1, 4, 9, 0], dtype=torch.int32)
    for count in (3, torch.tensor(3, dtype=torch.int32)):
        selection = Selection(indices, count)
        assert selection.trimmed().tolist() == [1, 4, 9]
        assert selection.trimmed().dtype == torch.int64
        with pytest.raises(dataclasses.FrozenInstanceError):
            selection.count = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("indices", "count", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), 1, "indices must be int32"),
        (torch.zeros(3, 1, dtype=torch.int32), 1, "indices must be int32"),
        (torch.zeros(3, dtype=torch.int32), 4, "got 4"),
        (torch.zeros(3, dtype=torch.int32), -1, "got -1"),
        (torch.zeros(3, dtype=torch.int32), torch.tensor(1), "count must be 0-dim"),
        (torch.zeros(3, dtype=torch.int32), torch.tensor([1], dtype=torch.int32), "count must be 0-dim"),
        (torch.zeros(3, dtype=torch.int32), torch.empty((), dtype=torch.int32, device="meta"), "0-dim"),
    ],
)
def test_selection_refuses_what_the_core_could_not_read(indices: Tensor, count: int | Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Selection(indices, count)


def test_options_are_part_of_the_text_in_one_order() -> None:
    assert repr(Recorder(0.5)) == "recorder(density=0.5, alpha='a', zeta=2.0)"


def test_canonical_text() -> None:
    values = {"a": None, "b": True, "c": np.float64(0.1), "d": ("x", (1,)), "e": ()}
    assert canonical("m", values) == "m(a=None, b=True, c=0.1, d=('x', (1,)), e=())"
    assert canonical("m", {}) == "m()"
    for value in (object(), [1], {1}, lambda: None, (1, [2])):
        with pytest.raises(TypeError, match="m: option 'a' is .*plain values"):
            canonical("m", {"a": value})
