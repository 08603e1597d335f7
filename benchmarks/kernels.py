# SPDX-License-Identifier: Apache-2.0
"""Measure each loop of a step at each instruction set, as a multiple of what its bytes take at the speed of memory.

    python benchmarks/kernels.py --size 8 --density 0.01 --json kernels.json

The unit is `torch.add(residual, gradient, out=work)`, which moves 12 bytes an element; a loop's floor is the unit's
time for the bytes that the loop cannot do without, a whole cache line for each element that it reads at random. For
loops that only read it is the time of `vector.sum()`, because to read alone takes longer a byte. Units and levels are
timed in turns, so that all see the same neighbours; one thread's processor time, medians. What has no compiled loop is
torch's, for which ATEN_CPU_CAPABILITY=avx2 or default chooses the instruction set.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import numpy as np
import torch
from torch import Tensor

# isort: split

import sparsifiers
from agmerge.exchanges.message import bits
from agmerge.exchanges.message.indices import smallest
from agmerge.exchanges.message.scaled import SCALED
from agmerge.tensors.arena import subtract
from sparsifiers import Momentum, Rate, native
from sparsifiers.largest import Candidates, TensorNotes, magnitude_mask

UNIT = 12  # bytes an element of `torch.add(residual, gradient, out=work)`
LINE = 64  # bytes that an element at a random place takes
WIDTH = 1024  # of the matrix
EVERY = ("baseline", "avx2", "avx512", "neon")  # instruction sets that some machine has


@dataclass(frozen=True)
class Loop:
    """Name a loop, what it must move, and how it is run."""

    name: str
    size: float  # bytes that it must read and write
    run: Callable[[], object]
    reads: bool = False  # it writes next to nothing


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="loops at each instruction set, as multiples of their bytes' time")
    add = parser.add_argument
    add("--size", type=int, default=8, help="elements, in units of 2**20")
    add("--density", type=float, default=0.01)
    add("--repeats", type=int, default=21)
    add("--only", nargs="+", default=[""], metavar="PART", help="loops whose name contains one of these")
    add("--json", type=Path, metavar="PATH", help="write every number there")
    return parser.parse_args(argv)


def loops(n: int, density: float) -> Iterator[Loop]:
    """Yield the loops of a step over n elements of which k are sent, in its order."""
    generator = torch.Generator().manual_seed(0)
    k = math.ceil(density * n)
    residual, gradient, update = (torch.randn(n, generator=generator) for _ in range(3))
    work, velocity = torch.randn(n, generator=generator), torch.empty(n)
    yield from compensations(work, residual, gradient, velocity)

    topk, rows = (sparsifiers.get(name, density) for name in ("topk", "adtopk-row"))
    yield Loop("select: topk", 4 * n, lambda: topk.select(work, k=k), reads=True)
    for name, shape in (("rows of 1024", (WIDTH, WIDTH)), ("columns of 4096", (4 * WIDTH, WIDTH))):
        shapes = [shape] * (n // math.prod(shape))
        yield Loop(
            f"select: adtopk-row, {name}",
            4 * n,
            lambda shapes=shapes: rows.select(work, k=k, shapes=shapes),
            reads=True,
        )

    indices = topk.select(work, k=k).indices
    values = work.index_select(0, indices)
    at_places = min(LINE * k, 4 * n)
    yield Loop("gather (torch)", at_places + 8 * k, lambda: work.index_select(0, indices))
    yield Loop("commit", 2 * at_places + 8 * k, lambda: subtract(work, indices, values))
    yield Loop("add what has arrived", 2 * at_places + 8 * k, lambda: native.scatter(update, indices, values, 0.5))
    yield Loop("write what has arrived", 4 * n + 8 * k, lambda: native.write_sum(update, [(indices, values)], 0.5))
    yield Loop(
        "take in an update of all", 16 * n + 16 * k,
        lambda: native.take_in(residual, velocity, 0, [(indices, values)], 0.5, (indices, values)),
    )  # fmt: skip

    codec = smallest(n, k)
    places = torch.empty(codec.size, dtype=torch.uint8)
    yield Loop("encode indices", 4 * k + codec.size, lambda: codec.encode(indices, k, places))
    yield Loop("decode indices", 4 * k + codec.size, lambda: codec.decode(places, k))
    for value in SCALED:
        for name, vector in (("sent", values), ("all", gradient)):
            m = vector.numel()
            room = torch.empty(value.size(m), dtype=torch.uint8)
            yield Loop(
                f"encode {value.name}, {name}", 8 * m + len(room), lambda v=value, x=vector, r=room: v.encode(x, r)
            )
            yield Loop(
                f"decode {value.name}, {name}",
                4 * m + len(room),
                lambda v=value, r=room, m=m: v.decode(r, m, torch.float32),
            )  # noqa: E501
    message = torch.zeros(bits.CRC_BYTES + codec.size + 4 * k, dtype=torch.uint8)
    yield Loop("checksum (zlib)", len(message), lambda: bits.write_crc(message))


def compensations(work: Tensor, residual: Tensor, gradient: Tensor, velocity: Tensor) -> Iterator[Loop]:
    """Yield what the memories do: a sum, and a momentum before it; for gradients of 16 bits, too."""
    n, memory, dgc = work.numel(), sparsifiers.memory("residual"), sparsifiers.memory("dgc")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        other = gradient.to(dtype)
        name = "compensate: residual" + ("" if dtype == torch.float32 else f", {str(dtype).removeprefix('torch.')}")
        yield Loop(name, (8 + dtype.itemsize) * n, lambda other=other: memory.compensate(work, residual, other))
    moved = torch.randn(n)
    yield Loop("compensate: residual, and move", 16 * n, lambda: native.add(work, residual, gradient, copy=moved))
    noting = TensorNotes([(candidates_of(work), 0, n)])
    yield Loop(
        "compensate: residual, move and note", 16 * n,
        lambda: native.add(work, residual, gradient, copy=moved, noting=noting),
    )  # fmt: skip
    before = torch.randn(n)
    for name, nesterov in (("dgc", False), ("dgc, Nesterov", True)):
        momentum = Momentum(before, velocity, Rate(0.9, nesterov))
        yield Loop(f"compensate: {name}", 20 * n, lambda m=momentum: dgc.compensate(work, residual, gradient, m))
    moving = Momentum(before, velocity, Rate(0.9, False))
    yield Loop(
        "compensate: dgc, and move", 24 * n,
        lambda: native.momentum(work, residual, gradient, *moving[:2], 0.9, False, copy=moved),
    )  # fmt: skip
    yield Loop("difference", 12 * n, lambda: native.difference(work, residual, gradient))


def candidates_of(work: Tensor) -> Candidates:
    """Return what has a floor that a good hundredth of what `compensations` adds up exceeds."""
    known, k = Candidates(work.numel()), work.numel() // 100
    sizes = torch.full_like(work, 3.7).view(torch.int32).numpy()  # 1.3 % of sums of two normals exceed 0.95 of it
    known.largest(sizes, magnitude_mask(work.dtype), k, lambda: np.arange(k, dtype=np.int32))
    return known


def seconds(run: Callable[[], object]) -> float:
    """Return this thread's processor time: what others do to the processor does not count."""
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def measure(loop: Loop, unit: Loop, reading: Loop, repeats: int) -> list[tuple[float, float]]:
    """Return the seconds of the loop and those of its floor, for each level, from runs in turns.

    The unit runs before each, so that all find in the caches what the unit has left there.
    """
    by = reading if loop.reads else unit
    took: list[list[float]] = [[] for _ in native.names()]
    units: list[list[float]] = [[] for _ in took]
    for turn in range(repeats + 1):
        for level, mine in enumerate(took):
            native.set_level(level)
            before, now = seconds(unit.run), seconds(loop.run)
            if loop.reads:
                unit.run()
                before = seconds(reading.run)
            if turn:  # the first touches memory for the first time
                units[level].append(before)
                mine.append(now)
    floors = [statistics.median(some) * loop.size / by.size for some in units]
    return list(zip(map(statistics.median, took), floors, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every loop and print the table."""
    args = arguments(argv)
    torch.set_num_threads(1)
    n, names = args.size << 20, native.names()
    if not names:
        raise SystemExit("the compiled loops are not in use: see `python -m agmerge doctor`")
    first, second, third, work = (torch.randn(n) for _ in range(4))
    unit = Loop("unit", UNIT * n, lambda: torch.add(first, second, out=work))
    reading = Loop("sum", 4 * n, lambda: third.sum())
    about = {
        "machine": platform.machine(),
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "size": args.size,
        "density": args.density,
        "levels": list(names),
        "not run": [name for name in EVERY if name not in names],
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    print(f"\n| loop | bytes / unit's | {' | '.join(names)} |\n{'|---' * (2 + len(names))}|")
    rows = []
    for loop in loops(n, args.density):
        if any(part in loop.name for part in args.only):
            found = measure(loop, unit, reading, args.repeats)
            shown = " | ".join(f"{took / floor:.2f}" for took, floor in found)
            print(f"| {loop.name} | {loop.size / unit.size:.3f} | {shown} |", flush=True)
            rows.append({"loop": loop.name, "bytes": loop.size, "seconds, floor": dict(zip(names, found, strict=True))})
    if args.json:
        args.json.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
