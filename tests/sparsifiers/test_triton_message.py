# SPDX-License-Identifier: Apache-2.0
"""A whole message in Triton's interpreter, from gradients to the update: the bits of the host, in few launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.triton_inputs import CPU, MODULES, bits, vector
from torch import Tensor

import sparsifiers
from agmerge.exchanges.message.indices import Blocks, smallest
from agmerge.tensors.arena import subtract
from sparsifiers import gpu
from sparsifiers.gpu.kernels import launching

LENGTHS, OFFSETS, N, K, W = (9000, 4000, 31), (0, 9024, 13024), 13056, 130, 3
SHAPES = ((90, 100), (24,), (40, 100), (31,), (1,))  # padding too
HEAD = 4  # words in front of a section, the count among them


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of kernels, in the order in which they are launched."""
    from sparsifiers.gpu.kernels import codec, combining, compact, compensation, edge, rows

    names: list[str] = []

    def counting(kernel: object, *arguments: object, **constants: object) -> None:
        names.append(getattr(kernel, "__name__", "?").removesuffix("_kernel"))
        launching.launch(kernel, *arguments, **constants)  # type: ignore[arg-type]

    for module in MODULES:
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    for module in (codec, combining, compact, compensation, edge, rows):
        monkeypatch.setattr(module, "launch", counting)
    yield names


def gradients(rank: int) -> list[Tensor | None]:
    return [vector("laplace", n, rank) if (rank, i) != (1, 2) else None for i, n in enumerate(LENGTHS)]


def compensated(rank: int, residual: Tensor) -> Tensor:
    """As the host does it."""
    work = torch.zeros(N)
    for gradient, offset, length in zip(gradients(rank), OFFSETS, LENGTHS, strict=True):
        place = slice(offset, offset + length)
        sparsifiers.memory("residual").compensate(work[place], residual[place], gradient)
    return work


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_updates_and_residuals_are_the_hosts(launches: list[str], rows: bool, dtype: torch.dtype) -> None:
    codec = smallest(N, K)
    assert isinstance(codec, Blocks)
    layout = gpu.IndexLayout(N, K, codec.low)
    table, row_table = gpu.TensorTable(OFFSETS, LENGTHS, CPU), gpu.RowTable(SHAPES, CPU)
    start = -(-(HEAD + layout.words) // 4) * 4  # of the values: 16 bytes
    received = torch.full((W, start + K * dtype.itemsize // 4), -1, dtype=torch.int32)
    residuals, host_update = [torch.zeros(N), vector("normal", N, 7), vector("few", N, 8)], torch.zeros(N)
    for residual in residuals:
        for offset, length, end in zip(OFFSETS, LENGTHS, (*OFFSETS[1:], N), strict=True):
            residual[offset + length : end] = 0.0

    for rank, (message, residual) in enumerate(zip(received, residuals, strict=True)):
        launches.clear()
        work, scratch = torch.zeros(N), gpu.Scratch(N, CPU)
        section = gpu.IndexSection(layout, message[HEAD : HEAD + layout.words])
        slots = gpu.Slots(torch.zeros(K, dtype=torch.int32), message[start:].view(dtype), message[2])
        gpu.compensate(table, gradients(rank), residual, work, scratch=scratch, largest=gpu.LargestKey(CPU))
        if rows:
            gpu.select_rows(work, row_table, K, 5, scratch, slots, section, commit=True)
        else:
            gpu.select_largest(work, K, scratch, slots, section, exact=True, commit=True)
        assert not scratch.is_counted and not scratch.histogram.any()
        assert len(launches) + 2 * rows == (6 if rows else 10)  # rows clear marks and section with torch's

        wanted = compensated(rank, residual)
        sparsifier = sparsifiers.get("adtopk-row" if rows else "topk")
        chosen = sparsifier.select(wanted, k=K, step=5, shapes=SHAPES).trimmed()
        sent = wanted[chosen].to(dtype)
        subtract(wanted, chosen, sent)
        assert torch.equal(slots.indices.long(), chosen) and int(message[2]) == K
        assert bits(message[start:].view(dtype)) == bits(sent)
        assert bits(work) == bits(wanted)
        host_bytes = torch.zeros(4 * layout.words, dtype=torch.uint8)
        codec.encode(slots.indices, K, host_bytes[: codec.size])
        assert torch.equal(section.words.view(torch.uint8), host_bytes)
        host_update.index_add_(0, chosen, sent.float().mul_(1 / W))

    launches.clear()
    indices, tiles = torch.zeros(W, K, dtype=torch.int32), torch.zeros(W, layout.tiles, dtype=torch.int32)
    update, good, counts = torch.full((N,), 3.0), torch.zeros(W, dtype=torch.int32), received[:, 2]
    gpu.decode_indices(received[:, HEAD : HEAD + layout.words], counts, layout, indices, good, tiles)
    gpu.add_ranks(update, indices, received[:, start:].view(dtype), counts, 1 / W)
    assert len(launches) <= 4
    assert good.all()
    assert bits(update) == bits(host_update)


def test_launches_are_as_the_table_says(launches: list[str]) -> None:
    slots, scratch = gpu.Slots.of(K, CPU), gpu.Scratch(N, CPU)
    gpu.select_largest(vector("normal", N), K, scratch, slots, exact=False, commit=True)
    assert launches == ["count_digits", "edge", "mark", "scan", "gather"]
    launches.clear()
    gpu.select_largest(vector("normal", N), K, scratch, slots, exact=True, commit=True)
    exact = ["count_digits", "edge", "mark", *["count_ties", "edge"] * 2, "settle", "scan", "gather"]
    assert launches == exact
