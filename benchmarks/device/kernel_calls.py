# SPDX-License-Identifier: Apache-2.0
"""Every kernel in every form: calls as the library makes them, on the host's tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sparsifiers import gpu
from sparsifiers.gpu import records
from sparsifiers.gpu.kernels import combining
from sparsifiers.gpu.tables import BlockRun, BlockTable
from sparsifiers.quantising.base import blocks_in
from sparsifiers.quantising.draws import Draws
from sparsifiers.quantising.eden import Eden

CPU, N, K, W = torch.device("cpu"), 1 << 16, 656, 8


def calls() -> Iterator[str]:
    """Call everything; says what before it is called."""
    for dtype in (torch.float32, torch.bfloat16):
        for form in ("plain", "unaligned", "uncounted", "momentum", "nesterov", "whole"):
            yield f"{str(dtype).removeprefix('torch.')}, {form}"
            home, given = torch.zeros(N + 8, dtype=dtype), slice(1, 40_001) if form == "unaligned" else slice(40_000)
            gradients = [home[given], None]
            momenta = gpu.Momenta(torch.zeros(N), torch.zeros(N), 0.9, form == "nesterov")
            gpu.compensate(
                gpu.TensorTable([0, 40_000], [40_000, 20_000], CPU),
                gradients,
                None if form == "whole" else torch.zeros(N),
                torch.zeros(N),
                largest=gpu.LargestKey(CPU),
                scratch=None if form in ("whole", "uncounted") else gpu.Scratch(N, CPU),
                momenta=momenta if form in ("momentum", "nesterov") else None,
            )
    for wire in (torch.float32, torch.float16, torch.bfloat16):
        for exact in (False, True):
            yield f"{str(wire).removeprefix('torch.')}, {'exact' if exact else 'one digit'}"
            slots, momentum = gpu.Slots.of(K, CPU, wire), torch.zeros(N) if exact else None
            layout = gpu.IndexLayout(N, K, 14 if exact else 6)
            section = gpu.IndexSection(layout, torch.zeros(layout.words, dtype=torch.int32))
            work, scratch = torch.zeros(N), gpu.Scratch(N, CPU)
            gpu.select_largest(work, K, scratch, slots, section, exact=exact, commit=exact, momentum=momentum)
    yield "rows"
    table = gpu.RowTable([(256, 256)], CPU)
    gpu.select_rows(torch.zeros(N), table, K, 0, gpu.Scratch(N, CPU), gpu.Slots.of(K, CPU), commit=True)
    for low in (-1, 0, 6, 16, 30):
        yield f"low {low}"
        layout = gpu.IndexLayout(N, K, low)
        counts, out = torch.zeros(W, dtype=torch.int32), torch.zeros(W, K, dtype=torch.int32)
        section = gpu.IndexSection(layout, torch.zeros(layout.words, dtype=torch.int32))
        for count in (K, torch.zeros((), dtype=torch.int32)):
            gpu.encode_indices(torch.zeros(K, dtype=torch.int32), count, section)
        words, tiles = (torch.zeros(W, n, dtype=torch.int32) for n in (layout.words + 7, layout.tiles))
        gpu.decode_indices(words[:, : layout.words], counts, layout, out, torch.zeros(W, dtype=torch.int32), tiles)
    for ranks, length in ((W, N), (W, combining.ENOUGH), (256, N)):
        for wire in (torch.float32, torch.bfloat16):
            yield f"{ranks} ranks, {length} elements, {str(wire).removeprefix('torch.')}"
            indices, counts = torch.zeros(ranks, K, dtype=torch.int32), torch.zeros(ranks, dtype=torch.int32)
            gpu.add_ranks(torch.zeros(length), indices, torch.zeros(ranks, K, dtype=wire), counts, 0.125)
    for wire in (torch.float32, torch.bfloat16):
        yield f"whole, {str(wire).removeprefix('torch.')}"
        gpu.add_whole(torch.zeros(N), torch.zeros(W, N, dtype=wire), 0.125)
    yield "heads"
    heads, figures = torch.zeros(W, 20, dtype=torch.int32), torch.zeros(W, 4, dtype=torch.int64)
    gpu.merge_heads(heads, figures, 3, 5, (heads[0], figures[0]), free=4, used=9)
    for dtype in (torch.float32, torch.bfloat16):
        for bits in records.BITS:
            for size in (64, 128, 256):
                yield f"{str(dtype).removeprefix('torch.')}, {bits} bits, blocks of {size}"
                quantised(bits, size, dtype, N - 3, senders=W)
    for bits in records.BITS:
        yield f"{bits} bits, blocks of all sizes"
        quantised_together(Eden(bits))


def quantised_together(quantiser: Eden) -> None:
    """Quantise tensors with blocks of all sizes, read the sums of some messages, and quantise these."""
    table = BlockTable([BlockRun(size, size, 0, 100, 100 * size - 3) for size in (64, 128, 256)])
    tensors = [torch.zeros(run.length) for run in table.runs]
    rows, again = torch.zeros(W, 1 << 15, dtype=torch.uint8), torch.zeros(1 << 15, dtype=torch.uint8)
    quantiser.encode_all(table, tensors, 7, again, torch.zeros(1, dtype=torch.float64))
    quantiser.decode_all(table, rows, [7] * W, 0.125, tensors)
    quantiser.encode_sum_all(table, rows, [7] * W, 0.125, quantiser, 7, again)


def quantised(bits: int, size: int, dtype: torch.dtype, length: int, senders: int) -> None:
    """Quantise, read the sum of some messages, and quantise that."""
    blocks, record = blocks_in(length, size), Eden(bits).record_bytes(size)
    messages, draws = list(torch.zeros(senders, blocks * record, dtype=torch.uint8)), [Draws(7 * N)] * senders
    squares, again = torch.zeros(1, dtype=torch.float64), torch.zeros(blocks * record, dtype=torch.uint8)
    records.encode(torch.zeros(length, dtype=dtype), size, draws[0], messages[0], squares, bits)
    records.decode_sum(messages, draws, size, 0.125, torch.zeros(length, dtype=dtype), bits)
    records.encode_sum(messages, draws, size, 0.125, Draws(3 * N), again, bits, (bits, record))


def calls_of_one() -> Iterator[str]:
    """Call everything for one element, one slot and one rank."""
    yield "one"
    table, rows = gpu.TensorTable([0], [1], CPU), gpu.RowTable([(1,)], CPU)
    scratch, slots, work = gpu.Scratch(1, CPU), gpu.Slots.of(1, CPU), torch.zeros(1)
    gpu.compensate(table, [None], work, torch.zeros(1), scratch=scratch, largest=gpu.LargestKey(CPU))
    gpu.select_rows(work, rows, 1, 0, scratch, slots, commit=True)
    for low in (-1, 0, 2):
        layout, count = gpu.IndexLayout(1, 1, low), torch.zeros(1, dtype=torch.int32)
        words, tiles = torch.zeros(1, layout.words, dtype=torch.int32), torch.zeros(1, layout.tiles, dtype=torch.int32)
        section = gpu.IndexSection(layout, words[0])
        gpu.select_largest(work, 1, scratch, slots, section, exact=True, commit=True)
        gpu.encode_indices(slots.indices, slots.count, section)
        gpu.decode_indices(words, count, layout, torch.zeros(1, 1, dtype=torch.int32), count, tiles)
    gpu.add_ranks(work, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int32), 0.5)
    quantised(2, 64, torch.float32, 1, senders=1)
