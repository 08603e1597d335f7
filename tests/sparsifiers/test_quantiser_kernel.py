# SPDX-License-Identifier: Apache-2.0
"""The compiled loops write and read the bytes and bits that torch's operations do, at every level."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsifiers
from sparsifiers import native
from sparsifiers.quantising.base import (
    Quantiser,
    add_by_loop,
    blocks_in,
    quantize_by_loop,
    quantize_sum_by_loop,
)
from sparsifiers.quantising.draws import Draws, key_of
from sparsifiers.quantising.linear import Int8

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="the compiled loops were not built"),
    pytest.mark.usefixtures("one_thread"),
]

COMPILED = ("eden-1", "eden-2", "eden-3", "eden-4", "int8", "int4")
SIZES = (64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 4096  # coordinates that a loop works on at once


def few(first: Sequence[object], second: Sequence[object], shift: int = 0) -> list[object]:
    """Return all pairs; those of unlike places, but for ``shift``, are long."""
    pairs = itertools.product(enumerate(first), enumerate(second))
    return [
        pytest.param(a, b, marks=() if (place + shift) % len(second) == other else pytest.mark.long)
        for (place, a), (other, b) in pairs
    ]


@contextmanager
def torch_alone() -> Iterator[None]:
    """Within it there are no compiled loops."""
    before, native.library = native.library, None
    try:
        yield
    finally:
        native.library = before


def alike(a: Tensor, b: Tensor) -> bool:
    """Return whether all bits are equal, but for which NaN it is."""
    whole = {2: torch.int16, 4: torch.int32}[a.itemsize]
    same = torch.equal(a.masked_fill(a.isnan(), 1.0).view(whole), b.masked_fill(b.isnan(), 1.0).view(whole))
    return same and torch.equal(a.isnan(), b.isnan())


def draws_of(number: int) -> Draws:
    return Draws(key_of(7, number), first=3 + 11 * number)


def written(made: Quantiser, values: Tensor, size: int, number: int = 0) -> tuple[Tensor, float]:
    """Return the records of ``values``, and the sum of squares that is told."""
    out = torch.full((blocks_in(values.numel(), size) * made.record_bytes(size),), 0x5A, dtype=torch.uint8)
    squares = torch.zeros(1, dtype=torch.float64)
    made.encode(values, size, draws_of(number), out, squares)
    return out, squares.item()


def read(
    made: Quantiser, messages: Sequence[Tensor], size: int, scale: float, numel: int, dtype: torch.dtype
) -> Tensor:
    out = torch.full((numel,), 77.0, dtype=dtype)
    made.decode_sum(messages, [draws_of(number) for number in range(len(messages))], size, scale, out)
    return out


def check(made: Quantiser, values: Tensor, size: int) -> None:
    """Compare bytes, squares and what is read with those of torch's operations."""
    got, squares = written(made, values, size)
    again = read(made, [got], size, 1.0, values.numel(), values.dtype)
    with torch_alone():
        expected, right = written(made, values, size)
        reading = read(made, [expected], size, 1.0, values.numel(), values.dtype)
    rows, others = (records.view(-1, made.record_bytes(size)) for records in (got, expected))
    different = (rows != others).any(dim=1).nonzero()[:, 0]
    assert not len(different), (different[:3], rows[different[0]], others[different[0]])
    assert squares == pytest.approx(right, rel=2.0**-20, nan_ok=True)
    assert alike(again, reading)


