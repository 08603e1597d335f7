# SPDX-License-Identifier: Apache-2.0
"""Contraction and row coverage are measured right, and say of the sparsifiers what theory and ADTopk's paper say."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import sparsifiers
from sparsifiers import Selection, conformance, proof
from sparsifiers.proof import Observed, Proof, contraction, row_numbers, rows_reached

Shapes = list[tuple[int, ...]]
SHAPES: Shapes = [(64, 3, 3, 3), (16,), (200, 30), (24,), (0, 5), (10, 40), (), (9, 1), (1, 7), (15,)]
N = sum(math.prod(shape) for shape in SHAPES)

some_shapes = st.lists(st.lists(st.integers(0, 6), max_size=4).map(tuple), max_size=6)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> Iterator[None]:
    yield


def selection_of(places: list[int], spare: int = 0) -> Selection:
    return Selection(torch.tensor(places + [0] * spare, dtype=torch.int32), len(places))


def heteroscedastic(rows: int, length: int, seed: int) -> Tensor:
    """Rows whose scale is log-normal, sd = 1, as published code was measured on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, generator=generator) * torch.randn(rows, 1, generator=generator).exp()


def brute_rows(shapes: Shapes) -> list[int]:
    """The row of every element of the vector."""
    numbers: list[np.ndarray] = []
    rows = 0
    for shape in shapes:
        size = math.prod(shape)
        if len(shape) < 2 or size == 0:
            numbers.append(np.full(size, -1))
            continue
        outer, inner = shape[0], size // shape[0]
        row, column = np.divmod(np.arange(size), inner)
        numbers.append(rows + (column if outer > inner else row))
        rows += min(outer, inner)
    return np.concatenate([np.empty(0, int), *numbers]).tolist()


# -- the contraction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(numbers=st.lists(st.integers(-100, 100), max_size=40), block=st.integers(1, 50), data=st.data())
def test_the_contraction_is_what_it_says(
    dtype: torch.dtype, numbers: list[int], block: int, data: st.DataObject
) -> None:
    places = sorted(data.draw(st.sets(st.integers(0, len(numbers) - 1)))) if numbers else []
    vector = torch.tensor(numbers, dtype=dtype)
    before = vector.clone()
    with patch.object(proof, "BLOCK", block):
        found = contraction(vector, selection_of(places, spare=2 if numbers else 0))
    assert found.dtype == torch.float64 and found.shape == ()
    assert torch.equal(vector, before)
    total = sum(a * a for a in numbers)
    left = total - sum(numbers[place] ** 2 for place in places)
    assert found.item() == (float(Fraction(left, total)) if total else 0.0)


def test_of_little_that_is_left_every_digit_is_right() -> None:
    vector = torch.tensor([1.0, 1e-9, 1e-12])
    assert contraction(vector, selection_of([0])).item() == pytest.approx(1e-18, rel=1e-5)
    assert contraction(vector, selection_of([0, 1, 2])).item() == 0.0
    assert contraction(1e30 * vector, selection_of([0, 1])).item() == pytest.approx(1e-24, rel=1e-5)


def test_odd_vectors() -> None:
    assert contraction(torch.zeros(5), selection_of([2])).item() == 0.0
    assert contraction(torch.empty(0), selection_of([])).item() == 0.0
    assert contraction(torch.ones(4), selection_of([])).item() == 1.0
    assert math.isnan(contraction(torch.tensor([1.0, math.nan]), selection_of([1])))
    assert contraction(torch.ones(4, 2)[:, 1], selection_of([1])).item() == 0.75
    assert not contraction(torch.ones(4, requires_grad=True), selection_of([1])).requires_grad
    on_device = Selection(torch.tensor([0, 3, 1], dtype=torch.int32), torch.tensor(2, dtype=torch.int32))
    assert contraction(torch.ones(4), on_device).item() == 0.5


