# SPDX-License-Identifier: Apache-2.0
"""`eden` by kernels in Triton's interpreter: the bytes and the values of torch's operations, and of compiled loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.triton_inputs import assert_same, bits, both, for_interpreter, vector
from torch import Tensor

from sparsifiers import native
from sparsifiers.gpu.tables import BlockRun, BlockTable
from sparsifiers.quantising.draws import Draws, key_of, mixed, unmixed
from sparsifiers.quantising.eden import Eden

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of numpy, in the interpreter
KINDS = ["normal", "mixed", "cauchy", "few", "zeros", "subnormal", "specials"]


def values_of(kind: str, n: int, seed: int = 0) -> Tensor:
    """Hard inputs; with a spike here and there, so that some blocks are rotated twice."""
    if kind == "mixed":
        values, chosen = vector("normal", n, seed), vector("normal", n, 40)
        values[chosen.abs() < 0.5] = 0.0  # where all senders have a zero
        values[(chosen > 0.5) & (vector("normal", n, seed + 50) > 0.5)] = 0.0
        values[: n // 4 : 2 + seed] = -0.0
        return values
    values = vector(kind, n, seed)
    if kind == "normal":
        values[:: n // 3 + 1] *= 50
        values[: n // 2] *= 1e-30
    return values


@pytest.fixture(autouse=True)
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled loop on the host: what is compared are kernels and torch's operations."""
    for name in ("quantize", "add_quantized", "quantize_sum"):
        monkeypatch.setattr(native, name, lambda *_: False)


@pytest.mark.parametrize("n, size", [(1, 64), (3000, 64), (257, 128), (5000, 256)])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_records_have_the_same_bytes(kind: str, count: int, n: int, size: int) -> None:
    quantiser, values = Eden(count), values_of(kind, n)
    draws, blocks = Draws(key_of(1, n), 5), -(-n // size)
    found = []

    def call() -> tuple[Tensor, ...]:
        out = torch.full((blocks * quantiser.record_bytes(size),), 7, dtype=torch.uint8)
        squares = torch.ones(1, dtype=torch.float64)
        quantiser.encode(values, size, draws, out, squares)
        found.append(squares)
        read = torch.zeros(n)
        quantiser.decode_sum([out], [draws], size, 0.5, read)
        return (out, read) if values.isfinite().all() else (read,)  # codes of a block with NaN have no meaning

    assert_same(call)
    torch.testing.assert_close(found[0], found[1], rtol=2e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "mixed"])
