# SPDX-License-Identifier: Apache-2.0
"""What every sparsifier promises, whichever way it chooses. A new name is tried here without a new line."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsifiers

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EXACT_COUNT = {"topk"}

Draw = Callable[..., Tensor]


@pytest.fixture(params=sparsifiers.names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("n", [1, 2, 31, 1000, 70_001])
def test_selection(name: str, distribution: str, n: int, draw: Draw) -> None:
    vector = draw(distribution, n)
    nonzero = int(vector.count_nonzero())
    for k in (None, 1, n // 3 or 1, n):
        sparsifier = sparsifiers.get(name, 0.01)
        selection = sparsifier.select(vector, k=k)
        wanted = sparsifiers.budget(0.01, n) if k is None else k
        assert selection.indices.dtype == torch.int32
        assert selection.indices.shape == (sparsifier.capacity(n, k=k),)
        assert selection.indices.numel() <= wanted
        chosen = selection.trimmed()
        assert chosen.dtype == torch.int64
        assert chosen.numel() == int(selection.count) <= wanted
        assert (chosen[1:] > chosen[:-1]).all()
        assert ((selection.indices >= 0) & (selection.indices < n)).all()
        if nonzero >= wanted:
            assert chosen.numel() >= 0.8 * wanted
        if name in EXACT_COUNT:
            assert isinstance(selection.count, int)
            assert selection.count == wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_vector_is_not_changed(
    name: str, dtype: torch.dtype, draw: Draw, same_bits: Callable[[Tensor, Tensor], bool]
) -> None:
    for n in (1000, 70_001):
        vector = draw("gaussian", n, dtype)
        vector[7], vector[8], vector[9] = float("nan"), float("-inf"), -0.0
        before, version = vector.clone(), vector._version
        sparsifiers.get(name).select(vector)
        assert same_bits(vector, before)
        assert vector._version == version


def test_a_vector_that_requires_grad_is_read_like_any_other(name: str, draw: Draw) -> None:
    vector = draw("gaussian", 1000)
    expected = sparsifiers.get(name).select(vector).trimmed()
    selection = sparsifiers.get(name).select(vector.clone().requires_grad_())
    assert torch.equal(selection.trimmed(), expected)
    assert not selection.indices.requires_grad


def test_an_empty_vector_selects_nothing(name: str) -> None:
    sparsifier = sparsifiers.get(name)
    for k in (None, 0):
        selection = sparsifier.select(torch.empty(0), k=k)
        assert selection.indices.shape == (0,) == (sparsifier.capacity(0, k=k),)
        assert selection.indices.dtype == torch.int32
        assert selection.count == 0


def test_repeatable(name: str, distribution: str, draw: Draw) -> None:
    vector = draw(distribution, 70_001)
    first, second = (sparsifiers.get(name, 0.02).select(vector, key="a", step=3, shapes=[(70_001,)]) for _ in range(2))
    assert torch.equal(first.indices, second.indices)
    assert int(first.count) == int(second.count)


@pytest.mark.parametrize("factor", [-1.0, 0.25, 1024.0])
def test_sign_and_powers_of_two_change_nothing(name: str, distribution: str, factor: float, draw: Draw) -> None:
    vector = draw(distribution, 70_001)
    chosen, scaled = (sparsifiers.get(name).select(v).trimmed() for v in (vector, vector * factor))
    assert torch.equal(chosen, scaled)


def test_no_generator_of_the_process_is_touched(name: str, draw: Draw) -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    sparsifiers.get(name).select(draw("gaussian", 70_001))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_name_density_and_options_make_it_again(name: str) -> None:
    sparsifier = sparsifiers.get(name, 0.125)
    assert sparsifier.name == name
    assert sparsifier.density == 0.125
    again = sparsifiers.get(sparsifier.name, sparsifier.density, **sparsifier.options())
    assert repr(again) == repr(sparsifier)
    assert repr(sparsifier).startswith(f"{name}(density=0.125")
    assert repr(sparsifiers.get(name, 0.25)) != repr(sparsifier)
    assert " at 0x" not in repr(sparsifier)


def test_state_goes_round(name: str, draw: Draw) -> None:
    vector = draw("gaussian", 1000)
    first, second = sparsifiers.get(name), sparsifiers.get(name)
    first.select(vector, key="a")
    second.load_state_dict(first.state_dict())
    pickled = pickle.loads(pickle.dumps(first))
    expected = first.select(vector, key="a", step=1).trimmed()
    assert torch.equal(second.select(vector, key="a", step=1).trimmed(), expected)
    assert torch.equal(pickled.select(vector, key="a", step=1).trimmed(), expected)
    assert first.retain(["b"]) is None
    with pytest.raises(ValueError, match="foreign"):
        sparsifiers.get(name).load_state_dict({"foreign": 1})


def test_repr_of_topk() -> None:
    assert repr(sparsifiers.get("topk")) == "topk(density=0.01)"
    assert repr(sparsifiers.get("globaltopk", 1)) == "topk(density=1.0)"
    assert repr(sparsifiers.get("topk", np.float64(0.01))) == "topk(density=0.01)"
    assert sparsifiers.get("topk").options() == {}