@functools.cache
def hard(size: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Return vectors by numpy: torch's own normal numbers depend on the instructions of the processor."""
    return tuple(_hard(size, seed))


def _hard(size: int, seed: int) -> Iterator[Tensor]:
    generator = np.random.default_rng(size + seed)

    def normal(numel: int) -> Tensor:
        return torch.from_numpy(generator.standard_normal(numel)).to(torch.float32)

    yield normal(40 * size)
    yield normal(40 * size) * torch.from_numpy(2.0 ** generator.integers(-30, 30, 40 * size)).to(torch.float32)
    yield torch.from_numpy(generator.standard_t(1.5, 40 * size)).to(torch.float32)
    yield normal(20 * size).mul_(2).round_()
    yield normal(20 * size).sign() * (normal(20 * size) > 1)
    yield torch.zeros(3 * size)
    yield -torch.zeros(3 * size)
    yield torch.full((3 * size,), -0.75)
    yield normal(9 * size) * (torch.arange(9 * size) % (size + 7) == 3)
    for share in (0.02, 0.3, 0.7, 0.98):
        kept = torch.from_numpy(generator.random(20 * size) < share)
        yield normal(20 * size) * kept
    for share in (0.5, 0.9, 0.99):
        spiked = normal(30 * size).view(-1, size)
        spiked[:, 5] = (spiked.square().sum(dim=1) * share / (1 - share)).sqrt() * spiked[:, 5].sign()
        yield spiked.reshape(-1)
    for exponent in (-149, -140, -130, -126, -120, -110, -104, -100, -30, 30, 100, 120, 125, 127):
        yield normal(6 * size).clamp_(-1.99, 1.99) * 2.0**exponent
    bad = normal(9 * size)
    for block, value in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf)):
        bad[block * size + 5] = value
    bad[4 * size : 5 * size] = torch.nan
    bad[5 * size + 7], bad[5 * size + 9] = torch.inf, -torch.inf
    bad[6 * size + 3], bad[6 * size + 4] = 3e38, -3.4e38
    yield bad


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", COMPILED)
def test_bytes_and_what_is_read_are_torchs(level: int, name: str, size: int) -> None:
    made = sparsifiers.quantiser(name)
    for values in hard(size):
        check(made, values, size)
        for other in DTYPES[1:]:
            check(made, values.to(other), size)


