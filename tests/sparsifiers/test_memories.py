# SPDX-License-Identifier: Apache-2.0
"""compensate is exact to the bit for every dtype and stride, changes its output only, allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import sparsifiers
from sparsifiers.memories import Alongside, Decaying, DGCMemory, Memory, Momentum, NoMemory, Residual, ResidualGTopK

SameBits = Callable[[Tensor, Tensor], bool]
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float64),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]


def layouts(values: Tensor) -> dict[str, Tensor]:
    """The same [2, 3, 4, 5] values in every arrangement that a gradient comes in."""
    wide = torch.empty(2, 3, 4, 10, dtype=values.dtype)[..., ::2]
    wide.copy_(values)
    return {
        "contiguous": values.clone(),
        "channels_last": values.clone(memory_format=torch.channels_last),
        "transposed": values.transpose(0, 3).contiguous().transpose(0, 3),
        "strided": wide,
    }


def numbers(dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64) * 10.0**seed
    values[0, 0, 0] = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-40])
    return values.to(dtype)


def to_float64(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


@pytest.mark.parametrize(("dtype", "narrow"), DTYPES, ids=str)
def test_residual_adds_exactly(dtype: torch.dtype, narrow: torch.dtype, same_bits: SameBits) -> None:
    residual_values, gradient_values = numbers(dtype, 1), numbers(narrow, 2)
    # fp64 holds the sum of two narrower floats closely enough to round once more without a difference here;
    # for fp64 itself it is the sum.
    expected = torch.from_numpy(to_float64(residual_values) + to_float64(gradient_values)).to(dtype)
    pairs = product(layouts(residual_values).items(), layouts(gradient_values).items())
    for (residual_layout, residual), (gradient_layout, gradient) in pairs:
        residual_before, gradient_before = residual.clone(), gradient.clone()
        for work_layout, work in layouts(torch.full_like(residual_values, 7.0)).items():
            strides, place = work.stride(), work.data_ptr()
            sparsifiers.memory("residual").compensate(work, residual, gradient)
            context = (work_layout, residual_layout, gradient_layout)
            assert same_bits(work.nan_to_num(nan=1e30), expected.nan_to_num(nan=1e30)), context
            assert (work.stride(), work.data_ptr()) == (strides, place), context
        assert same_bits(residual, residual_before)
        assert same_bits(gradient, gradient_before)


@pytest.mark.parametrize(("dtype", "narrow"), DTYPES, ids=str)
def test_without_a_gradient_the_residual_is_offered_again(
    dtype: torch.dtype, narrow: torch.dtype, same_bits: SameBits
) -> None:
    residual = numbers(dtype, 1)
    for work in layouts(torch.full_like(residual, 7.0)).values():
        sparsifiers.memory("residual").compensate(work, residual, None)
        assert same_bits(work, residual)


@pytest.mark.parametrize(("dtype", "narrow"), DTYPES, ids=str)
def test_none_takes_the_gradient_alone(dtype: torch.dtype, narrow: torch.dtype, same_bits: SameBits) -> None:
    values = numbers(narrow, 1)
    for gradient in layouts(values).values():
        for work in layouts(torch.full_like(values, 7.0, dtype=dtype)).values():
            sparsifiers.memory("none").compensate(work, None, gradient)
            assert same_bits(work, values.to(dtype))
            sparsifiers.memory("none").compensate(work, None, None)
            assert same_bits(work, torch.zeros_like(values, dtype=dtype))


def test_nothing_is_lost_over_many_steps() -> None:
    generator = torch.Generator().manual_seed(3)
    memory, topk = sparsifiers.memory("residual"), sparsifiers.get("topk", 0.05)
    residual, work, total, sent = (torch.zeros(500, dtype=torch.float64) for _ in range(4))
    for step in range(50):
        gradient = torch.randn(500, generator=generator).round(decimals=2).double()
        total += gradient
        memory.compensate(work, residual, gradient)
        chosen = topk.select(work, step=step).trimmed()
        sent[chosen] += work[chosen]
        work[chosen] = 0.0
        residual, work = work, residual
    assert torch.allclose(sent + residual, total, rtol=0, atol=1e-12)
    assert residual.count_nonzero() > 300


def test_gradients_that_require_grad_leave_no_graph() -> None:
    gradient = torch.ones(4, requires_grad=True) * 2
    for name, residual in (("residual", torch.ones(4)), ("none", None)):
        work = torch.empty(4)
        sparsifiers.memory(name).compensate(work, residual, gradient)
        assert not work.requires_grad
        assert work.tolist() == ([3.0] * 4 if name == "residual" else [2.0] * 4)


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16, None], ids=str)
def test_nothing_is_allocated(narrow: torch.dtype | None) -> None:
    def largest(run: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            run()
        return max((event.cpu_memory_usage for event in recorded.events()), default=0)

    shape = (64, 32, 3, 3)
    work, residual = torch.zeros(shape), torch.zeros(shape)
    gradient = None
    if narrow is not None:
        gradient = torch.ones(shape, dtype=narrow).to(memory_format=torch.channels_last)
    for name, kept in (("residual", residual), ("none", None)):
        memory = sparsifiers.memory(name)
        assert largest(lambda memory=memory, kept=kept: memory.compensate(work, kept, gradient)) < 1024
    assert largest(lambda: residual + work) >= residual.numel() * 4  # the gauge sees what it should


def test_misuse() -> None:
    residual, none = sparsifiers.memory("residual"), sparsifiers.memory("none")
    work, rest, gradient = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"residual\(\): residual must be a tensor"):
        residual.compensate(work, None, gradient)
    with pytest.raises(ValueError, match=r"none\(\): residual must be None"):
        none.compensate(work, rest, gradient)
    with pytest.raises(ValueError, match=r"residual is torch.float32 of shape \(6,\), but work is"):
        residual.compensate(work, rest.view(-1), gradient)
    with pytest.raises(ValueError, match="residual is torch.float64"):
        residual.compensate(work, rest.double(), gradient)
    with pytest.raises(ValueError, match="share storage"):
        residual.compensate(work, work, gradient)
    for wrong in (gradient.view(-1), gradient[:1], gradient.double(), gradient.to(torch.complex64)):
        for memory, kept in ((residual, rest), (none, None)):
            with pytest.raises(ValueError, match="gradient is .* but work is"):
                memory.compensate(work, kept, wrong)
    with pytest.raises(ValueError, match="gradient is torch.float16"):
        none.compensate(work.bfloat16(), None, gradient.half())
    with pytest.raises(ValueError, match="sparse_as_dense"):
        residual.compensate(work, rest, gradient.to_sparse())
    assert work.count_nonzero() == 0


def test_an_empty_tensor_is_no_misuse() -> None:
    work, rest = torch.zeros(0), torch.zeros(0)
    sparsifiers.memory("residual").compensate(work, rest, torch.zeros(0))


class Noted:
    """Notes that count how often they are forgotten."""

    def __init__(self) -> None:
        self.forgotten = 0

    def begin(self) -> tuple[int, int]:
        return 0, 0

    def end(self) -> None:
        """Nothing was noted."""

    def forget(self) -> None:
        self.forgotten += 1


class Adding:
    """A mixin of a script's, which computes work by itself."""

    def _compensate(
        self, work: Tensor, residual: Tensor | None, gradient: Tensor | None, momentum: Momentum | None, size: int
    ) -> bool:
        assert residual is not None and gradient is not None
        torch.add(residual, gradient, out=work)
        return True


