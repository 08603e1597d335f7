# SPDX-License-Identifier: Apache-2.0
"""Index codecs: what goes in comes out, in the announced number of bytes, and no bytes are a crash."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agmerge.exchanges.message import (
    Bitmap,
    Blocks,
    Everything,
    IndexCodec,
    Int32,
    bits,
    candidates,
    device_bits,
    smallest,
)
from agmerge.exchanges.message.indices import GRAIN, in_order
from sparsifiers import native

MANY = settings(deadline=None)


@st.composite
def selections(draw: st.DrawFn) -> tuple[int, torch.Tensor, int]:
    """Length, int32[capacity] and count; behind the count stands any index in range, also one that is chosen."""
    large = st.sampled_from([255, 256, 257, 4096, 65536, 70_001, 2**20, 2**31 - 1])
    length = draw(st.one_of(st.integers(1, 70), large))
    capacity = draw(st.integers(0, min(length, 300)))
    count = draw(st.one_of(st.just(capacity), st.just(0), st.integers(0, capacity)))
    source = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from(["even", "first", "last", "ends"]))
    if spread == "even" and length < 10**7:
        chosen = np.sort(source.choice(length, count, replace=False))
    elif spread == "even":
        chosen = np.unique(source.integers(0, length, count))
        count = len(chosen)
    elif spread == "first":
        chosen = np.arange(count)
    elif spread == "last":
        chosen = np.arange(length - count, length)
    else:
        chosen = np.concatenate([np.arange(count // 2), np.arange(length - (count - count // 2), length)])
    behind = source.integers(0, length, capacity - count)
    return length, torch.from_numpy(np.concatenate([chosen, behind]).astype(np.int32)), count


def codecs_for(length: int, capacity: int) -> list[IndexCodec]:
    """All that are small enough to try."""
    return [codec for codec in candidates(length, capacity) if codec.size < 10**6]


def dirty(size: int) -> torch.Tensor:
    """Bytes with a past: an encoder has to write all of them. The next ones are watched."""
    return torch.full((size + 16,), 0xA5, dtype=torch.uint8)


@MANY
@given(selections(), st.booleans())
def test_what_goes_in_comes_out(drawn: tuple[int, torch.Tensor, int], as_tensor: bool) -> None:
    length, indices, count = drawn
    for codec in codecs_for(length, len(indices)):
        out, kept = dirty(codec.size), indices.clone()
        codec.encode(indices, torch.tensor(count, dtype=torch.int32) if as_tensor else count, out[: codec.size])
        assert (out[codec.size :] == 0xA5).all() and torch.equal(indices, kept)
        got, good = codec.decode(out[: codec.size], count)
        assert got.dtype == torch.int32 and torch.equal(got, indices[:count]), codec.name
        assert bool(good) and bool(in_order(got, length))
        for other in {count - 1, count + 1} - {-1, len(indices) + 1}:
            if codec.name == "int32" and (other < count or other == 1):
                continue  # it has nothing but order to go by
            wrong, good = codec.decode(out[: codec.size], other)
            assert not (bool(good) and bool(in_order(wrong, length))), codec.name


@MANY
@given(selections())
def test_the_bytes_depend_on_nothing_behind_the_count(drawn: tuple[int, torch.Tensor, int]) -> None:
    length, indices, count = drawn
    cleared = indices.clone()
    cleared[count:] = 0
    for codec in codecs_for(length, len(indices)):
        found = set()
        for past, chosen, as_tensor in ((0xA5, indices, False), (0x00, indices, True), (0x5A, cleared, False)):
            out = torch.full((codec.size,), past, dtype=torch.uint8)
            codec.encode(chosen, torch.tensor(count, dtype=torch.int32) if as_tensor else count, out)
            found.add(bytes(out.tolist()))
        assert len(found) == 1


@MANY
@given(selections(), st.integers(0, 2**32), st.integers(0, 3))
def test_a_device_reads_all_ranks_at_once(drawn: tuple[int, torch.Tensor, int], seed: int, flips: int) -> None:
    """Of any bytes, the same indices or the same refusal as the host's, rank by rank; what is behind them is 0."""
    length, indices, count = drawn
    source, capacity = np.random.default_rng(seed), len(indices)
    counts = [count, count, min(count, 1), capacity]
    for codec in codecs_for(length, capacity):
        size = -(-codec.size // GRAIN) * GRAIN
        messages = torch.zeros(len(counts), size + GRAIN, dtype=torch.uint8)  # something stands behind each
        for rank, held in enumerate(counts):
            codec.encode(indices, held, messages[rank, : codec.size])
            for _ in range(flips if rank and codec.size else 0):
                messages[rank, int(source.integers(codec.size))] ^= 1 << int(source.integers(8))
        rows, goods = codec.decode_rows(messages[:, : codec.size], torch.tensor(counts, dtype=torch.int32))
        assert rows.shape == (len(counts), capacity) and rows.dtype == torch.int32
        assert bool(((rows >= 0) & (rows < length)).all())
        for rank, held in enumerate(counts):
            alone, good = codec.decode(messages[rank, : codec.size], held)
            assert bool(goods[rank]) == bool(good & in_order(alone, length)), codec.name
            if goods[rank]:
                assert torch.equal(rows[rank, :held], alone) and not rows[rank, held:].any()


@MANY
@given(selections(), st.integers(0, 2**32), st.sampled_from(["random", "ones", "zeros", "flip"]))
def test_no_bytes_are_a_crash(drawn: tuple[int, torch.Tensor, int], seed: int, how: str) -> None:
    """Anything decodes to `count` numbers; what passes for good is in order, so it is safe to add at."""
    length, indices, count = drawn
    source = np.random.default_rng(seed)
    for codec in codecs_for(length, len(indices)):
        data = dirty(codec.size)[: codec.size]
        if how == "random":
            data.copy_(torch.from_numpy(source.integers(0, 256, codec.size, dtype=np.uint8)))
        elif how == "flip" and codec.size:
            codec.encode(indices, count, data)
            data[int(source.integers(codec.size))] ^= 1 << int(source.integers(8))
        else:
            data.fill_(255 if how == "ones" else 0)
        got, good = codec.decode(data, count)
        assert got.shape == (count,) and got.dtype == torch.int32
        if bool(good) and bool(in_order(got, length)):
            held = got.tolist()
            assert held == sorted(set(held)) and (not held or (held[0] >= 0 and held[-1] < length))


@pytest.mark.skipif(not native.available(), reason="the compiled loops were not built")
@MANY
@given(selections(), st.integers(0, 2**32), st.integers(0, 3))
def test_the_compiled_loops_do_what_torch_does(drawn: tuple[int, torch.Tensor, int], seed: int, flips: int) -> None:
    """The same bytes; and of any bytes, the same indices or the same refusal."""
    length, indices, count = drawn
    source = np.random.default_rng(seed)
    for codec in codecs_for(length, len(indices)):
        written, found = [], []
        for compiled in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if not compiled:
                    patch.setattr(native, "library", None)
                written.append(dirty(codec.size))
                codec.encode(indices, count, written[-1][: codec.size])
        assert torch.equal(*written), codec.name
        data = written[0][: codec.size]
        for _ in range(flips if codec.size else 0):
            data[int(source.integers(codec.size))] ^= 1 << int(source.integers(8))
        for compiled in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if not compiled:
                    patch.setattr(native, "library", None)
                got, good = codec.decode(data, count)
                found.append(got.tolist() if bool(good & in_order(got, length)) else None)
        assert found[0] == found[1], codec.name


def test_an_index_in_no_block_is_not_written_outside_the_message() -> None:
    codec = Blocks(1000, 8, 4)
    for bad in (-1, 1008, 2**31 - 1):
        out = dirty(codec.size)
        with contextlib.suppress(IndexError):
            codec.encode(torch.tensor([0, 1, 2, 3, 4, 5, 6, bad], dtype=torch.int32), 8, out[: codec.size])
        assert (out[codec.size :] == 0xA5).all()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_block_behind_the_last_one_is_refused_though_its_index_wraps_round(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2**31 elements in blocks of 2**30 there are two; number 4 would begin at 2**32, which is 0 in 32 bits."""
    if not compiled:
        monkeypatch.setattr(native, "library", None)
    codec = Blocks(2**31 - 1, 1, 30)
    data = torch.zeros(codec.size, dtype=torch.uint8)
    for block, is_good in ((0, True), (1, True), (4, False)):
        data[-1] = 1 << block
        assert bool(codec.decode(data, 1)[1]) is is_good


@pytest.mark.parametrize("density, most", [(0.1, 0.70), (0.01, 1.08), (0.001, 1.50), (0.0001, 1.94)])
def test_the_smallest_is_near_the_entropy(density: float, most: float) -> None:
    n = 2**24
    k = math.ceil(density * n)
    codec = smallest(n, k)
    entropy = (n * math.log2(n) - k * math.log2(k) - (n - k) * math.log2(n - k)) / 8 / k
    assert entropy < codec.size / k < most < 1.25 * entropy
    assert codec.size <= min(one.size for one in candidates(n, k)) + GRAIN


@settings(deadline=None)
@given(st.integers(1, 2**31 - 1), st.data())
def test_the_smallest_is_never_larger_than_the_others_or_counts_in_bytes(length: int, data: st.DataObject) -> None:
    capacity = data.draw(st.integers(0, length))
    size = -(-smallest(length, capacity).size // GRAIN)
    counted = [-(-length // 2**low) * wide + -(-capacity * low // 8) for low, wide in ((8, 1), (12, 2), (16, 4))]
    for other in (4 * capacity, -(-length // 8), *counted):
        assert size <= -(-other // GRAIN)


@pytest.mark.parametrize("length, capacity, name", [(100, 1, "int32"), (100, 0, "int32"), (96, 96, "bitmap")])
def test_which_is_taken(length: int, capacity: int, name: str) -> None:
    assert smallest(length, capacity).name == name


def test_of_equal_sizes_the_cheapest_is_taken() -> None:
    assert smallest(2**20, 4).name == "int32"  # a message is made of 16 bytes
    assert smallest(2**20, 2**20 // 100).name == "6-bit"


@MANY
@given(st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 70_001])), st.integers(0, 300))
def test_everything_takes_no_bytes_and_is_good_for_all_slots_only(length: int, count: int) -> None:
    codec, nothing = Everything(length), dirty(0)[:0]
    codec.encode(torch.arange(length, dtype=torch.int32), length, nothing)
    assert codec.size == 0 and codec.capacity == length
    for some in (length, min(count, length)):
        got, good = codec.decode(nothing, some)
        assert got.dtype == torch.int32 and got.tolist() == list(range(some))
        assert bool(good) == (some == length) and good.dim() == 0


def test_names_and_identities_differ() -> None:
    found = [*candidates(10**6, 10), Everything(10**6)]
    assert len({codec.name for codec in found}) == len({codec.identity for codec in found}) == len(found)
    assert all(0 < codec.identity < 256 for codec in found)


# -- bits -------------------------------------------------------------------------------------------------------------


@MANY
@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 100), st.integers(0, 9), st.integers(0, 2**32))
def test_packed_integers_come_back(width: int, count: int, more: int, seed: int) -> None:
    values = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**31, count).astype(np.int32))
    out = dirty(bits.bytes_of(count, width) + 2 * more)
    room = out[: len(out) - 16]
    bits.pack(values, width, room)
    assert (out[len(room) :] == 0xA5).all()
    assert torch.equal(bits.unpack(room, width, count), values & ((1 << width) - 1))
    written = np.zeros(len(room) * 8, dtype=np.uint8)
    for place in range(width):
        written[place : count * width : width] = (values.numpy() >> place) & 1
    assert np.packbits(written, bitorder="little").tolist() == room.tolist()


@MANY
@given(st.integers(0, 40), st.integers(0, 2**32), st.integers(0, 50))
def test_a_device_finds_the_same_bits(size: int, seed: int, count: int) -> None:
    data = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))
    here, (places, totals) = bits.marked(data, count), device_bits.marked(data.repeat(2, 1), count)
    for there, total in zip(places, totals, strict=True):  # of both ranks
        held = min(count, int(total))
        assert int(here[1]) == int(total) and torch.equal(here[0][:held], there[:held])
        assert (there[held:] == 8 * size).all()
    assert here[0].tolist()[: int(here[1])] == [i for i in range(8 * size) if data[i // 8] >> (i % 8) & 1][:count]


@MANY
@given(st.integers(1, 40), st.integers(0, 2**32), st.booleans())
def test_a_device_sets_the_same_bits(size: int, seed: int, dropped: bool) -> None:
    source = np.random.default_rng(seed)
    chosen = np.flatnonzero(source.random(8 * size) < 0.3).tolist() + [8 * size] * dropped
    places = torch.tensor(chosen, dtype=torch.int32)
    here, there = dirty(size)[:size], dirty(size)[:size]
    bits.mark(places, here)
    device_bits.mark(places, there)
    assert torch.equal(here, there)
    assert bits.marked(here, len(chosen) - dropped)[0].tolist() == chosen[: len(chosen) - dropped]


@pytest.mark.parametrize("codec", [Int32, Bitmap, lambda n, k: Everything(n), lambda n, k: Blocks(n, k, 8)])
def test_nothing_waits_on_a_device(codec: type[IndexCodec]) -> None:
    """A tensor without content cannot be looked at: encoding and decoding go through with shapes alone."""
    one = codec(1000, 64)
    indices = torch.empty(64, dtype=torch.int32, device="meta")
    out = torch.empty(one.size, dtype=torch.uint8, device="meta")
    one.encode(indices, torch.empty((), dtype=torch.int32, device="meta"), out)
    got, good = one.decode(out, 64)
    assert got.shape == (64,) and good.dim() == 0 and in_order(got, 1000).dim() == 0
