# SPDX-License-Identifier: Apache-2.0
"""The index codec in Triton's interpreter: the bytes of the host's messages, and what receivers make of any bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.triton_inputs import CPU, assert_same, both
from torch import Tensor

from agmerge.exchanges.message.indices import Bitmap, Blocks, IndexCodec, Int32, smallest
from sparsifiers.gpu import IndexLayout, IndexSection, Slots, decode_indices, encode_indices
from sparsifiers.gpu.layout import BITMAP, PLAIN

CASES = [  # length, capacity, low; None: what a message would take
    (100_000, 1000, None),
    (100_000, 100, None),
    (5000, 5, 10),
    (1 << 20, 700, 14),
    (1 << 24, 333, 16),
    (2_000_000_000, 50, 24),
    (2_000_000_000, 50, 30),
    (3001, 500, 2),
    (3001, 1000, BITMAP),
    (6000, 1300, BITMAP),
    (20_000, 2000, 4),
    (1, 1, 2),
    (100_000, 3, PLAIN),
    (5000, 1100, PLAIN),
]
PLACES = [0, 1, -1]  # of counts: none, one, all


def codec_of(length: int, capacity: int, low: int | None) -> tuple[IndexCodec, IndexLayout]:
    if low is None:
        codec = smallest(length, capacity)
        assert isinstance(codec, Blocks)
        low = codec.low
    else:
        others = {BITMAP: Bitmap, PLAIN: Int32}
        codec = others[low](length, capacity) if low in others else Blocks(length, capacity, low)
    return codec, IndexLayout(length, capacity, low)


def ascending(length: int, count: int, seed: int) -> Tensor:
    """Unique indices, some beside each other, the first and the last element among them."""
    rng = np.random.default_rng(seed)
    spread = rng.integers(0, length, 4 * count + 4)
    near = np.concatenate([spread, spread[: count + 1] + 1, [0, length - 1]])
    places = np.unique(near[(near >= 0) & (near < length)])
    ends = np.isin(places, [0, length - 1])
    order = np.argsort(np.where(ends, -1.0, rng.random(len(places))))
    return torch.from_numpy(np.sort(places[order[:count]]).astype(np.int32))


def host_section(codec: IndexCodec, indices: Tensor) -> Tensor:
    """The bytes of the host, in whole words."""
    padded = torch.zeros(codec.capacity, dtype=torch.int32)
    padded[: len(indices)] = indices
    section = torch.zeros(-(-codec.size // 4) * 4, dtype=torch.uint8)
    codec.encode(padded, len(indices), section[: codec.size])
    return section.view(torch.int32)


@pytest.mark.parametrize("length, capacity, low", CASES)
@pytest.mark.parametrize("count", PLACES)
def test_bytes_are_the_hosts(length: int, capacity: int, low: int | None, count: int) -> None:
    codec, layout = codec_of(length, capacity, low)
    assert layout.words == -(-codec.size // 4)
    chosen = ascending(length, capacity if count < 0 else count, capacity)

    def call() -> tuple[Tensor, ...]:
        slots = Slots.of(capacity, CPU)
        slots.indices[: len(chosen)] = chosen
        slots.count.fill_(len(chosen))
        words = torch.zeros(layout.words, dtype=torch.int32)
        encode_indices(slots.indices, slots.count, IndexSection(layout, words))
        return (words,)

    (words,) = assert_same(call)
    assert torch.equal(words, host_section(codec, chosen))


def decoded(sections: Tensor, counts: Tensor, layout: IndexLayout) -> tuple[Tensor, Tensor]:
    """What is read, 0 behind the counts, and what is right."""
    ranks = len(sections)
    guarded = torch.full((ranks + 2, layout.capacity), 12345, dtype=torch.int32)
    good, tiles = torch.full((ranks,), 7, dtype=torch.int32), torch.zeros(ranks, layout.tiles, dtype=torch.int32)
    decode_indices(sections, counts, layout, guarded[1:-1], good, tiles)
    assert (guarded[0] == 12345).all() and (guarded[-1] == 12345).all()
    live = torch.arange(layout.capacity) < counts[:, None]
    return guarded[1:-1] * live, good


@pytest.mark.parametrize("length, capacity, low", CASES)
def test_all_ranks_are_read_as_the_host_reads_them(length: int, capacity: int, low: int | None) -> None:
    codec, layout = codec_of(length, capacity, low)
    sent = [ascending(length, count, rank) for rank, count in enumerate([0, 1, capacity, capacity // 2])]
    # Sections within messages: rows farther apart than they are long, counts in a header.
    messages = torch.full((len(sent), layout.words + 9), -1, dtype=torch.int32)
    for row, indices in zip(messages, sent, strict=True):
        row[4] = len(indices)
        row[5 : 5 + layout.words] = host_section(codec, indices)
    counts = messages[:, 4]
    indices, right = assert_same(lambda: decoded(messages[:, 5 : 5 + layout.words], counts, layout))
    assert right.tolist() == [1] * len(sent)
    for row, wanted in zip(indices, sent, strict=True):
        assert torch.equal(row[: len(wanted)], wanted)


@pytest.mark.parametrize("length, capacity, low", [case for case in CASES if case[0] > 1])
def test_damage_is_found_as_the_host_finds_it(length: int, capacity: int, low: int | None) -> None:
    """Any bits, and single bits that have changed, with and without another count."""
    codec, layout = codec_of(length, capacity, low)
    rng = np.random.default_rng(length)
    good = host_section(codec, ascending(length, capacity, 1))
    rows, counts = [], []
    for turn in range(12):
        row = good.clone() if turn else torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, layout.words)).int()
        if turn > 1:
            bit = int(rng.integers(8 * codec.size))
            row[bit // 32] ^= 1 << bit % 32 if bit % 32 < 31 else -(1 << 31)
        rows.append(row)
        counts.append(capacity - (turn % 5 == 4))
    sections = torch.stack(rows)
    kernels, reference = both(lambda: decoded(sections, torch.tensor(counts, dtype=torch.int32), layout))
    pairs = zip(rows, counts, strict=True)
    host = [int(codec.decode(row.view(torch.uint8)[: codec.size], count)[1]) for row, count in pairs]
    right = kernels[1]
    assert right.tolist() == host and reference[1].tolist() == host
    assert 0 in right.tolist() and 1 in right.tolist()


def test_two_slots_that_share_a_block_must_ascend() -> None:
    codec, layout = codec_of(5000, 4, 8)
    swapped = torch.zeros(4, dtype=torch.int32)
    for places, right in [([300, 301, 302, 4999], True), ([300, 302, 301, 4999], False), ([300, 300, 301, 302], False)]:
        section = torch.zeros(4 * layout.words, dtype=torch.uint8)
        swapped[:] = torch.tensor(places)
        codec.encode(swapped, 4, section[: codec.size])
        sections, counts = section.view(torch.int32)[None], torch.tensor([4], dtype=torch.int32)
        _, found = assert_same(lambda sections=sections, counts=counts: decoded(sections, counts, layout))
        assert found.tolist() == [int(right)]


@pytest.mark.parametrize("length, low", [(2_000_000_000, 30), ((1 << 31) - 1, 28), (5000, 8)])
def test_a_mark_behind_the_last_block_is_found(length: int, low: int) -> None:
    """Also where so large an index has no place in 32 bits."""
    capacity = 3
    codec, layout = codec_of(length, capacity, low)
    good = host_section(codec, torch.tensor([0, 1, length - 1], dtype=torch.int32))
    last = layout.planes[-1] + 2 + ((length - 1) >> low)
    assert good[last // 32] >> last % 32 & 1
    for moved in range(last + 1, layout.planes[-1] + layout.marks):
        row = good.clone()
        for bit in (last, moved):
            row[bit // 32] ^= 1 << bit % 32 if bit % 32 < 31 else -(1 << 31)
        counts = torch.tensor([capacity], dtype=torch.int32)
        _, right = assert_same(lambda row=row, counts=counts: (counts, decoded(row[None], counts, layout)[1]))
        assert right.tolist() == [0]