@pytest.mark.parametrize("count, second", [(2, 2), (4, 1), (1, 3)])
def test_sums_have_the_same_bits_and_so_have_they_in_bits_again(
    count: int, second: int, kind: str, dtype: torch.dtype
) -> None:
    n, size, senders, first, then = 3333, 256, 3, Eden(count), Eden(second)
    draws = [Draws(key_of(2, sender), 2) for sender in range(senders)]

    def call() -> tuple[Tensor, ...]:
        messages = []
        for sender in range(senders):
            given = values_of(kind, n, sender)
            message = torch.zeros(-(-n // size) * first.record_bytes(size), dtype=torch.uint8)
            first.encode(given if dtype != torch.float16 else given.half(), size, draws[sender], message)
            messages.append(message)
        out = torch.full((n,), 9.0).to(dtype)
        first.decode_sum(messages, draws, size, 1 / 3, out)
        again = torch.zeros(-(-n // size) * then.record_bytes(size), dtype=torch.uint8)
        first.encode_sum(messages, draws, size, 1 / 3, then, Draws(key_of(3), 2), again)
        return out, again

    assert_same(call)


def table_of_three(record: Callable[[int], int]) -> tuple[BlockTable, int]:
    """Four runs of three tensors, in another order than their records, and the bytes of a message."""
    runs, end = [], 0
    for number, first, size, blocks, length in [
        (1 << 63 | 9, 0, 256, 20, 5000), (7, 3, 64, 1, 5), (8, 0, 128, 17, 2176), (7, 0, 64, 3, 192),
    ]:  # fmt: skip
        runs.append(BlockRun(number, size, first, blocks, length, end, end))
        end += blocks * record(size) + 4
    return BlockTable(runs), end


@pytest.mark.parametrize("dtypes", [[torch.float32] * 4, [torch.float32, torch.bfloat16, torch.float32, torch.float16]])
@pytest.mark.parametrize("count, second", [(2, 3), (4, 1)])
def test_a_table_of_tensors_has_the_bytes_of_each(
    launched: list[str], count: int, second: int, dtypes: list[torch.dtype]
) -> None:
    """Blocks of all sizes in one launch; several where tensors have several dtypes, and none is written outside."""
    senders, first, then = 3, Eden(count), Eden(second)
    table, size = table_of_three(first.record_bytes)
    wide, length = table_of_three(lambda size: max(first.record_bytes(size), then.record_bytes(size)))
    keys = [key_of(4, sender) for sender in range(senders)]

    def call() -> tuple[Tensor, ...]:
        rows, squares = torch.full((senders, size + 6), 7, dtype=torch.uint8), torch.zeros(1, dtype=torch.float64)
        for sender in range(senders):
            values: list[Tensor | None] = [
                for_interpreter(values_of("normal", run.length, sender), dtype).to(dtype)
                for run, dtype in zip(table.runs, dtypes, strict=True)
            ]
            values[1] = None if sender == 1 else values[1]
            first.encode_all(table, values, keys[sender], rows[sender, :size], squares)
        outs = [torch.full((run.length,), 9.0, dtype=dtype) for run, dtype in zip(table.runs, dtypes, strict=True)]
        first.decode_all(table, rows, keys, 1.0, outs)
        both_ways = BlockTable([a._replace(target=b.target) for a, b in zip(table.runs, wide.runs, strict=True)])
        again = torch.full((length + 6,), 7, dtype=torch.uint8)
        first.encode_sum_all(both_ways, rows, keys, 1 / 3, then, key_of(5), again)
        found.append(squares)
        return rows, again, *outs

    found: list[Tensor] = []
    assert_same(call)
    torch.testing.assert_close(found[0], found[1], rtol=2e-6, atol=0)
    several = len(set(dtypes)) > 1  # of sender 1 nothing is bfloat16 then
    assert len(launched) == (senders + 1) * len(set(dtypes)) + 1 - several


def test_keys_are_unmixed() -> None:
    for word in (0, 1, 1 << 63, (1 << 64) - 1, key_of(3), key_of(4, 5)):
        assert mixed(unmixed(word)) == word == unmixed(mixed(word))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels, in the order in which they are launched."""
    from sparsifiers.gpu.kernels import records as kernel

    names: list[str] = []
    launch = kernel.launch
    monkeypatch.setattr(
        kernel, "launch", lambda one, *args, **given: names.append(one.__name__) or launch(one, *args, **given)
    )
    return names


def test_nothing_outside_is_written_and_one_launch_does_it(launched: list[str]) -> None:
    quantiser, n, size = Eden(2), 300, 128
    whole = torch.full((3 * quantiser.record_bytes(size) + 20,), 7, dtype=torch.uint8)

    def call() -> tuple[Tensor, ...]:
        out = whole[10:-10]
        quantiser.encode(torch.randn(n, generator=torch.Generator().manual_seed(0)), size, Draws(4), out)
        read = torch.full((n + 4,), 9.0)
        quantiser.decode_sum([out], [Draws(4)], size, 1.0, read[2:-2])
        return whole.clone(), read

    (message, read), _ = both(call)
    assert message[:10].tolist() == message[-10:].tolist() == [7] * 10
    assert bits(read[:2]) == bits(read[-2:]) == bits(torch.full((2,), 9.0))
    assert launched == ["eden_encode_kernel", "eden_decode_kernel"]
