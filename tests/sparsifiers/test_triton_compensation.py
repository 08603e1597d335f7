"""K1 in Triton's interpreter: the bits of torch's operations, and those of the memories."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_harness import CPU, KINDS, assert_same, for_interpreter, vector

import sparsifiers
from sparsifiers.gpu import INFINITY, Momenta, Scratch, TensorTable, compensate
from sparsifiers.memories import Momentum, Rate

LENGTHS = (4096, 1, 9000, 31, 5000)
OFFSETS = (0, 4096, 4128, 13152, 13184)
N = 18208


def table(offsets: tuple[int, ...] = OFFSETS) -> TensorTable:
    return TensorTable.of(offsets, LENGTHS, CPU)


def gradients(kind: str, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """One of them is missing."""
    given: list[Tensor | None] = [
        for_interpreter(vector(kind, n, seed), dtype).to(dtype) for seed, n in enumerate(LENGTHS)
    ]
    given[3] = None
    return given


def staging() -> Tensor:
    return torch.zeros(len(LENGTHS), dtype=torch.int64)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.thin
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_sum_the_histogram_and_the_largest_key(kind: str, dtype: torch.dtype) -> None:
    given, residual = gradients(kind, dtype), vector(kind, N, 9)

    def call() -> tuple[Tensor, ...]:
        work, scratch = torch.full((N,), 7.0), Scratch.of(N, CPU)
        compensate(table(), given, residual, work, staging=staging(), scratch=scratch)
        return work, scratch.histogram, scratch.largest

    work, histogram, largest = assert_same(call)
    assert int(histogram.sum()) == sum(LENGTHS)
    assert work[OFFSETS[1] + 1 : OFFSETS[2]].tolist() == [7.0] * 31  # padding
    parts = [work[o : o + n] for o, n in zip(OFFSETS, LENGTHS, strict=True)]
    assert (int(largest) >= INFINITY) is not all(bool(part.isfinite().all()) for part in parts)


@pytest.mark.parametrize("scale", [None, 1 / 3, 2.0**-16])
@pytest.mark.parametrize("kept", [True, False])
def test_a_scale_rounds_by_itself(scale: float | None, kept: bool) -> None:
    given = gradients("normal")
    factor = None if scale is None else torch.tensor(scale)

    def call() -> tuple[Tensor, ...]:
        work = torch.zeros(N)
        residual = vector("cauchy", N) if kept else None
        compensate(table(), given, residual, work, staging=staging(), scale=factor)
        return (work,)

    assert_same(call)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_sent_whole_goes_into_the_message(dtype: torch.dtype) -> None:
    given = gradients("laplace", dtype)

    def call() -> tuple[Tensor, ...]:
        message = torch.zeros(N, dtype=dtype)
        compensate(table(), given, None, message, staging=staging())
        return (message,)

    (message,) = assert_same(call)
    assert torch.equal(message[: LENGTHS[0]], given[0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_that_of_the_memory(nesterov: bool) -> None:
    given, residual, before = gradients("normal"), vector("normal", N, 1), vector("normal", N, 2)

    def call() -> tuple[Tensor, ...]:
        work, after = torch.zeros(N), torch.zeros(N)
        momenta = Momenta(before, after, 0.9, nesterov)
        compensate(table(), given, residual, work, staging=staging(), momenta=momenta)
        return work, after

    work, after = assert_same(call)
    memory = sparsifiers.memory("dgc", momentum=0.9, nesterov=nesterov)
    for gradient, offset, length in zip(given, OFFSETS, LENGTHS, strict=True):
        place, wanted, momentum = slice(offset, offset + length), torch.zeros(length), torch.zeros(length)
        memory.compensate(wanted, residual[place], gradient, Momentum(before[place], momentum, Rate(0.9, nesterov)))
        assert torch.equal(work[place], wanted) and torch.equal(after[place], momentum)


def test_addresses_and_offsets_say_whether_loads_may_be_wide() -> None:
    whole = torch.zeros(LENGTHS[0] + 1)
    given: list[Tensor | None] = [whole[:-1], None, None, None, None]
    assert table().send_addresses(given, staging())
    assert not table().send_addresses([whole[1:], *given[1:]], staging())
    assert not table((0, 4097, *OFFSETS[2:])).send_addresses(given, staging())


@pytest.mark.parametrize(
    "wrong, text",
    [
        ([None] * 4, "5 tensors, but 4"),
        ([torch.zeros(4095), None, None, None, None], "gradient 0"),
        ([torch.zeros(8192)[::2], None, None, None, None], "contiguous"),
        ([torch.zeros(4096), torch.zeros(1).half(), None, None, None], "one dtype"),
        ([torch.zeros(4096).double(), None, None, None, None], "fp32, fp16 or bf16"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(wrong: list[Tensor | None], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        compensate(table(), wrong, None, torch.zeros(N), staging=staging())
