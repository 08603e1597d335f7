# SPDX-License-Identifier: Apache-2.0
"""Factors in 16 bits, parameters of any dtype and strides, and the memory that keeps nothing."""

from __future__ import annotations

import pytest
import torch
from support.low_rank_steps import (
    MATRICES,
    NAMES,
    RIGHT,
    SHAPES,
    Step,
    accumulated,
    distance,
    drawn,
    matrix,
    mean,
    overlap,
    steps_of,
)
from torch import Tensor

both = pytest.mark.parametrize("name", NAMES)
WIRES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
STEPS = 6


def single(rank: int, step: int) -> dict[str, Tensor]:
    return drawn(rank, step, torch.float32)


def lost(seen: list[list[Step]], step: int, tensor: str) -> float:
    """What is in neither the update nor a residual, relative to what there was."""
    before = mean([accumulated(of_rank, step, tensor) for of_rank in seen])
    after = mean([of_rank[step].residuals[tensor] for of_rank in seen])
    return distance(seen[0][step].update(tensor) + after, before)


# -- wires ------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("wire", WIRES)
def test_the_rounding_of_a_factor_stays_with_its_rank(name: str, wire: str) -> None:
    """What a rank has sent, by its residual, is what others read; with sums that are exact, nothing is lost.

    Ranks with the same gradients: two times a number of 16 bits is one.
    """
    for size, gradients in ((1, single), (2, lambda rank, step: single(0, step))):
        seen = steps_of(size, gradients, STEPS, compression=name, rank=2, wire=wire)
        for tensor in MATRICES:
            for step in range(STEPS):
                assert lost(seen, step, tensor) < 1e-6, (step, tensor)


@both
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_what_is_sent_in_16_bits_is_of_16_bits(name: str, wire: str) -> None:
    """The factor that a rank has sent, read off its residual."""
    seen = steps_of(2, single, STEPS, compression=name, rank=2, wire=wire)
    digits = torch.finfo(WIRES[wire]).eps
    for tensor in MATRICES:
        for step in range(1, STEPS):
            side, basis = seen[0][step - 1].bases[tensor]
            if name == "powersgd":  # the basis that its residuals are rounded for is that of the first round
                left = torch.linalg.svd(matrix(seen[0][step].update(tensor)), full_matrices=False)[0][:, :2]
            for of_rank in seen:
                before, rest = accumulated(of_rank, step, tensor), of_rank[step].residuals[tensor].double()
                sent = matrix(before - rest)
                if name == "powersgd":
                    projected = left @ (left.T @ sent)
                    assert distance(projected, sent) < 1e-5  # it lies in that space, rounded or not
                    continue
                basis = basis.double()
                factor = basis @ (sent.T if side == RIGHT else sent)
                rounded = factor.to(WIRES[wire]).double()
                assert distance(rounded, factor) < 1e-2 * digits, (step, tensor)
                exact = basis @ (matrix(before).T if side == RIGHT else matrix(before))
                assert distance(factor, exact) > 1e-2 * digits  # it was rounded


@both
def test_factors_that_16_bits_cannot_hold_are_sent_in_pieces(name: str) -> None:
    """What float16 cuts off stays in the residual: it arrives later, and nothing overflows."""
    large = {"a": torch.full((40, 30), 20000.0)}

    def once(rank: int, step: int) -> dict[str, Tensor]:
        del rank
        return {"a": large["a"] if step == 0 else torch.zeros(40, 30)}

    seen = steps_of(2, once, 12, compression=name, rank=1, wire="fp16")[0]
    total = sum(one.update("a") for one in seen)
    assert torch.isfinite(total).all() and distance(seen[0].update("a"), large["a"]) > 0.1
    assert distance(total + seen[-1].residuals["a"], large["a"]) < 1e-3
    assert distance(total, large["a"]) < 0.05


# -- dtypes and strides -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_keep_what_is_left_in_float32(name: str, dtype: torch.dtype) -> None:
    """Their updates are of their own dtype, and rounded to it: nothing else is lost."""
    seen = steps_of(2, lambda rank, step: drawn(0, step, dtype), STEPS, compression=name, rank=2)
    for tensor in MATRICES:
        for step in range(STEPS):
            assert seen[0][step].update(tensor).dtype == dtype
            assert seen[0][step].residuals[tensor].dtype == torch.float32
            assert lost(seen, step, tensor) < torch.finfo(dtype).eps


@both
def test_strides_of_a_parameter_change_no_bit(name: str) -> None:
    """Of channels_last and of a transposed matrix; updates have the parameter's strides."""

    def strided(rank: int, step: int) -> dict[str, Tensor]:
        given = single(rank, step)
        given["conv"] = given["conv"].to(memory_format=torch.channels_last)
        given["tall"] = given["tall"].t().contiguous().t()
        return given

    plain = steps_of(2, single, 4, compression=name)[1]
    other = steps_of(2, strided, 4, compression=name)[1]
    for step in range(4):
        for tensor in MATRICES:
            assert torch.equal(plain[step].update(tensor), other[step].update(tensor))
            assert torch.equal(plain[step].residuals[tensor], other[step].residuals[tensor])
    assert other[3].update("conv").is_contiguous(memory_format=torch.channels_last)
    assert other[3].update("tall").stride() == (1, 96)


@both
def test_dtypes_side_by_side_change_nothing_of_each_other(name: str) -> None:
    kinds = (torch.bfloat16, torch.float64, torch.float32, torch.float32, torch.float64)
    dtypes = dict(zip(SHAPES, kinds, strict=True))

    def mixed(rank: int, step: int) -> dict[str, Tensor]:
        return {tensor: gradient.to(dtypes[tensor]) for tensor, gradient in drawn(rank, step).items()}

    both_ranks = steps_of(2, mixed, 4, compression=name, merging="single")
    together = both_ranks[0]
    for step in range(4):  # what is sent whole is sent as it is, whatever factors it shares a merge buffer with
        exact = mean([of_rank[step].gradients["bias"] for of_rank in both_ranks])
        assert distance(together[step].update("bias"), exact) < 1e-7
    for tensor in MATRICES:
        # One alone leads with another side, perhaps: the balance is among those of a kind. So of both steps at most.
        alone = steps_of(2, lambda rank, step, t=tensor: {t: mixed(rank, step)[t]}, 1, compression=name)[0]
        assert torch.equal(alone[0].update(tensor), together[0].update(tensor))
        assert torch.equal(alone[0].residuals[tensor], together[0].residuals[tensor])


# -- memory="none" ----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_memory_the_update_is_the_projection_of_the_mean_gradient(name: str, dtype: torch.dtype) -> None:
    seen = steps_of(3, lambda rank, step: drawn(rank, step, dtype), STEPS, compression=name, rank=2, memory="none")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for tensor in MATRICES:
        for step in range(STEPS):
            update = matrix(seen[0][step].update(tensor))
            gradient = matrix(mean([of_rank[step].gradients[tensor] for of_rank in seen]))
            sent_left = name == "acpsgd" and step > 0 and seen[0][step - 1].bases[tensor][0] == RIGHT
            assert overlap(gradient - update, update, sent_left) < tolerance
            assert torch.linalg.svdvals(update)[2] < tolerance * update.norm()
            assert not seen[0][step].residuals
