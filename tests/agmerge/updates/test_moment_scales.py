# SPDX-License-Identifier: Apache-2.0
"""Ratios of energies: which coordinates are sampled, and what averages over workers make of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agmerge.engine.gradient_clipping import clip
from agmerge.updates.moment_scales import KEPT, MomentScales, coordinates_of

SIZES = (1, 2, 31, 32, 33, 63, 64, 65, 97, 768, 4096, 36_864, 65_537, 768 * 3072)


@pytest.mark.parametrize("size", SIZES)
def test_every_coordinate_has_its_turn(size: int) -> None:
    places = coordinates_of(size)
    assert places.count >= min(size, 32) and places.count <= 256
    assert places.count == min(size, max(32, min(256, size // 640)))
    tensor, seen = torch.arange(size), torch.zeros(size, dtype=torch.int64)
    for step in range(places.starts):
        seen[places.sample(tensor, step)] += 1
    assert seen.min() >= 1
    assert places.starts * places.count <= 1.35 * size + 32 * 32  # hardly more steps than it takes at least


def test_no_tensor_has_no_coordinates() -> None:
    assert coordinates_of(0).count == 0


def test_samples_of_a_matrix_lie_in_many_columns() -> None:
    places = coordinates_of(768 * 3072)
    columns = places.sample(torch.arange(768 * 3072), 5) % 3072
    assert len(columns.unique()) > 200


@pytest.mark.parametrize("size", [(100, 70), (3, 4, 8, 8)])
def test_a_layout_changes_no_coordinates(size: tuple[int, ...]) -> None:
    numel = math.prod(size)
    plain, places = torch.arange(numel).view(size), coordinates_of(numel)
    other = plain.transpose(0, 1).contiguous().transpose(0, 1)
    assert not other.is_contiguous()
    inside = torch.zeros(numel + 7, dtype=torch.int64)[7:].copy_(plain.view(-1)).view(size)  # with a storage offset
    for step in range(5):
        assert places.sample(other, step).equal(places.sample(plain, step))
        assert places.sample(inside, step).equal(places.sample(plain, step))


NUMELS = {"whole": 20, "matrix": 50 * 60, "nothing": 0, "big": 400 * 500}


def gradients(generator: torch.Generator, workers: int, signal: float) -> list[dict[str, Tensor]]:
    """Gradients of all workers: what they have in common, times ``signal``, and noise."""
    common = {name: torch.randn(size, generator=generator) for name, size in NUMELS.items()}
    return [
        {name: signal * common[name] + torch.randn(size, generator=generator) for name, size in NUMELS.items()}
        for _ in range(workers)
    ]


def mean_of(scales: MomentScales, given: list[dict[str, Tensor]], step: int, scale: float | None = None) -> Tensor:
    """The average over workers of their measurements."""
    vectors = []
    for each in given:
        out = torch.full((scales.length,), math.nan)
        scales.measure(each, step, out, scale)
        vectors.append(out)
    return torch.stack(vectors).mean(0)


def by_hand(given: list[dict[str, Tensor]], name: str, step: int) -> tuple[float, float]:
    """Energies of the mean and of the workers, of those that have a gradient, at this step's coordinates."""
    places = coordinates_of(NUMELS[name])
    chosen = places.start(step) + places.stride * torch.arange(places.count)
    rows = torch.stack([each[name].flatten()[chosen] for each in given if name in each]).double()
    return float(rows.mean(0).square().sum()), float(rows.square().sum(1).mean())


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_ratios_are_those_of_moving_averages_by_hand(workers: int) -> None:
    generator, scales = torch.Generator().manual_seed(workers), MomentScales(NUMELS)
    averages = {name: [0.0, 0.0] for name in NUMELS}
    assert scales.overall == 1.0 and scales.measured("big") is None
    for step in range(30):
        given = gradients(generator, workers, signal=0.5)
        if step % 3 == 1:
            del given[0]["matrix"]  # unused on one worker
        if step % 5 == 2 and workers > 1:
            given[-1] = {}  # no data, or an overflow
        scales.take(mean_of(scales, given, step), workers)
        for name in ("whole", "matrix", "big"):
            if any(name in each for each in given):
                new = by_hand(given, name, step)
                averages[name] = [KEPT * old + (1 - KEPT) * one for old, one in zip(averages[name], new, strict=True)]
        for name in ("whole", "matrix", "big"):
            of_mean, of_own = averages[name]
            if of_own:
                expected = min(max(of_mean / of_own, 1 / workers), 1.0)
                assert scales.measured(name) == pytest.approx(expected, rel=1e-5), (
                    step,
                    name,
                )  # samples are in float32
    weights = {name: NUMELS[name] / coordinates_of(NUMELS[name]).count for name in ("whole", "matrix", "big")}
    sums = [sum(weights[name] * averages[name][i] for name in weights) for i in (0, 1)]
    assert scales.overall == pytest.approx(min(max(sums[0] / sums[1], 1 / workers), 1.0), rel=1e-5)
    assert scales.measured("nothing") is None


@pytest.mark.parametrize("signal", [0.0, 0.5, 3.0])
def test_ratios_are_those_of_signal_and_noise(signal: float) -> None:
    generator, scales, workers = torch.Generator().manual_seed(3), MomentScales(NUMELS), 4
    for step in range(60):
        scales.take(mean_of(scales, gradients(generator, workers, signal), step), workers)
    expected = (signal**2 + 1 / workers) / (signal**2 + 1)
    assert scales.measured("big") == pytest.approx(expected, rel=0.1)
    assert scales.overall == pytest.approx(expected, rel=0.1)


