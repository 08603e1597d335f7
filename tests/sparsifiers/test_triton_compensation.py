# SPDX-License-Identifier: Apache-2.0
"""K1 in Triton's interpreter: the bits of torch's operations, and those of the memories."""

from __future__ import annotations

import pytest
import torch
from support.triton_inputs import CPU, KINDS, assert_same, bits, for_interpreter, vector
from torch import Tensor

import sparsifiers
from sparsifiers.gpu import LargestKey, Momenta, Scratch, TensorTable, compensate, count_digits
from sparsifiers.memories import Momentum, Rate

LENGTHS = (4096, 1, 9000, 31, 5000)
OFFSETS = (0, 4096, 4128, 13152, 13184)
N = 18208


def table(offsets: tuple[int, ...] = OFFSETS) -> TensorTable:
    return TensorTable(offsets, LENGTHS, CPU)


def gradients(kind: str, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """One of them is missing."""
    given: list[Tensor | None] = [
        for_interpreter(vector(kind, n, seed), dtype).to(dtype) for seed, n in enumerate(LENGTHS)
    ]
    given[3] = None
    return given


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_sum_the_histogram_and_the_largest_key(kind: str, dtype: torch.dtype) -> None:
    given, residual = gradients(kind, dtype), vector(kind, N, 9)

    def call() -> tuple[Tensor, ...]:
        work, scratch, largest = torch.full((N,), 7.0), Scratch(N, CPU), LargestKey(CPU)
        compensate(table(), given, residual, work, scratch=scratch, largest=largest)
        assert scratch.is_counted
        return work, scratch.histogram, largest.now, largest.magnitude

    work, histogram, _, magnitude = assert_same(call)
    assert int(histogram.sum()) == sum(LENGTHS)
    assert work[OFFSETS[1] + 1 : OFFSETS[2]].tolist() == [7.0] * 31  # padding
    parts = torch.cat([work[o : o + n] for o, n in zip(OFFSETS, LENGTHS, strict=True)])
    assert bits(magnitude) == bits(parts.abs().max())


@pytest.mark.parametrize("window", [0, 1, 300, 800, 1100, 2047])  # the first digit of the last selection's edge
@pytest.mark.parametrize("kind, scale", [("laplace", 1e-30), ("cauchy", 1e-7), ("few", 1.0), ("normal", 1e20)])
def test_digits_are_counted_wherever_the_usual_window_lies(kind: str, scale: float, window: int) -> None:
    given: list[Tensor | None] = [vector(kind, n, n) * scale for n in LENGTHS]

    def call() -> tuple[Tensor, ...]:
        work, scratch, again = torch.zeros(N), Scratch(N, CPU), Scratch(N, CPU)
        for one in (scratch, again):
            one.edge[2] = window
        compensate(table(), given, None, work, scratch=scratch)
        count_digits(work, again)
        return scratch.histogram, again.histogram

    of_tensors, of_all = assert_same(call)
    assert int(of_tensors.sum()) == sum(LENGTHS) and int(of_all.sum()) == N


def test_the_largest_key_of_a_step_knows_nothing_of_others() -> None:
    """Two launches of a step share it; a step without one changes nothing."""
    large, small = gradients("normal"), gradients("normal")
    large[0] = torch.full((LENGTHS[0],), float("inf"))

    def call() -> tuple[Tensor, ...]:
        largest, found = LargestKey(CPU), []
        for given, other in [
            (small, large),
            (small, small),
            (None, None),
            (large, small),
            (None, None),
            (small, small),
        ]:
            largest.begin()
            if given is not None and other is not None:
                compensate(table(), given, None, torch.zeros(N), largest=largest)
                compensate(table(), other, None, torch.zeros(N), largest=largest)
                found.append(largest.magnitude.clone())
        return tuple(found)

    found = assert_same(call)
    assert [bool(one.isinf()) for one in found] == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_sent_whole_is_the_gradient(dtype: torch.dtype) -> None:
    given = gradients("laplace", dtype)

    def call() -> tuple[Tensor, ...]:
        work = torch.full((N,), 7.0)
        compensate(table(), given, None, work)
        return (work,)

    (work,) = assert_same(call)
    assert torch.equal(work[: LENGTHS[0]], given[0].float())
    assert not work[OFFSETS[3] : OFFSETS[3] + LENGTHS[3]].any()  # of the tensor without a gradient


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_that_of_the_memory(nesterov: bool) -> None:
    given, residual, before = gradients("normal"), vector("normal", N, 1), vector("normal", N, 2)

    def call() -> tuple[Tensor, ...]:
        work, after = torch.zeros(N), torch.zeros(N)
        momenta = Momenta(before, after, 0.9, nesterov)
        compensate(table(), given, residual, work, momenta=momenta)
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
    assert table().addresses(given)[1]
    assert not table().addresses([whole[1:], *given[1:]])[1]
    assert not table((0, 4097, *OFFSETS[2:])).addresses(given)[1]


def test_addresses_are_sent_again_where_they_have_changed() -> None:
    given, known = gradients("normal"), table()
    first, _ = known.addresses(given)
    assert known.addresses(list(given))[0] is first
    for changed in ([None, *given[1:]], [given[0].clone(), *given[1:]], given):
        sent, _ = known.addresses(changed)
        assert sent is not first and sent.tolist() == [0 if one is None else one.data_ptr() for one in changed]
        first = sent


@pytest.mark.parametrize(
    "wrong, text",
    [
        ([None] * 4, "5 tensors, got 4 gradients"),
        ([torch.zeros(4095), None, None, None, None], "gradient 0"),
        ([torch.zeros(8192)[::2], None, None, None, None], "contiguous"),
        ([torch.zeros(4096), torch.zeros(1).half(), None, None, None], "one dtype"),
        ([torch.zeros(4096).double(), None, None, None, None], "fp32, fp16 or bf16"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(wrong: list[Tensor | None], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        compensate(table(), wrong, None, torch.zeros(N))
