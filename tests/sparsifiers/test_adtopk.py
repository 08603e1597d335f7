# SPDX-License-Identifier: Apache-2.0
"""adtopk serves every row and the largest of all in turn; adtopk-fill does both at once."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import Sparsifier
from sparsifiers.papers import adtopk
from sparsifiers.rows_search import largest_in_rows_on_device

SHAPES = [(64, 3, 3, 3), (16,), (200, 30), (24,), (10, 40), (10,)]
N = sum(math.prod(shape) for shape in SHAPES)


def gaussian(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def chosen(sparsifier: Sparsifier | str, vector: Tensor, **request: Any) -> list[int]:
    made = sparsifiers.get(sparsifier) if isinstance(sparsifier, str) else sparsifier
    return made.select(vector, **request).trimmed().tolist()


@pytest.mark.parametrize(
    ("alias", "name"), [("adtopk-i", "adtopk"), ("allchanneltopk", "adtopk-row"), ("adtopk-f", "adtopk-fill")]
)
def test_aliases(alias: str, name: str) -> None:
    assert repr(sparsifiers.get(alias, 0.125)) == repr(sparsifiers.get(name, 0.125))


def test_names_and_options() -> None:
    assert repr(sparsifiers.get("adtopk")) == "adtopk(density=0.01, reuse=True)"
    assert repr(sparsifiers.get("adtopk", reuse=False)) == "adtopk(density=0.01, reuse=False)"
    assert repr(sparsifiers.get("adtopk-row")) == "adtopk-row(density=0.01)"
    assert repr(sparsifiers.get("adtopk-fill")) == "adtopk-fill(density=0.01)"
    with pytest.raises(TypeError, match="adtopk: reuse must be True or False, got 1"):
        sparsifiers.get("adtopk", reuse=1)


@pytest.mark.parametrize("name", ["adtopk-row", "adtopk-fill"])
@pytest.mark.parametrize("k", [1, 10, 200, 3000, N])
def test_exactly_k_are_sent(name: str, k: int) -> None:
    for vector in (gaussian(0), torch.zeros(N), torch.ones(N)):
        for step in range(5):
            selection = sparsifiers.get(name).select(vector, k=k, step=step, shapes=SHAPES)
            assert selection.count == k == len(selection.indices)
            assert (selection.indices[1:] > selection.indices[:-1]).all()


@pytest.mark.parametrize("name", ["adtopk", "adtopk-row", "adtopk-fill"])
def test_without_shapes_it_is_topk(name: str) -> None:
    for shapes in (None, [(N,)], [(N - 10,), (10,)] if name == "adtopk-fill" else [(1, N)]):
        for step in range(2):
            expected = chosen("topk", gaussian(step), k=90)
            assert chosen(name, gaussian(step), k=90, step=step, shapes=shapes) == expected


def test_by_hand() -> None:
    vector = torch.tensor([[9.0, -8.0, 1.0], [0.5, 0.25, -4.0], [7.0, 6.0, -5.0]])
    request = {"vector": vector.view(-1), "shapes": [(3, 3)]}
    assert chosen("adtopk-row", k=3, **request) == [0, 5, 6]
    assert chosen("adtopk-row", k=4, **request) == [0, 1, 5, 6]  # the row that sends one more ...
    assert chosen("adtopk-row", k=4, step=1, **request) == [0, 3, 5, 6]  # ... is another one at every step
    assert chosen("adtopk-row", k=4, step=2, **request) == [0, 5, 6, 7]
    assert chosen("adtopk-fill", k=5, **request) == [0, 1, 5, 6, 7]
    assert [chosen("adtopk-fill", k=2, step=step, **request) for step in range(3)] == [[0, 5], [0, 6], [5, 6]]
    tall = {"vector": vector[:2].t().reshape(-1), "shapes": [(3, 2)]}  # its rows are its two columns
    assert chosen("adtopk-row", k=2, **tall) == [0, 5]


def test_every_row_sends_at_every_row_step() -> None:
    vector = gaussian(0, 40 * 50) * gaussian(1, 40).mul(3).exp().repeat_interleave(50)
    for k in (40, 55, 100):
        for name, step in (("adtopk", 6), ("adtopk-row", 3), ("adtopk-fill", 3)):
            rows = np.array(chosen(name, vector, k=k, step=step, shapes=[(40, 50)])) // 50
            counts = np.bincount(rows, minlength=40)
            assert counts.min() >= k // 40 if name != "adtopk-fill" else counts.min() >= 1
    assert len({place // 25 for place in chosen("topk", vector, k=100)}) < 20


@pytest.mark.parametrize("step", range(4))
def test_a_density_that_serves_every_row_of_every_matrix(step: int) -> None:
    """As docs/compressor_reference.md says: 1 / shortest row with `adtopk-row`, rows / elements with `adtopk-fill`."""
    matrices = [(27, 64), (30, 200), (10, 40)]  # rows and length of those of SHAPES that are none of one dimension
    rows = sum(count for count, _ in matrices)
    vector = gaussian(0) * gaussian(1).mul(3).exp()
    for name, k in (("adtopk-row", math.ceil(N / 40)), ("adtopk-fill", rows)):
        places = np.array(chosen(name, vector, k=k, step=step, shapes=SHAPES))
        assert len(places) == k
        offset, served = 0, 0
        for shape in SHAPES:
            size, columns = math.prod(shape), math.prod(shape[1:])
            own = places[(places >= offset) & (places < offset + size)] - offset
            if len(shape) > 1:
                served += len(set(own % columns if shape[0] > columns else own // columns))
            offset += size
        assert served == rows, name


@pytest.mark.parametrize("name", ["adtopk", "adtopk-row", "adtopk-fill"])
def test_rows_too_many_for_k_are_served_in_turn(name: str) -> None:
    vector = torch.ones(100, 120)
    vector[0] = 1000.0
    request = {"vector": vector.view(-1), "shapes": [vector.shape]}
    period = 2 if name == "adtopk" else 1
    for k, turns in ((1, 100), (7, 15), (30, 4)):
        rows: set[int] = set()
        for turn in range(turns):
            rows |= {place // 120 for place in chosen(name, k=k, step=turn * period, **request)}
        assert rows == set(range(100))


def test_two_rows_with_one_element_to_send() -> None:
    served = {chosen("adtopk", torch.ones(8), k=1, step=step, shapes=[(2, 4)])[0] // 4 for step in (0, 2, 4)}
    assert served == {0, 1}


def test_step_alone_decides_the_phase() -> None:
    sparsifier = sparsifiers.get("adtopk")
    rows = [chosen("adtopk-row", gaussian(0), k=60, step=turn, shapes=SHAPES) for turn in range(4)]
    largest = chosen("topk", gaussian(0), k=60)
    for step in (0, 4, 3, 1, 6, 6, 5, 2, 7):
        found = chosen(sparsifier, gaussian(0), k=60, key="a", step=step, shapes=SHAPES)
        assert found == (largest if step % 2 else rows[step // 2])


def test_filling_up_keeps_nearly_the_energy_of_topk() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(768, 1024, generator=generator) * torch.randn(768, 1, generator=generator).exp()
    vector = matrix.view(-1)
    energy = {}
    for name in ("topk", "adtopk-row", "adtopk-fill"):
        places = torch.tensor(chosen(name, vector, shapes=[(768, 1024)]))
        energy[name] = float(vector[places].square().sum())
    assert energy["adtopk-row"] < 0.5 * energy["topk"]
    assert energy["adtopk-fill"] > 0.9 * energy["topk"]


def test_the_threshold_is_reused_per_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float | None] = []
    reuse = adtopk.estimated.reuse_threshold
    monkeypatch.setattr(adtopk.estimated, "reuse_threshold", lambda v, k, t: asked.append(t) or reuse(v, k, t))
    sparsifier = sparsifiers.get("adtopk")
    for key, step, n in (("a", 1, N), ("b", 1, N), ("a", 2, N), ("a", 3, N), ("a", 5, N - 9), ("b", 3, N), ("a", 5, N)):
        sparsifier.select(gaussian(0)[:n], k=60, key=key, step=step)
    warm = float(gaussian(0).abs().topk(60).values[-1])
    assert asked == [None, None, warm, None, warm, None]
    asked.clear()
    exact = sparsifiers.get("adtopk", reuse=False)
    for step in (1, 3):
        exact.select(gaussian(0), k=60, step=step)
    assert asked == [None, None]
    assert exact.state_dict() == {"adtopk": {}}


def test_slots_beyond_the_count_are_in_range() -> None:
    sparsifier = sparsifiers.get("adtopk")
    sparsifier.select(gaussian(0), k=100, step=1)
    vector = gaussian(0)
    largest = vector.abs().topk(10).indices
    vector[largest] = 0.0
    selection = sparsifier.select(vector, k=100, step=3)
    assert selection.count == 90
    assert selection.indices.shape == (100,) == (sparsifier.capacity(N, k=100, step=3),)
    assert selection.indices.min() >= 0


@pytest.mark.parametrize("restore", ["state_dict", "pickle"])
def test_a_run_continues_to_the_bit(restore: str) -> None:
    def run(sparsifier: Sparsifier, residual: Tensor, steps: range) -> list[list[int]]:
        found = []
        for step in steps:
            residual += gaussian(step)
            found.append(chosen(sparsifier, residual, k=300, key="a", step=step, shapes=SHAPES))
            residual[found[-1]] = 0.0
        return found

    straight = run(sparsifiers.get("adtopk"), torch.zeros(N), range(60))
    first, residual = sparsifiers.get("adtopk"), torch.zeros(N)
    before = run(first, residual, range(31))
    if restore == "pickle":
        second = pickle.loads(pickle.dumps(first))
    else:
        second = sparsifiers.get("adtopk")
        second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert before + run(second, residual, range(31, 60)) == straight
    assert min(map(len, straight)) < 300  # a threshold was reused


def test_retain() -> None:
    sparsifier = sparsifiers.get("adtopk")
    for key in "abc":
        sparsifier.select(gaussian(0), k=60, key=key, step=1)
    sparsifier.retain(["c", "b", "d"])
    assert set(sparsifier.state_dict()["adtopk"]) == {"b", "c"}  # type: ignore[arg-type]


@pytest.mark.parametrize("drift", [0.0, 0.5], ids=["stationary", "drifting"])
def test_under_error_feedback(drift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    afresh: list[bool] = []
    reuse = adtopk.estimated.reuse_threshold

    def watched(vector: Tensor, k: int, threshold: float | None) -> Any:
        found = reuse(vector, k, threshold)
        afresh.append(found.exact)
        return found

    monkeypatch.setattr(adtopk.estimated, "reuse_threshold", watched)
    n, k = 32_000, 640
    sparsifier, residual = sparsifiers.get("adtopk"), torch.zeros(n)
    for step in range(300):
        residual += gaussian(step, n) * math.exp(drift * math.sin(2 * math.pi * step / 400))
        places = chosen(sparsifier, residual, k=k, step=step, shapes=[(80, 400)])
        assert 0.8 * k <= len(places) <= k
        assert step % 2 or len(places) == k
        residual[places] = 0.0
    assert len(afresh) == 150
    assert 1 <= sum(afresh) <= (20 if drift == 0.0 else 75)


@pytest.mark.parametrize("name", ["adtopk", "adtopk-row", "adtopk-fill"])
def test_a_device_selects_without_reading_a_value(name: str) -> None:
    vector = torch.empty(N, device="meta")
    for step in range(3):
        for k in (5, 900):
            for shapes in (SHAPES, None):
                selection = sparsifiers.get(name).select(vector, k=k, step=step, shapes=shapes)
                assert selection.indices.shape == (k,)
                assert selection.indices.dtype == torch.int32
                assert selection.indices.device.type == "meta"
                assert selection.count == k


def test_both_paths_select_the_same() -> None:
    expected = chosen("adtopk-row", gaussian(0), k=77, step=9, shapes=SHAPES)
    assert largest_in_rows_on_device(gaussian(0), 77, 9, SHAPES).tolist() == expected


def test_the_cpu_takes_the_path_without_large_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in ("select_rows_on_device", "maxima_and_largest_on_device", "select_largest_on_device"):
        monkeypatch.setattr(adtopk, function, None)
    selections: list[Callable[[], list[int]]] = [
        lambda name=name, step=step: chosen(name, gaussian(0), step=step, shapes=SHAPES)
        for name in ("adtopk", "adtopk-row", "adtopk-fill")
        for step in range(2)
    ]
    for select in selections:
        assert len(select()) == sparsifiers.budget(0.01, N)