def test_equal_gradients_have_the_ratio_one_and_opposite_ones_the_least() -> None:
    scales, one = MomentScales(NUMELS), gradients(torch.Generator().manual_seed(0), 1, 0.0)[0]
    scales.take(mean_of(scales, [one, one], 0), 2)
    assert scales.measured("matrix") == pytest.approx(1.0, rel=1e-6)
    opposite = MomentScales(NUMELS)
    opposite.take(mean_of(opposite, [one, {name: -g for name, g in one.items()}], 0), 2)
    assert opposite.measured("matrix") == 0.5 == opposite.overall


def test_a_loss_scale_is_taken_off() -> None:
    given = gradients(torch.Generator().manual_seed(0), 2, 1.0)
    scales = MomentScales(NUMELS)
    scaled = [{name: g * 1024 for name, g in each.items()} for each in given]
    assert mean_of(scales, scaled, 7, scale=1024.0).equal(mean_of(scales, given, 7))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_does_not_count(bad: float) -> None:
    given = gradients(torch.Generator().manual_seed(0), 3, 1.0)
    scales, without = MomentScales(NUMELS), MomentScales(NUMELS)
    overflowed = [given[0], {**given[1], "big": torch.full((NUMELS["big"],), bad)}, given[2]]
    assert mean_of(scales, overflowed, 2).equal(mean_of(without, [given[0], {}, given[2]], 2))
    scales.take(mean_of(scales, overflowed, 2), 3)
    of_mean, of_own = by_hand([given[0], given[2]], "big", 2)
    assert scales.measured("big") == pytest.approx(of_mean / of_own, rel=1e-5)
    before = scales.state()
    scales.take(mean_of(scales, [{}, {}, {}], 3), 3)
    assert scales.state().equal(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_other_dtypes(dtype: torch.dtype) -> None:
    given = [{name: g.to(dtype) for name, g in each.items()} for each in gradients(torch.Generator(), 2, 1.0)]
    scales = MomentScales(NUMELS)
    scales.take(mean_of(scales, given, 0), 2)
    of_mean, of_own = by_hand(given, "big", 0)
    assert scales.measured("big") == pytest.approx(of_mean / of_own, rel=1e-5)


def test_sparse_gradients_do_not_count() -> None:
    given = gradients(torch.Generator().manual_seed(0), 2, 1.0)
    for each in given:
        each["matrix"] = each["matrix"].view(50, 60).to_sparse()
    scales = MomentScales(NUMELS)
    scales.take(mean_of(scales, given, 0), 2)
    assert scales.measured("matrix") is None and scales.measured("big") is not None


def test_another_number_of_workers_begins_anew() -> None:
    generator = torch.Generator().manual_seed(0)
    scales, fresh = MomentScales(NUMELS), MomentScales(NUMELS)
    for step in range(5):
        scales.take(mean_of(scales, gradients(generator, 4, 0.0), step), 4)
    assert scales.measured("big") < 0.4
    last = mean_of(scales, gradients(generator, 2, 0.0), 5)
    scales.take(last, 2)
    fresh.take(last, 2)
    assert scales.state().equal(fresh.state()) and scales.measured("big") == fresh.measured("big") >= 0.5


def test_a_checkpoint_goes_on_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    scales, resumed = MomentScales(NUMELS), MomentScales(NUMELS)
    for step in range(4):
        scales.take(mean_of(scales, gradients(generator, 2, 0.3), step), 2)
    resumed.load(scales.state())
    assert [resumed.measured(name) for name in NUMELS] == [scales.measured(name) for name in NUMELS]
    assert resumed.overall == scales.overall
    mean = mean_of(scales, gradients(generator, 2, 0.3), 4)
    scales.take(mean, 2)
    resumed.take(mean, 2)
    assert resumed.state().equal(scales.state())
    with pytest.raises(ValueError, match="expected 9 numbers"):
        resumed.load(torch.zeros(3))
    empty = MomentScales(NUMELS)
    empty.load(MomentScales(NUMELS).state())
    assert empty.measured("big") is None and empty.overall == 1.0


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 1.9, 50.0])
@pytest.mark.parametrize("ratio", [0.25, 0.6, 1.0])
def test_clipping_is_torchs_of_a_gradient_of_the_means_norm(norm: float, ratio: float) -> None:
    own = torch.zeros(4, requires_grad=True)
    own.grad = torch.tensor([norm, 0.0, 0.0, 0.0])
    of_mean = torch.zeros(4, requires_grad=True)
    of_mean.grad = own.grad * math.sqrt(ratio)
    before = of_mean.grad.clone()
    torch.nn.utils.clip_grad_norm_([of_mean], 1.0)
    length = float(before.norm())
    assert float(clip([own], 1.0, ratio=math.sqrt(ratio))) == pytest.approx(length, rel=1e-5)
    assert (own.grad * math.sqrt(ratio)).allclose(of_mean.grad, rtol=1e-5)


def test_clipping_lets_nan_through() -> None:
    own = torch.nn.Parameter(torch.zeros(4))
    own.grad = torch.full((4,), math.nan)
    assert clip([own], 1.0, ratio=math.sqrt(0.5)).isnan() and own.grad.isnan().all()