def test_topk_keeps_to_its_bound(distribution: str, draw: Callable[..., Tensor]) -> None:
    for n, k in ((1, 1), (100, 1), (5000, 50), (5000, 4999)):
        vector = draw(distribution, n)
        rounding = 1e-12  # a constant vector meets the bound
        assert contraction(vector, sparsifiers.get("topk").select(vector, k=k)) <= 1 - k / n + rounding


@pytest.mark.parametrize("k", [7, 24, 100])
def test_rows_in_turn_keep_to_it_on_average(k: int) -> None:
    matrix, turns = heteroscedastic(40, 60, seed=0), 40  # every row has its turn equally often
    vector, shapes, sparsifier = matrix.view(-1), [matrix.shape], sparsifiers.get("adtopk-row")
    left = [
        contraction(vector, sparsifier.select(vector, k=k, step=step, shapes=shapes)).item() for step in range(turns)
    ]
    assert sum(left) / turns <= 1 - k / 2400
    assert k > 7 or max(left) > 1 - k / 2400  # not at every step


def test_lots_meet_it_on_average() -> None:
    vector, randomk = heteroscedastic(40, 60, seed=0).view(-1), sparsifiers.get("randomk", 0.1)
    left = [contraction(vector, randomk.select(vector, step=step)).item() for step in range(400)]
    assert sum(left) / 400 == pytest.approx(0.9, abs=0.01)
    assert max(left) > 0.9


def test_nothing_of_the_vectors_size_is_allocated() -> None:
    vector = torch.ones(4_000_000)
    selection = selection_of(list(range(0, 4_000_000, 400)))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        assert contraction(vector, selection).item() == pytest.approx(1 - 1 / 400)
    assert 0 < max(event.cpu_memory_usage for event in recorded.events()) < vector.nbytes / 4


# -- rows -----------------------------------------------------------------------------------------------------


@given(shapes=some_shapes, data=st.data())
def test_rows_equal_brute_force(shapes: Shapes, data: st.DataObject) -> None:
    expected = brute_rows(shapes)
    everything = torch.arange(len(expected), dtype=torch.int32)
    assert row_numbers(everything, shapes).tolist() == expected
    assert row_numbers(everything.flip(0), shapes).tolist() == expected[::-1]
    places = sorted(data.draw(st.sets(st.integers(0, len(expected) - 1)))) if expected else []
    reached = rows_reached(selection_of(places, spare=min(3, len(expected))), shapes)
    assert reached.dtype == torch.bool
    sending = {expected[place] for place in places}
    assert reached.tolist() == [row in sending for row in range(max(expected, default=-1) + 1)]


def test_by_hand() -> None:
    assert row_numbers(torch.arange(6), [(2, 3)]).tolist() == [0, 0, 0, 1, 1, 1]
    assert row_numbers(torch.arange(6), [(3, 2)]).tolist() == [0, 1, 0, 1, 0, 1]  # its longer axis is the first
    assert row_numbers(torch.arange(9), [(4,), (1, 2), (2,), (1, 1)]).tolist() == [-1] * 4 + [0, 0, -1, -1, 1]


# -- summed up ------------------------------------------------------------------------------------------------


@given(shapes=some_shapes, steps=st.integers(1, 8), data=st.data())
def test_figures_equal_brute_force(shapes: Shapes, steps: int, data: st.DataObject) -> None:
    row_of = brute_rows(shapes)
    n, rows = len(row_of), max(row_of, default=-1) + 1
    measured, left, sending = Proof(), [], []
    for step in range(steps):
        places = sorted(data.draw(st.sets(st.integers(0, n - 1)))) if n else []
        vector = torch.randn(n, generator=torch.Generator().manual_seed(step))
        measured.observe("a", vector, selection_of(places), shapes)
        left.append(contraction(vector, selection_of(places)).item())
        sending.append({row_of[place] for place in places} - {-1})
    waits = ["".join("x" if row in there else "." for there in sending).split("x") for row in range(rows)]
    assert measured.figures() == {
        "observations": steps,
        "contraction_mean": pytest.approx(sum(left) / steps),
        "contraction_max": max(left),
        "rows": rows,
        "row_coverage": pytest.approx(sum(map(len, sending)) / rows / steps if rows else 1.0),
        "rows_reached": pytest.approx(len(set().union(*sending)) / rows if rows else 1.0),
        "longest_wait": max((len(wait) for row in waits for wait in row), default=0),
    }


