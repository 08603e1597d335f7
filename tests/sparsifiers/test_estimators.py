# SPDX-License-Identifier: Apache-2.0
"""The estimators as formulas: how many of a million elements reach the threshold that they give.

Tolerances were set before the code was written; the counts of the published rules, good or bad, are
those measured with independent prototypes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsifiers import estimated
from sparsifiers.estimated import Sample, corrected, near, normalised, reaching
from sparsifiers.papers import sidco
from sparsifiers.papers.gaussiank import EVALUATIONS, normal_quantile
from sparsifiers.papers.redsync import bisected, trimmed
from sparsifiers.papers.sidco import Law, staged, tail_slope

pytestmark = pytest.mark.usefixtures("one_thread")

N = 1_000_000
SEEDS = range(5)
DENSITIES = (0.1, 0.01, 0.001)
CONTINUOUS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "gaussian": lambda rng: rng.standard_normal(N),
    "laplace": lambda rng: rng.laplace(size=N),
    "dgamma05": lambda rng: rng.gamma(0.5, size=N) * rng.choice([-1.0, 1.0], N),
    "gp025": lambda rng: (rng.random(N) ** -0.25 - 1) / 0.25,
    "student3": lambda rng: rng.standard_t(3, N),
    "student2": lambda rng: rng.standard_t(2, N),
    "lognormal15": lambda rng: np.exp(1.5 * rng.standard_normal(N)),
    "uniform": lambda rng: rng.uniform(-1, 1, N),
}
OTHERS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "zeros95": lambda rng: rng.standard_normal(N) * (rng.random(N) < 0.05),
    "rowhet": lambda rng: rng.standard_normal(N) * np.repeat(np.exp(rng.standard_normal(N // 1000)), 1000),
}


@functools.cache
def whole(name: str, seed: int) -> Tensor:
    """All magnitudes as an estimator sees them: float32, ascending, in units of a power of two."""
    make = {**CONTINUOUS, **OTHERS}[name]
    return normalised(torch.from_numpy(make(np.random.default_rng(seed))).float(), 0.5).x


def ratio(x: Tensor, eta: Tensor, wanted: Tensor) -> float:
    return float(reaching(x, eta) / wanted)


def tries(names: list[str], densities: tuple[float, ...]) -> list[tuple[str, float, Tensor, Tensor]]:
    return [
        (name, density, whole(name, seed), torch.tensor(density * N))
        for name in names
        for density in densities
        for seed in SEEDS
    ]


def gaussiank(x: Tensor, wanted: Tensor) -> Tensor:
    return corrected(x, wanted, *normal_quantile(x, wanted), EVALUATIONS)


def selected_by_sidco(x: Tensor, wanted: Tensor, stages: int, law: Law) -> Tensor:
    eta = staged(x, wanted, stages, law)
    return corrected(x, wanted, eta, tail_slope(x, eta), 3)


def test_gaussiank_on_gaussians() -> None:
    for _, density, x, wanted in tries(["gaussian"], DENSITIES):
        assert 0.95 <= ratio(x, normal_quantile(x, wanted)[0], wanted) <= 1.10, density
        assert 0.95 <= ratio(x, gaussiank(x, wanted), wanted) <= 1.10, density


@pytest.mark.slow
def test_gaussiank_corrected_on_every_tail() -> None:
    names = [*CONTINUOUS, *OTHERS]
    names.remove("uniform")  # its tail ends: counts fall from thousands to 0 within a thousandth of eta
    for name, density, x, wanted in tries(names, DENSITIES):
        if (name, density) != ("zeros95", 0.1):  # half as many non-zeros as wanted
            assert 0.85 <= ratio(x, gaussiank(x, wanted), wanted) <= 1.15, (name, density)


def test_redsync_on_every_continuous_input() -> None:
    for name, density, x, wanted in tries([*CONTINUOUS, "rowhet"], DENSITIES):
        assert 1.0 <= ratio(x, bisected(x, wanted), wanted) <= 2.0, (name, density)


def test_redsync_trim_reaches_enough_wherever_the_mean_does() -> None:
    for name, density, x, wanted in tries([*CONTINUOUS], (0.1, 0.01)):
        coarse, fine = (ratio(x, trimmed(x, wanted, step), wanted) for step in (0.2, 0.01))
        assert 1.0 <= fine <= coarse, (name, density)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_sidco_e_on_laplacians(stages: int) -> None:
    for _, density, x, wanted in tries(["laplace"], DENSITIES):
        assert 0.90 <= ratio(x, staged(x, wanted, stages, "e"), wanted) <= 1.10, density


def test_sidco_gp_in_two_stages() -> None:
    for name, density, x, wanted in tries([*CONTINUOUS], (0.1, 0.01)):
        assert 0.75 <= ratio(x, staged(x, wanted, 2, "gp"), wanted) <= 1.30, (name, density)
    for name, density, x, wanted in tries([*CONTINUOUS], DENSITIES):
        assert 0.80 <= ratio(x, selected_by_sidco(x, wanted, 2, "gp"), wanted) <= 1.20, (name, density)


def test_sidco_ignores_zeros() -> None:
    for _, density, x, wanted in tries(["zeros95"], (0.01, 0.001)):
        assert 0.85 <= ratio(x, staged(x, wanted, 2, "gp"), wanted) <= 1.15, density


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [("gaussiank", name, count) for name, count in {"laplace": 2.63, "dgamma05": 3.5, "student3": 2.09}.items()]
    + [("e1", name, count) for name, count in {"gaussian": 0.02, "dgamma05": 3.19, "lognormal15": 3.85}.items()]
    + [("e2", name, count) for name, count in {"gaussian": 0.63, "laplace": 1.0, "student3": 1.17}.items()]
    + [("gp1", name, count) for name, count in {"gaussian": 1.62, "lognormal15": 1.50, "student3": 0.80}.items()]
    + [("gp4", name, count) for name, count in {"gaussian": 0.94, "lognormal15": 0.71, "uniform": 1.0}.items()]
    + [("gamma1", name, count) for name, count in {"gaussian": 0.16, "dgamma05": 0.98, "student2": 1.93}.items()],
)
def test_the_published_starts_are_reproduced(rule: str, name: str, expected: float) -> None:
    x, wanted = whole(name, 0), torch.tensor(0.01 * N)
    if rule == "gaussiank":
        eta = normal_quantile(x, wanted)[0]
    else:
        law: Law = "gamma" if rule[:-1] == "gamma" else "gp" if rule[:-1] == "gp" else "e"
        eta = staged(x, wanted, int(rule[-1]), law)
    assert ratio(x, eta, wanted) == pytest.approx(expected, rel=0.05, abs=0.01)


def test_one_stage_is_the_closed_form() -> None:
    x, wanted = whole("laplace", 0), torch.tensor(2000.0)
    mean, variance = float(x.mean()), float(x.double().var())
    delta = 2000 / N
    q = mean**2 / variance
    alpha, beta = (1 - q) / 2, mean * (1 + q) / 2
    assert float(staged(x, wanted, 1, "e")) == pytest.approx(-mean * math.log(delta), rel=1e-4)
    pareto = beta / alpha * (delta**-alpha - 1)
    assert float(staged(x, wanted, 1, "gp")) == pytest.approx(pareto, rel=1e-3)


@pytest.mark.parametrize("law", ["e", "gp", "gamma"])
@pytest.mark.parametrize("stages", [1, 3])
def test_thresholds_scale_with_the_data_and_fall_with_what_is_wanted(law: Law, stages: int) -> None:
    x = whole("student3", 0)
    etas = [float(staged(x, torch.tensor(wanted), stages, law)) for wanted in (1e3, 1e4, 1e5, 2e5)]
    assert etas == sorted(etas, reverse=True)
    assert float(staged(x * 3, torch.tensor(1e4), stages, law)) == pytest.approx(3 * etas[1], rel=1e-3)
    assert float(staged(x * 0.25, torch.tensor(1e4), stages, law)) == etas[1] * 0.25


def test_a_stage_needs_exceedances() -> None:
    x = normalised(torch.from_numpy(np.random.default_rng(0).laplace(size=100)), 0.5).x
    first = sidco.exponential(x.mean(), torch.tensor(0.25))
    assert int(reaching(x, first)) < 32
    assert float(staged(x, torch.tensor(1.0), 3, "e")) == float(first)


def test_the_shape_of_a_pareto_stays_where_its_moments_are_finite() -> None:
    mean, delta = torch.tensor(2.0), torch.tensor(0.01)
    least, most = sidco.SHAPES
    for variance, shape in ((0.0, least), (-1e-9, least), (1e9, most)):
        eta = sidco.pareto(mean, torch.tensor(variance), delta)
        beta = 2.0 * (1 - shape)
        assert float(eta) == pytest.approx(beta / shape * (0.01**-shape - 1), rel=1e-4)
    flat = sidco.pareto(mean, mean.square(), delta)
    assert float(flat) == pytest.approx(float(sidco.exponential(mean, delta)), rel=1e-5)


def test_the_quantile_of_a_gamma_is_inverted() -> None:
    for shape in (0.05, 0.3, 1.0, 3.0, 100.0, 900.0):
        for part in (1e-7, 1e-3, 0.1, 0.25, 0.6):
            alpha, delta = torch.tensor(shape, dtype=torch.float64), torch.tensor(part, dtype=torch.float64)
            quantile = sidco.gamma_quantile(alpha, delta)
            assert float(torch.special.gammaincc(alpha, quantile)) == pytest.approx(part, rel=2e-3), (shape, part)
    one = torch.ones((), dtype=torch.float64)
    assert float(sidco.gamma_quantile(one, one * 0.01)) == pytest.approx(-math.log(0.01), rel=1e-5)


def test_a_correction_only_moves_what_is_off_and_brackets() -> None:
    x, wanted = whole("laplace", 1), torch.tensor(10_000.0)
    right = x[-10_000].clone()
    slope = torch.tensor(-4.0)
    kept = corrected(x, wanted, right * 1.01, slope, 6)
    assert float(kept) == pytest.approx(float(right * 1.01), rel=1e-6)
    for factor in (0.2, 0.7, 1.4, 2.0, 1e6):
        assert near(reaching(x, corrected(x, wanted, right * factor, slope, 8)), wanted), factor
    for misleading in (-1e9, -1e-9, math.nan):  # slopes
        moved = corrected(x, wanted, right * 0.7, torch.tensor(misleading), 8)
        assert abs(math.log(ratio(x, moved, wanted))) < 0.35, misleading


@pytest.mark.parametrize("slope", [-0.3, -4.0, -50.0])
def test_a_correction_never_leaves_the_bracket(slope: float, monkeypatch: pytest.MonkeyPatch) -> None:
    far_and_near = torch.cat((torch.linspace(0.99, 1.0, 9900), torch.linspace(1e4, 1.01e4, 100)))
    for x, wanted in ((far_and_near, 1000.0), (whole("uniform", 0), 1000.0), (whole("student2", 0), 50.0)):
        spy = Mock(wraps=estimated.off)
        monkeypatch.setattr(estimated, "off", spy)
        corrected(x, torch.tensor(wanted), x[len(x) // 2].clone(), torch.tensor(slope), 12)
        low, high = 0.0, math.inf
        for eta in (float(call.args[2]) for call in spy.call_args_list):
            assert low <= eta <= high
            low, high = (max(low, eta), high) if (x >= eta).sum() > wanted else (low, min(high, eta))


@pytest.mark.parametrize(
    "values",
    [[0.0] * 50, [1.0] * 50, [0.0] * 49 + [2.0], [1e-45] * 50, [3e38] * 50, [math.nan] * 50, [math.inf, 1.0], [5.0]],
    ids=["zero", "constant", "one", "subnormal", "huge", "nan", "inf", "n=1"],
)
def test_degenerate_samples_raise_nothing(values: list[float]) -> None:
    sample: Sample = normalised(torch.tensor(values), 0.1)
    assert sample.x.isfinite().all()
    assert float(sample.wanted) > 0
    for stages in (1, 2, 5):
        for law in ("e", "gp", "gamma"):
            selected_by_sidco(sample.x, sample.wanted, stages, law)
    for estimate in (gaussiank, bisected, functools.partial(trimmed, decrement=0.2)):
        assert estimate(sample.x, sample.wanted).shape == ()
