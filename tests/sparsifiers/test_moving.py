# SPDX-License-Identifier: Apache-2.0
"""Tensors move by what arrives of them: compiled loops at every level, and torch's operations, give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import native
from sparsifiers.gpu.tables import BlockRun, BlockTable
from sparsifiers.quantising import moving
from sparsifiers.quantising.base import Quantizer, blocks_in
from sparsifiers.quantising.draws import Draws, key_within
from sparsifiers.quantising.moving import Arrived, Momentum, Moved, move_all, read_all

pytestmark = pytest.mark.usefixtures("one_thread")

COMPILED = ("eden-1", "eden-2", "eden-3", "eden-4", "int8", "int4")
NUMBER = 2**63 + 5  # of the tensor
KEYS = (7, 2**64 - 9, 123456789)  # of senders


def numbers(seed: int, numel: int) -> Tensor:
    """Return normal numbers by numpy: torch's own depend on the instructions of the processor."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel)).to(torch.float32)


def arrived(made: Quantizer, numel: int, size: int, senders: int, own: int) -> Arrived:
    """Return what senders have sent of one tensor, in up to three pieces that leave some blocks out.

    ``own`` -1: the message of this sender is in no row, and its records lie elsewhere.
    """
    blocks = blocks_in(numel, size)
    edges = sorted({0, blocks // 3, blocks // 2, blocks})
    runs, place, record = list[BlockRun](), 48, made.record_bytes(size)
    for first, stop in zip(edges, edges[1:], strict=False):
        if first == blocks // 3 and blocks > 3:
            continue  # these were not sent
        length = min(stop * size, numel) - first * size
        runs.append(BlockRun(NUMBER, size, first, stop - first, length, place, place))
        place += (stop - first) * record
    table = BlockTable(runs)
    rows = torch.zeros(senders, place, dtype=torch.uint8)
    for sender in range(senders):
        values = numbers(sender, numel)
        values[::7] = 0.0  # mixed records
        made.encode_all(table, parts(runs, values), KEYS[sender], rows[sender])
    if own >= 0:
        return Arrived(table, rows, KEYS[:senders], 0.9 / senders, table, rows[own], KEYS[own], 0.9, own)
    sent = BlockTable([run._replace(source=run.source + 16, target=run.target + 16) for run in runs])
    message = torch.zeros(place + 16, dtype=torch.uint8)
    made.encode_all(sent, parts(runs, numbers(9, numel)), 11, message)
    return Arrived(table, rows, KEYS[:senders], 0.9 / senders, sent, message, 11, 0.8)


def parts(runs: Sequence[BlockRun], values: Tensor) -> list[Tensor | None]:
    return [values[run.first * run.size : run.first * run.size + run.length] for run in runs]


def tensors(numel: int, kind: str, dtype: torch.dtype = torch.float32) -> Moved:
    """Return new tensors with the same numbers at each call."""
    squares = numbers(23, numel).square().to(dtype) if kind == "root" else None
    momentum = Momentum(numbers(22, numel).to(dtype), squares, 0.37, 1e-8)
    return Moved(numbers(20, numel), numbers(21, numel), None if kind == "none" else momentum)


def moved_of(moved: Moved) -> list[Tensor]:
    return [moved.base, moved.own, *([] if moved.momentum is None else [moved.momentum.values])]


def by_torch(made: Quantizer, records: Arrived, moved: Sequence[Moved | None]) -> None:
    before, native.library = native.library, None
    try:
        move_all(made, records, moved)
    finally:
        native.library = before


def check(made: Quantizer, numel: int, size: int, senders: int, own: int, kind: str) -> None:
    records = arrived(made, numel, size, senders, own)
    got, expected = tensors(numel, kind), tensors(numel, kind)
    count = len(records.table.runs)
    assert moving._move_in_one_pass(made, records, [got] * count)
    by_torch(made, records, [expected] * count)
    for ours, right in zip(moved_of(got), moved_of(expected), strict=True):
        assert torch.equal(ours.view(torch.int32), right.view(torch.int32)), (numel, size, senders, own, kind)


needs_loops = pytest.mark.skipif(not native.available(), reason="the compiled loops were not built")


@needs_loops
@pytest.mark.parametrize("name", COMPILED)
def test_one_pass_gives_torchs_bits(level: int, name: str) -> None:
    made = sparsifiers.quantiser(name)
    for number, numel in enumerate((1, 65, 256, 1023, 2048, 2049, 9000)):
        for kind in ("none", "plain", "root"):
            size, senders = (64, 128, 256)[number % 3], 1 + number % 3
            check(made, numel, size, senders, number % (senders + 1) - 1, kind)


@needs_loops
@pytest.mark.parametrize("own", [-1, 0, 1, 2])
def test_any_row_may_be_this_senders(level: int, own: int) -> None:
    check(sparsifiers.quantiser("eden-2"), 5000, 256, 3, own, "root")


@pytest.mark.parametrize("name", ["eden-2", "onebit", "fp8"])
def test_moved_is_what_was_read(name: str) -> None:
    """Base by the sum, own by what differs, elements in no piece not at all: by the definition, piece by piece."""
    made = sparsifiers.quantiser(name)
    records = arrived(made, 3000, 256, 2, 1)
    got, expected = tensors(3000, "root"), tensors(3000, "root")
    move_all(made, records, [got] * len(records.table.runs))
    assert expected.momentum is not None and expected.momentum.squares is not None
    for run, (total, sent) in zip(records.table.runs, read_all(made, records), strict=True):
        at = slice(run.first * run.size, run.first * run.size + run.length)
        draws = [Draws(key_within(key, NUMBER), run.first) for key in records.keys]
        where = slice(run.source, run.source + run.blocks * made.record_bytes(run.size))
        by_hand = torch.empty(run.length)
        made.decode_sum([row[where] for row in records.rows], draws, run.size, records.scale, by_hand)
        assert torch.equal(total, by_hand)
        difference = sent - total
        expected.base[at] -= total
        expected.own[at] += difference
        roots = expected.momentum.squares[at].double().sqrt() + 1e-8
        expected.momentum.values[at] -= (difference.double() * roots * 0.37).float()
    assert torch.equal(got.base, expected.base) and torch.equal(got.own, expected.own)
    assert got.momentum is not None
    torch.testing.assert_close(got.momentum.values, expected.momentum.values, rtol=1e-6, atol=1e-6)


@needs_loops
def test_what_the_loops_cannot_read_is_left_to_torch() -> None:
    """Nothing has changed then: a moment in 64 bits, a tensor with gaps, and a quantizer without loops."""
    made = sparsifiers.quantiser("eden-2")
    records = arrived(made, 1000, 256, 2, 0)
    count = len(records.table.runs)
    gaps = tensors(1000, "root")._replace(base=numbers(20, 2000)[::2])
    wide = tensors(1000, "root", torch.float64)
    for moved in (gaps, wide):
        before = [each.clone() for each in moved_of(moved)]
        assert not moving._move_in_one_pass(made, records, [moved] * count)
        assert all(map(torch.equal, moved_of(moved), before))
        move_all(made, records, [moved] * count)
        assert not any(map(torch.equal, moved_of(moved), before))
    other = sparsifiers.quantiser("fp8")
    assert not moving._move_in_one_pass(other, arrived(other, 1000, 256, 2, 0), [tensors(1000, "root")] * count)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_loops), False])
def test_pieces_of_no_tensor_move_nothing(compiled: bool) -> None:
    made = sparsifiers.quantiser("eden-2")
    records = arrived(made, 4000, 256, 2, 0)
    count = len(records.table.runs)
    some, every = tensors(4000, "root"), tensors(4000, "root")
    (move_all if compiled else by_torch)(made, records, [None, some, *[None] * (count - 2)])
    move_all(made, records, [every] * count)
    run = records.table.runs[1]
    inside = torch.zeros(4000, dtype=torch.bool)
    inside[run.first * run.size : run.first * run.size + run.length] = True
    for ours, all_moved, before in zip(moved_of(some), moved_of(every), moved_of(tensors(4000, "root")), strict=True):
        assert torch.equal(ours[inside], all_moved[inside]) and torch.equal(ours[~inside], before[~inside])
