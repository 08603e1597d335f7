# SPDX-License-Identifier: Apache-2.0
"""Checks 1 to 3 of ``benchmarks/gpu.py``: memory's bandwidth, the kernels alone, and every compressor's selection."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import sparsifiers
from device.gpu_bench import Bench
from device.gpu_figures import LARGE, Figure, of_bandwidth, of_compressor, of_kernels
from sparsifiers.gpu.tables import BlockRun, BlockTable
from sparsifiers.quantising.draws import key_of

DENSITIES = (0.1, 0.01, 0.001)
RANKS = 8  # whose messages K4 adds
MOST_KTH = 1_000_000  # elements: torch.kthvalue takes half a second for 100 million, which a single block looks through
Calls = dict[str, Callable[[], Any]]


def unit(bench: Bench, n: int) -> float:
    """Measure U(n): microseconds of one add."""
    r, g, w = (torch.zeros(n, device=bench.device) for _ in range(3))
    return bench.micros(lambda: torch.add(r, g, out=w))


def bandwidth(bench: Bench) -> Iterator[Figure]:
    """Run check 1: copy, read, add."""
    for n in bench.sizes:
        yield from of_bandwidth(n, passes(bench, n))


def passes(bench: Bench, n: int) -> dict[str, tuple[float, float]]:
    """Measure microseconds and bytes of each way to go over memory."""
    r, g, w = (torch.zeros(n, device=bench.device) for _ in range(3))
    return {
        "copy": (bench.micros(lambda: w.copy_(r)), 8.0 * n),
        "read": (bench.micros(lambda: r.sum()), 4.0 * n),
        "add": (bench.micros(lambda: torch.add(r, g, out=w)), 12.0 * n),
    }


def kernel_calls(gradient: Tensor, k: int, ranks: int = RANKS) -> Calls:
    """Hold the kernels of the library, ready to be called one by one, for a merge buffer with this gradient alone.

    K3 compacts what K1 and K2 found here, and K4 returns the sum. Nothing else in this benchmark knows how kernels are
    called.
    """
    from sparsifiers import gpu

    n, device = gradient.numel(), gradient.device
    table, scratch, largest = gpu.TensorTable([0], [n], device), gpu.Scratch(n, device), gpu.LargestKey(device)
    slots = gpu.Slots.of(k, device)
    residual, work, update = (torch.zeros(n, device=device) for _ in range(3))

    def compensate() -> None:
        scratch.forget()  # else counts of the same elements would add up, to more than 31 bits
        gpu.compensate(table, [gradient], residual, work, scratch=scratch, largest=largest)

    def select(commit: bool = True, exact: bool = False) -> None:
        gpu.select_largest(work, k, scratch, slots, exact=exact, commit=commit)

    def compact() -> None:
        gpu.mark(work, scratch)
        gpu.gather(work, slots, scratch, commit=False)  # else there was less to find each time

    def add() -> Tensor:
        gpu.add_ranks(update, indices, values, counts, 1 / ranks)
        return update

    compensate()
    select(commit=False)
    each = 1 / torch.arange(3, 3 + ranks, device=device).unsqueeze(1)  # sums of these depend on their order
    indices, values = slots.indices.expand(ranks, k).contiguous(), slots.values * each
    counts = slots.count.expand(ranks).contiguous()
    return {
        "K1": compensate,
        "K3": compact,
        "K4": add,
        "K1+K2+K3": lambda: (compensate(), select()),
        "K1+K2+K3, exact": lambda: (compensate(), select(exact=True)),
        "K2": lambda: gpu.find_edge(k, 0, scratch),
    }


def kernels(bench: Bench) -> Iterator[Figure]:
    """Run check 2: K1 to K4."""
    for n in bench.sizes:
        one = unit(bench, n)
        for data, make in bench.data().items():
            for density in DENSITIES if data == "normal" else (0.01,):
                calls = kernel_calls(make(n), max(1, int(density * n)))
                took = {name: bench.micros(call) for name, call in calls.items()}
                if n in LARGE and density != 0.01:
                    took.pop("K4")  # its limit is of 1 %
                yield from of_kernels(n, f"{data}, {density:g}", took, one)


def compressors(bench: Bench) -> Iterator[Figure]:
    """Run check 3: every compressor as it is called, beside what torch has."""
    for n in bench.sizes:
        one, k, vector = unit(bench, n), max(1, n // 100), bench.trained(n)
        for name, call in peers(vector, k).items():
            yield Figure(3, f"{name}, {n:,}", bench.micros(call) / one, "U")
        for name in sparsifiers.names():
            select = selection(name, vector, k)
            judged = in_kernels(name, vector)
            yield from of_compressor(n, name, bench.micros(select), bench.launches(select), one, judged=judged)
        yield from quantiser(bench, n, one)


def quantiser(bench: Bench, n: int, one: float) -> Iterator[Figure]:
    """Time the default's quantiser: a message is written, one is read, and those of all ranks are added up.

    In a step of W ranks a rank writes n elements, adds up n / W, and reads n.
    """
    chosen, size, vector = sparsifiers.quantiser("eden-4"), 256, bench.normal(n)
    table, keys = BlockTable([BlockRun(1, size, 0, -(-n // size), n)]), [key_of(1, rank) for rank in range(RANKS)]
    rows = torch.zeros(RANKS, -(-n // size) * chosen.record_bytes(size), dtype=torch.uint8, device=bench.device)
    squares = torch.zeros(1, dtype=torch.float64, device=bench.device)
    for row, key in zip(rows, keys, strict=True):
        chosen.encode_all(table, [vector], key, row)
    again, read = torch.zeros_like(rows[0]), torch.zeros_like(vector)
    calls: Calls = {
        "written": lambda: chosen.encode_all(table, [vector], keys[0], again, squares),
        "read": lambda: chosen.decode_all(table, rows[:1], keys[:1], 1.0, [read]),
        f"sum of {RANKS} written": lambda: chosen.encode_sum_all(table, rows, keys, 0.125, chosen, keys[0], again),
    }
    for what, call in calls.items():
        micros = bench.micros(call)
        yield Figure(3, f"eden-4, {n:,}: {what}", micros / one, f"U = {micros:.3g} us")


def peers(vector: Tensor, k: int) -> Calls:
    """Time what torch has for the same."""
    found: Calls = {
        "torch.topk": lambda: vector.abs().topk(k, sorted=False),
        "torch.sort": lambda: vector.abs().sort(),
    }
    if vector.numel() <= MOST_KTH:
        found["torch.kthvalue"] = lambda: vector.abs().kthvalue(vector.numel() - k + 1)
    return found


def in_kernels(name: str, vector: Tensor) -> bool:
    """Return whether kernels of the library make the compressor's selections of ``vector``."""
    from sparsifiers import gpu

    return sparsifiers.get(name, 0.01).has_kernels and gpu.has_kernels(vector)


def selection(name: str, vector: Tensor, k: int) -> Callable[[], sparsifiers.Selection]:
    """Do the next step of the compressor ``name``, as often as it is called; what kernels keep is kept, as in training.

    There K1 has counted what the first launch of kernels counts here.
    """
    from sparsifiers import gpu

    steps, chosen = itertools.count(), sparsifiers.get(name, 0.01)
    shapes = [(vector.numel() // 1000, 1000)]
    scratch = gpu.Scratch(vector.numel(), vector.device) if in_kernels(name, vector) else None

    def select() -> sparsifiers.Selection:
        made = chosen.select(vector, k=k, key="all", step=next(steps), shapes=shapes, scratch=scratch)
        return sparsifiers.Selection(made.indices, made.count)  # looked at: not later

    return select