class Mixed(Adding, Residual):  # type: ignore[misc]
    """A memory of a script's, made with the mixin."""


class Written(Residual):
    """A memory of a script's, whose sum is its base class's."""

    def _compensate(  # type: ignore[override]
        self, work: Tensor, residual: Tensor | None, gradient: Tensor | None, momentum: Momentum | None, size: int
    ) -> bool:
        return super()._compensate(work, residual, gradient, momentum, size) is not False


@pytest.mark.parametrize("memory", [Mixed(), Written(), Residual(), Decaying(1.0)], ids=str)
def test_whatever_a_memory_takes_gradients_move_and_notes_are_forgotten(memory: Memory) -> None:
    residual, gradient = torch.randn(5, 7), torch.randn(5, 7)  # too few elements for a loop
    work, copy, notes = torch.zeros(5, 7), torch.zeros(5, 7), Noted()
    memory.compensate(work, residual, gradient, alongside=Alongside(copy, notes))
    assert torch.equal(work, residual + gradient) and torch.equal(copy, gradient)
    assert notes.forgotten == 1


def test_which_memories_are_formulas() -> None:
    assert all(memory.is_formula for memory in (NoMemory, Residual, ResidualGTopK, Decaying, DGCMemory))
    assert not any(memory.is_formula for memory in (Mixed, Written))
