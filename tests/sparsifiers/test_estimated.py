# SPDX-License-Identifier: Apache-2.0
"""The threshold methods on vectors: between 0.8 k and k of the largest, in one pass where the fit is good."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocation import QUARTER, numpy_peak, torch_largest
from support.allocation import N as LONG
from torch import Tensor

import sparsifiers
from sparsifiers import estimated, largest
from sparsifiers.base import Request
from sparsifiers.estimated import Estimated, key_floor, normalised, stride_for, strided
from sparsifiers.largest import bit_view, magnitude_mask
from sparsifiers.papers import sidco
from sparsifiers.papers.sidco import PERIOD, SIDCo

pytestmark = pytest.mark.usefixtures("one_thread")

Draw = Callable[..., Tensor]
Ranked = Callable[[Tensor], np.ndarray]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FITTED = ["gaussiank", "redsync", "redsync-trim", "sidco-e", "sidco-gp", "sidco-gamma"]
NAMES = ["threshold", "dgc", *FITTED]
EXACTLY_K = {"dgc", "redsync-trim"}


def request(vector: Tensor, k: int, key: str = "", step: int = 0) -> Request:
    return Request(k, key, step, ((vector.numel(),),))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_enough_of_them(
    name: str, dtype: torch.dtype, distribution: str, draw: Draw, ranked: Ranked
) -> None:
    vector = draw(distribution, 80_000, dtype)
    order = ranked(vector)
    nonzero = int(vector.count_nonzero())
    for k in (1, 80, 800, 60_000):
        sparsifier = sparsifiers.get(name)
        for step in range(2):
            chosen = sparsifier.select(vector, k=k, step=step).trimmed().numpy()
            assert len(chosen) <= k
            assert len(chosen) >= (k if name in EXACTLY_K else 0.8 * k if nonzero >= k else min(nonzero, 0.8 * k))
            assert np.array_equal(chosen, np.sort(order[: len(chosen)])), (k, step)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_are_always_sent(name: str, dtype: torch.dtype, ranked: Ranked) -> None:
    generator = torch.Generator().manual_seed(7)
    vector = torch.randn(200_000, generator=generator).to(dtype)
    vector[torch.randint(200_000, (300,), generator=generator)] = float("nan")
    vector[torch.randint(200_000, (300,), generator=generator)] = float("-inf")
    special = np.flatnonzero(~np.isfinite(vector.double().numpy()))
    order = ranked(vector)
    for k in (100, 700, 2000):
        sparsifier = sparsifiers.get(name)
        for step in range(2):
            chosen = sparsifier.select(vector, k=k, step=step).trimmed().numpy()
            assert 0.8 * k <= len(chosen) <= k
            assert np.array_equal(chosen, np.sort(order[: len(chosen)]))
            if k >= len(special) / 0.8:
                assert np.isin(special, chosen).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 3, 70_000, 300_000])
def test_degenerate_vectors_end_soon(name: str, n: int) -> None:
    fills = [0.0, -0.75, 1e-45, 3e38, float("nan"), float("inf")]
    vectors = [torch.full((n,), fill) for fill in fills] + [torch.eye(1, n)[0], 1 - torch.eye(1, n)[0] * 1e30]
    for vector in vectors:
        for k in sorted({1, -(-n // 100), n}):
            sparsifier = sparsifiers.get(name)
            start = time.process_time()
            count = int(sparsifier.select(vector, k=k).count)
            assert time.process_time() - start < 1.0
            assert count >= 0.8 * k or int(vector.count_nonzero()) < k


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FITTED if name != "redsync-trim"])  # steps of 0.2 seldom fit
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_good_fit_costs_one_pass(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, draw: Draw) -> None:
    vectors = [draw(distribution, 1_000_000, dtype) for distribution in ("gaussian", "student2", "block-scaled")]
    scans, fallbacks = Mock(wraps=largest.scan), Mock(wraps=largest.largest_magnitudes)
    monkeypatch.setattr(estimated, "scan", scans)
    monkeypatch.setattr(estimated, "largest_magnitudes", fallbacks)
    tried = 0
    for step in range(3):
        for vector in vectors:
            for k in (10_000, 100_000):
                sparsifiers.get(name).select(vector, k=k, step=step)
                tried += 1
    assert scans.call_count >= tried - 1
    assert scans.call_count + fallbacks.call_count <= tried + 1


def test_a_bad_fit_is_not_even_scanned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    scans = Mock(wraps=largest.scan)
    monkeypatch.setattr(estimated, "scan", scans)
    vector = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    assert sparsifiers.get("gaussiank").select(vector).count == 10_000  # 6 k reach it: the tail ends
    assert not scans.called


@pytest.mark.parametrize(
    "threshold", [0.0, 1e-30, 1e30, float("inf"), float("nan"), -1.0], ids=lambda threshold: f"{threshold:g}"
)
@pytest.mark.parametrize("claimed", [0.0, 1.0])
def test_no_estimate_breaks_the_contract(
    threshold: float, claimed: float, monkeypatch: pytest.MonkeyPatch, draw: Draw, ranked: Ranked
) -> None:
    class Wrong(Estimated):
        name = "wrong"

        def _estimate(self, sample: Any, request: Request) -> Tensor:
            return torch.full((), threshold)

    if claimed:  # the sample says that all is well
        monkeypatch.setattr(Wrong, "_borne_out", lambda *_: True)
    for distribution in ("gaussian", "zeros999", "ternary"):
        vector = draw(distribution, 100_000)
        order = ranked(vector)
        chosen = Wrong().select(vector).trimmed().numpy()
        assert len(chosen) == 1000 or threshold <= 0.0 or distribution == "zeros999"
        assert np.array_equal(chosen, np.sort(order[: len(chosen)]))
        assert len(chosen) >= 0.8 * min(1000, int(vector.count_nonzero()))
        on_device = Wrong()._select_on_device(vector, request(vector, 1000)).trimmed()
        assert np.abs(vector.numpy())[on_device].sum() >= 0.999 * np.abs(vector.numpy())[order[:1000]].sum()


@settings(deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    values=st.lists(st.floats(allow_nan=True, width=64), min_size=1, max_size=20),
    tau=st.floats(min_value=0.0, allow_nan=False),
    own=st.booleans(),
)
def test_exactly_what_reaches_tau_exceeds_the_floor(
    dtype: torch.dtype, values: list[float], tau: float, own: bool
) -> None:
    vector = torch.tensor(values, dtype=torch.float64).to(dtype)
    if own and not vector[0].isnan():
        tau = float(vector[0].abs())
    keys = bit_view(vector) & magnitude_mask(dtype)
    offered = keys > key_floor(torch.tensor(tau, dtype=torch.float64), dtype)
    magnitudes = vector.double().abs()
    expected = (magnitudes >= tau) & (magnitudes > 0) | magnitudes.isnan()
    assert torch.equal(offered, expected)


def test_the_sample_depends_on_key_and_step_alone() -> None:
    vector = torch.arange(1_000_000.0)
    samples = {
        (key, step): strided(vector, 10_000, request(vector, 1, key, step)) for key in "ab" for step in range(20)
    }
    again = strided(vector, 10_000, request(vector, 999, "b", 7))
    assert torch.equal(again, samples["b", 7])
    assert len({float(sample[0]) for sample in samples.values()}) > 20
    assert all(10_000 <= len(sample) <= 10_400 for sample in samples.values())
    assert again.data_ptr() - vector.data_ptr() == 4 * int(again[0])  # a view
    assert strided(vector, 2_000_000, request(vector, 1)) is vector


def test_strides_are_prime_and_never_too_long() -> None:
    assert [stride_for(n, 100) for n in (1, 99, 199, 200, 300, 400, 900, 10_000)] == [1, 1, 1, 2, 3, 3, 7, 97]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_are_in_units_of_a_power_of_two(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -3.0, 12.5, float("nan"), float("-inf"), 0.75], dtype=dtype)
    sample = normalised(values, 0.5)
    assert sample.x.tolist() == [0.0, 0.0, 0.0, 0.75 / 8, 3 / 8, 12.5 / 8]
    assert (float(sample.unit), float(sample.wanted)) == (8.0, 1.0)
    tiny = normalised(torch.tensor([torch.finfo(dtype).tiny / 4], dtype=dtype), 1.0)
    assert tiny.x.tolist() == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gaussian", "zeros999", "constant"])
def test_nothing_of_the_vectors_size_is_allocated(shape: str, draw: Draw) -> None:
    vector = draw(shape, LONG)
    for name in NAMES:
        for density in (0.01, 0.001):
            sparsifier = sparsifiers.get(name, density)
            for run in (numpy_peak, torch_largest):
                assert run(lambda: sparsifier.select(vector)) < QUARTER, (name, density, run)  # noqa: B023


@pytest.mark.parametrize("name", NAMES)
def test_continuing_from_a_saved_state_changes_no_bit(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    steps = [
        {key: torch.randn(n, generator=generator) ** 3 for key, n in (("a", 90_000), ("b", 700))} for _ in range(14)
    ]

    def run(sparsifier: sparsifiers.Sparsifier, start: int) -> list[Tensor]:
        return [
            sparsifier.select(vector, key=key, step=step).trimmed()
            for step in range(start, len(steps))
            for key, vector in steps[step].items()
        ]

    whole, resumed = sparsifiers.get(name), sparsifiers.get(name)
    for step in range(7):
        for key, vector in steps[step].items():
            whole.select(vector, key=key, step=step)
    saved = whole.state_dict()
    frozen = copy.deepcopy(saved)
    resumed.load_state_dict(pickle.loads(pickle.dumps(saved)))
    assert all(torch.equal(a, b) for a, b in zip(run(whole, 7), run(resumed, 7), strict=True))
    assert saved == frozen  # a snapshot
    assert whole.state_dict() == resumed.state_dict()


@pytest.mark.parametrize("name", ["threshold", "sidco-gp"])
def test_state_belongs_to_an_instance_a_key_and_a_length(name: str, draw: Draw) -> None:
    sparsifier, other = sparsifiers.get(name), sparsifiers.get(name)
    vector = draw("student2", 70_001)
    for key in ("a", "b"):
        sparsifier.select(vector, key=key)
    kept = sparsifier.state_dict()[name]
    assert isinstance(kept, dict)
    assert set(kept) == {"a", "b"}
    assert kept["a"][0] == 70_001
    assert other.state_dict() == {name: {}}
    cold = other.select(vector[:50_000], key="a").trimmed()
    assert torch.equal(sparsifier.select(vector[:50_000], key="a").trimmed(), cold)
    sparsifier.retain(["b", "never seen"])
    assert set(sparsifier.state_dict()[name]) == {"b"}  # type: ignore[call-overload]
    sparsifier.load_state_dict({})
    assert sparsifier.state_dict() == {name: {}}
    with pytest.raises(ValueError, match=rf"{name}.*expected the state .*sidco-e"):
        sparsifier.load_state_dict({"sidco-e": {}})


@pytest.mark.parametrize("name", ["sidco-e", "sidco-gp", "sidco-gamma"])
def test_stages_are_tried_every_fifth_call(name: str, monkeypatch: pytest.MonkeyPatch, draw: Draw) -> None:
    vector = draw("student2", 100_000)
    spy = Mock(wraps=sidco.staged)
    monkeypatch.setattr(sidco, "staged", spy)
    sparsifier = sparsifiers.get(name, 0.001)
    assert isinstance(sparsifier, SIDCo)
    for step in range(2 * PERIOD):
        sparsifier.select(vector, key="w", step=step)
    calls = [call.args[2] for call in spy.call_args_list]
    trial, chosen = [1, 2, 3, 4, 5], calls[5]
    assert calls[: 5 + PERIOD - 1] == trial + [chosen] * (PERIOD - 1)
    assert calls[5 + PERIOD - 1 :][:5] == trial
    assert sparsifier.state_dict() == {name: {"w": (100_000, calls[-1], PERIOD)}}


def test_stages_do_not_stick_where_one_selects_too_many(draw: Draw) -> None:
    vector = torch.from_numpy(np.exp(1.5 * np.random.default_rng(0).standard_normal(1_000_000))).float()
    sparsifier = sparsifiers.get("sidco-e", 0.001)
    count = int(sparsifier.select(vector, key="w").count)
    assert sparsifier.state_dict()["sidco-e"]["w"][1] > 1  # type: ignore[index]  # one stage: 21 k
    assert count >= 800


@pytest.mark.parametrize(
    ("alias", "name"),
    [("gaussian", "gaussiank"), ("redsynctrim", "redsync-trim"), ("sidco", "sidco-e"), ("sidcoexp", "sidco-e")]
    + [("sidcogp", "sidco-gp"), ("sidcogam", "sidco-gamma")],
)
def test_names_of_the_references(alias: str, name: str) -> None:
    assert repr(sparsifiers.get(alias, 0.5)) == repr(sparsifiers.get(name, 0.5))
    assert {alias, name} & set(sparsifiers.names()) == {name}


def test_the_decrement_of_redsync_trim() -> None:
    assert repr(sparsifiers.get("redsync-trim", 0.5)) == "redsync-trim(density=0.5, decrement=0.2)"
    for wrong in (0.0, 1.0, float("nan"), -0.2):
        with pytest.raises(ValueError, match=r"redsync-trim: decrement must be .*The paper uses 0.2"):
            sparsifiers.get("redsync-trim", decrement=wrong)
    with pytest.raises(TypeError, match="redsync-trim: decrement must be a number, got '0.2'"):
        sparsifiers.get("redsync-trim", decrement="0.2")