@pytest.mark.whole
@pytest.mark.parametrize(("size", "dtype"), few(SIZES, DTYPES))
@pytest.mark.parametrize("name", COMPILED)
def test_any_length_and_any_place(level: int, name: str, size: int, dtype: torch.dtype) -> None:
    made = sparsifiers.quantiser(name)
    source = hard(size)[0].repeat(TILE // size // 20 + 2).to(dtype)
    lengths = (1, 2, 15, 16, 17, 63, 64, 65, 127, 200, 256, 300, 511, 1000, TILE - 1, TILE, TILE + 1, TILE + 333)
    for number, numel in enumerate(lengths):
        check(made, source[number : number + numel], size)


@pytest.mark.parametrize("name", [*COMPILED, "onebit"])
def test_a_difference_is_written_as_its_values_are(level: int, name: str) -> None:
    made = sparsifiers.quantiser(name)
    source = hard(256)[1].repeat(2)
    for numel in (1, 255, 256, 1000, TILE, TILE + 333):
        values, less = source[:numel], source[numel : 2 * numel].flip(0).contiguous()
        expected, right = written(made, values - less, 256)
        got, squares = torch.zeros_like(expected), torch.zeros(1, dtype=torch.float64)
        made.encode_difference(values, less, 256, draws_of(0), got, squares)
        assert torch.equal(got, expected) and squares.item() == right


def test_large_vectors_are_written_past_the_caches(level: int) -> None:
    for name in COMPILED:
        made = sparsifiers.quantiser(name)
        source = torch.from_numpy(np.random.default_rng(1).standard_normal((1 << 16) + 100)).to(torch.float32)
        check(made, source, 256)
        check(made, source[1:-3], 64)


@pytest.mark.whole
@pytest.mark.parametrize("workers", [3, *(pytest.param(other, marks=pytest.mark.long) for other in (1, 2, 5, 7))])
@pytest.mark.parametrize("name", COMPILED)
def test_sums_are_added_in_the_order_of_senders(level: int, name: str, workers: int) -> None:
    made, numel = sparsifiers.quantiser(name), TILE + 777
    for size in SIZES:
        for scale in (1.0, 1 / workers, 0.3):
            vectors = [torch.cat(hard(size, number))[number:][:numel] for number in range(workers)]
            messages = [written(made, vector, size, number)[0] for number, vector in enumerate(vectors)]
            for dtype in DTYPES:
                got = read(made, messages, size, scale, numel, dtype)
                with torch_alone():
                    assert alike(got, read(made, messages, size, scale, numel, dtype))


@pytest.mark.parametrize("name", COMPILED)
def test_what_is_read_is_the_same_where_subnormals_are_zeros(level: int, name: str) -> None:
    made = sparsifiers.quantiser(name)
    for size in SIZES:
        for values in hard(size):
            message, numel = written(made, values, size)[0], values.numel()
            expected = read(made, [message] * 3, size, 1.0, numel, torch.float32)
            halves = read(made, [message] * 3, size, 1.0, numel, torch.float16)
            if not torch.set_flush_denormal(True):
                pytest.skip("this processor has no such mode")
            try:
                again = read(made, [message] * 3, size, 1.0, numel, torch.float32)
                narrow = read(made, [message] * 3, size, 1.0, numel, torch.float16)
            finally:
                torch.set_flush_denormal(False)
            assert alike(again, expected) and alike(narrow, halves)


@pytest.mark.whole
@pytest.mark.parametrize(("name", "second"), few(COMPILED, COMPILED, shift=1))
def test_a_sum_is_written_again(level: int, name: str, second: str) -> None:
    first, then = sparsifiers.quantiser(name), sparsifiers.quantiser(second)
    for size in SIZES:
        vectors = [torch.cat(hard(size, number)) for number in range(3)]
        messages = [written(first, vector, size, number)[0] for number, vector in enumerate(vectors)]
        draws = [draws_of(number) for number in range(3)]
        results = []
        for _ in range(2):
            out = torch.full((blocks_in(vectors[0].numel(), size) * then.record_bytes(size),), 0x5A, dtype=torch.uint8)
            first.encode_sum(messages, draws, size, 1 / 3, then, draws_of(9), out)
            results.append(out)
            if len(results) == 1:
                with torch_alone():
                    out = torch.full_like(out, 0xA5)
                    first.encode_sum(messages, draws, size, 1 / 3, then, draws_of(9), out)
                    results.append(out)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_bits_of_a_vector_and_of_a_message(data: st.DataObject) -> None:
    """A message need not be one that was written: bytes of which one is damaged are read alike, too."""
    made = sparsifiers.quantiser(data.draw(st.sampled_from(COMPILED)))
    size, numel = data.draw(st.sampled_from(SIZES)), data.draw(st.integers(1, 1500))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    low, high = sorted(data.draw(st.tuples(st.integers(0, 0x7FFF), st.integers(0, 0x7FFF))))
    upper = generator.integers(low, high + 1, numel, dtype=np.int64) | generator.integers(0, 2, numel) << 15
    words = (upper << 16 | generator.integers(0, 1 << 16, numel)).astype(np.uint32)
    values = torch.from_numpy(words.view(np.float32))
    bytes_in_all = blocks_in(numel, size) * made.record_bytes(size)
    message = torch.from_numpy(generator.integers(0, 256, bytes_in_all, dtype=np.uint8))
    with torch_alone():
        records = written(made, values, size)[0]
        readings = read(made, [message] * 2, size, 0.5, numel, torch.float32)
    before = native.level()
    try:
        for number in range(len(native.names())):
            native.set_level(number)
            assert torch.equal(written(made, values, size)[0], records)
            assert alike(read(made, [message] * 2, size, 0.5, numel, torch.float32), readings)
    finally:
        native.set_level(before)


def test_what_the_loops_cannot_read_is_torchs(level: int) -> None:
    made, draws = sparsifiers.quantiser("eden-2"), draws_of(0)
    values, out = torch.ones(300), torch.full((2 * made.record_bytes(256),), 0x5A, dtype=torch.uint8)
    given = (made.loops(), made.record_bytes(256))
    for wrong in (values.double(), torch.ones(600)[::2], values[:0], values[:200]):
        assert not quantize_by_loop(wrong, 256, draws, out, None, given)
    assert not quantize_by_loop(values, 256, draws, out, None, (0, given[1]))
    assert not quantize_by_loop(values, 256, draws, out.repeat(2)[::2], None, given)
    assert not quantize_by_loop(values, 256, draws, out, torch.zeros(1), given)
    assert (out == 0x5A).all()
    for messages in ([], [out, out[:-1]], [out.float()]):
        assert not add_by_loop(messages, [draws] * len(messages), 256, 1.0, values, given)
    assert not add_by_loop([out], [draws] * 2, 256, 1.0, values, given)
    assert not add_by_loop([out], [draws], 256, 1.0, values.double(), given)
    assert not quantize_sum_by_loop([out], [draws], 256, 1.0, draws, out[:-1], given, given)
    assert not quantize_sum_by_loop([out], [draws], 256, 1.0, draws, out, given, (0, given[1]))
    assert (values == 1).all()


def test_a_quantiser_that_writes_something_else_has_no_loops(level: int) -> None:
    class Halved(Int8):
        name = "halved"

        def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
            return super()._decode(data, draws, size) / 2

    class Renamed(Int8):
        name = "renamed"

    values = torch.arange(256.0)
    records, _ = written(Int8(), values, 256)
    for made, factor in ((Halved(), 0.5), (Renamed(), 1.0)):
        expected = read(Int8(), [records], 256, factor, 256, torch.float32)
        assert torch.equal(read(made, [records], 256, 1.0, 256, torch.float32), expected)