def test_keys_are_apart_and_a_new_shape_starts_its_rows_over() -> None:
    measured, ones = Proof(), torch.ones(4)
    empty = {**Proof().figures()}
    assert empty["observations"] == empty["rows"] == empty["longest_wait"] == empty["contraction_max"] == 0
    assert empty["row_coverage"] == empty["rows_reached"] == 1.0
    measured.observe("a", ones, selection_of([0]), [(2, 2)])
    measured.observe("b", ones, selection_of([3]), [(2, 2)])
    assert measured.figures()["rows"] == 4
    assert measured.figures()["rows_reached"] == measured.figures()["row_coverage"] == 0.5
    measured.observe("a", ones, selection_of([2]), [[2, 2]])  # the same shape
    assert measured.figures()["rows_reached"] == 0.75
    measured.observe("a", ones, selection_of([2]), [(1, 2), (2,)])
    assert measured.figures()["rows"] == 3
    assert measured.figures()["rows_reached"] == pytest.approx(1 / 3)
    assert measured.figures()["observations"] == 4
    assert measured.figures()["longest_wait"] == 1
    json.dumps(measured.figures())
    measured.reset()
    assert measured.figures() == empty


def test_a_nan_is_not_lost() -> None:
    measured = Proof()
    for value in (1.0, math.nan, 2.0):
        measured.observe("a", torch.tensor([value, 1.0]), selection_of([0]), [(2,)])
    assert math.isnan(measured.figures()["contraction_max"]) and math.isnan(measured.figures()["contraction_mean"])


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match="shapes of 'a' hold 6 elements, but the vector has 7"):
        Proof().observe("a", torch.ones(7), selection_of([0]), [(2, 3)])


# -- what is measured of the sparsifiers ----------------------------------------------------------------------


def measure(name: str, steps: int, k: int, rows: int, length: int, **options: object) -> dict[str, float]:
    """Figures of a run with error feedback, the scales of the rows as they are at the start."""
    sparsifier, measured = sparsifiers.get(name, **options), Proof()
    scales = heteroscedastic(rows, 1, seed=0).abs().repeat_interleave(length)
    residual, shapes = torch.zeros(rows * length), [(rows, length)]
    for step in range(steps):
        residual += scales * torch.randn(rows * length, generator=torch.Generator().manual_seed(step))
        selection = sparsifier.select(residual, k=k, step=step, shapes=shapes)
        measured.observe("a", residual, selection, shapes)
        residual[selection.trimmed()] = 0.0
    return measured.figures()


@pytest.mark.parametrize("name", ["adtopk-row", "adtopk-fill"])
@pytest.mark.parametrize("k", [1, 7, 30, 99, 100, 101, 250])
def test_all_rows_are_reached_in_as_many_steps_as_it_takes(name: str, k: int) -> None:
    turns = math.ceil(100 / k)
    found = measure(name, steps=turns, k=k, rows=100, length=120)
    assert found["rows_reached"] == 1.0
    assert found["row_coverage"] == pytest.approx(min(1.0, k / 100))
    assert measure(name, steps=3 * turns, k=k, rows=100, length=120)["longest_wait"] <= turns - 1
    if turns > 1:
        assert measure(name, steps=turns - 1, k=k, rows=100, length=120)["rows_reached"] < 1.0


def test_topk_misses_most_rows_and_adtopk_does_not() -> None:
    # 3072 rows of length 768, as four tensors: as one, its columns would be the rows.
    vector, shapes = heteroscedastic(3072, 768, seed=0).view(-1), [(768, 768)] * 4
    empty, kept = {}, {}
    for name in ("topk", "adtopk", "adtopk-row", "adtopk-fill"):
        selection = sparsifiers.get(name, 0.01).select(vector, step=0, shapes=shapes)
        empty[name] = 1 - rows_reached(selection, shapes).double().mean().item()
        kept[name] = 1 - contraction(vector, selection).item()
    assert empty["topk"] == pytest.approx(0.88, abs=0.01)
    assert empty["adtopk"] == empty["adtopk-row"] == empty["adtopk-fill"] == 0.0
    assert kept["topk"] == pytest.approx(0.45, abs=0.05)
    assert kept["adtopk"] == kept["adtopk-row"] == pytest.approx(0.08, abs=0.01)  # a step for rows
    assert kept["adtopk-fill"] == pytest.approx(0.96 * kept["topk"], rel=0.02)


