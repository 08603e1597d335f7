# SPDX-License-Identifier: Apache-2.0
"""Costs: elementwise on numbers and arrays, and what is refused at construction and in use."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest

from merging import Costs


def linear(elements: Any) -> Any:
    return 0.5 * elements


def affine(elements: Any) -> Any:
    return 2.0 + 0.25 * elements


def test_numbers_give_floats_and_arrays_give_arrays() -> None:
    costs = Costs(linear, affine, dense=linear)
    assert costs.dense is not None
    assert costs.sparsify(4) == 2.0 and costs.exchange(0) == 2.0 and costs.dense(6) == 3.0
    assert type(costs.exchange(3)) is float and type(costs.exchange(np.int64(3))) is float
    for shape in [(0,), (3,), (2, 3)]:
        counts = np.arange(math.prod(shape)).reshape(shape)
        seconds = costs.exchange(counts)
        assert seconds.dtype == np.float64 and np.array_equal(seconds, 2.0 + 0.25 * counts)
    assert Costs(linear, affine).dense is None


def test_a_constant_cost_fills_the_shape() -> None:
    costs = Costs(lambda elements: 0, lambda elements: 3)
    assert costs.exchange(np.array([1, 2])).tolist() == [3.0, 3.0] and costs.sparsify(5) == 0.0


@pytest.mark.parametrize("field", ["sparsify", "exchange", "dense"])
@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (1e-3, TypeError, "is 0.001: expected a function"),
        (lambda x: -1.0 * x, ValueError, "not negative"),
        (lambda x: x * np.nan, ValueError, "nan seconds.*finite"),
        (lambda x: np.where(x > 1000, np.inf, 0.0), ValueError, "inf seconds.*finite"),
        (lambda x: np.where(x == 0, np.nan, 0.0), ValueError, "nan seconds.*finite"),
        (lambda x: np.zeros(2), ValueError, r"shape \(2,\) for shape \(33,\)"),
        (lambda x: x * math.log2(x) if x else 0.0, ValueError, "31 elements, but it must work elementwise:"),
        (lambda x: np.minimum(x, 4.0) * (x < 2**20), ValueError, "decreases from 524288 to 1048576"),
    ],
)
def test_refuses(field: str, function: Any, error: type[Exception], says: str) -> None:
    functions = {"sparsify": linear, "exchange": affine, "dense": affine, field: function}
    with pytest.raises(error, match=rf"costs\.{field}.*{says}"):
        Costs(**functions)


def test_sparsify_of_nothing_is_free() -> None:
    with pytest.raises(ValueError, match=r"sparsify\(0\) is 2.0"):
        Costs(affine, affine)
    Costs(linear, linear, linear)


def test_a_bad_answer_in_use_is_an_error() -> None:
    costs = Costs(linear, lambda x: np.where(x == 3, -1.0, 1.0))
    assert costs.exchange(np.array([1, 2])).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"costs\.exchange returned -1.0 seconds"):
        costs.exchange(np.array([1, 3]))
    with pytest.raises(ValueError, match=r"costs\.exchange returned -1.0 seconds"):
        costs.exchange(3)


def test_equal_by_function_and_copied() -> None:
    costs = Costs(linear, affine)
    assert costs == Costs(linear, affine) != Costs(linear, affine, affine)
    assert Costs(costs.sparsify, costs.exchange) == costs
    assert pickle.loads(pickle.dumps(costs)) == copy.deepcopy(costs) == costs