def test_under_error_feedback_topk_lets_rows_wait() -> None:
    found = {name: measure(name, steps=20, k=300, rows=100, length=300) for name in ("topk", "adtopk", "adtopk-fill")}
    assert found["topk"]["row_coverage"] < 0.5
    assert found["topk"]["longest_wait"] > 3
    assert found["adtopk"]["row_coverage"] > 0.5
    assert found["adtopk-fill"]["row_coverage"] == 1.0
    assert found["adtopk"]["longest_wait"] <= 1 and found["adtopk-fill"]["longest_wait"] == 0
    assert found["topk"]["contraction_mean"] <= 0.99


# -- a sparsifier that is observed ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adtopk", "dgc", "randomk", "topk"])
def test_an_observed_sparsifier_selects_as_it_does_alone(name: str) -> None:
    alone, observed = sparsifiers.get(name, 0.1), Observed(sparsifiers.get(name, 0.1))
    measured, shapes = Proof(), [(40, 25)]
    for step in range(4):
        vector = heteroscedastic(40, 25, seed=step).view(-1)
        expected = alone.select(vector, k=50, key="a", step=step, shapes=shapes)
        measured.observe("a", vector, expected, shapes)
        selection = observed.select(vector, k=50, key="a", step=step, shapes=shapes)
        assert torch.equal(selection.indices, expected.indices) and selection.count == expected.count
    assert observed.figures() == measured.figures() != Proof().figures()
    for attribute in ("name", "kind", "memory", "density", "same_on_all_ranks"):
        assert getattr(observed, attribute) == getattr(alone, attribute)
    assert repr(observed) == repr(alone) and observed.options() == alone.options()
    assert observed.state_dict() == alone.state_dict() and observed.snapshot() == alone.snapshot()
    assert observed.capacity(1000, step=3) == alone.capacity(1000, step=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adtopk", "randomk", "topk"])
def test_an_observed_sparsifier_keeps_the_contract(name: str) -> None:
    conformance.check(lambda density=0.01, **options: Observed(sparsifiers.get(name, density, **options)))


def test_state_goes_from_an_observed_one_to_another_and_back() -> None:
    plain = sparsifiers.get("threshold")
    first, second = (Observed(sparsifiers.get("threshold")) for _ in range(2))
    first.select(heteroscedastic(40, 25, 0).view(-1), key="a")
    plain.load_state_dict(first.state_dict())
    second.load_state_dict(plain.state_dict())
    assert second.state_dict() == first.state_dict() != sparsifiers.get("threshold").state_dict()
    assert pickle.loads(pickle.dumps(first)).figures() == first.figures()


def test_without_shapes_a_vector_is_one_tensor_and_none_is_nothing() -> None:
    observed = Observed(sparsifiers.get("topk", 0.5))
    observed.select(torch.ones(4))
    assert observed.figures()["rows"] == 0 and observed.figures()["contraction_mean"] == 0.5
    observed.select(torch.empty(0))
    assert observed.figures()["observations"] == 2 and observed.figures()["contraction_mean"] == 0.25


def test_a_new_plan_starts_the_figures_over() -> None:
    observed = Observed(sparsifiers.get("threshold"))
    for key in "ab":
        observed.select(heteroscedastic(40, 25, 0).view(-1), key=key, shapes=[(40, 25)])
    assert observed.figures()["rows"] == 50
    observed.retain(["b"])
    assert observed.figures() == Proof().figures()
    assert list(observed.wrapped.state_dict()["threshold"]) == ["b"]
