# SPDX-License-Identifier: Apache-2.0
"""The cost of sparsifying one gradient, as a multiple of adding two vectors of its length: the floor.

    python benchmarks/selection.py --sizes 16 --densities 0.01 --json selection.json

A step compensates, selects, gathers the values and commits them, with error feedback over as many steps as it
takes for thresholds and phases to be in their steady state. Every step has another gradient, made beforehand;
the floor, `a.add_(b)`, is timed in the same loop, so that both see the same neighbours. One thread; medians of an
even number of steps, odd and even ones apart and then averaged, because some sparsifiers alternate.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import numpy as np
import torch
from torch import Tensor

# isort: split

import sparsifiers
from agmerge.tensors.arena import subtract
from sparsifiers import native

WIDTH = 1024  # of the matrices that the vector is made of
GRADIENTS = 3
PARTS = ("compensate", "select", "gather", "commit")
Step = Callable[[Tensor, int], dict[str, float]]


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="cost of one sparsified step, in in-place additions")
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[1, 16, 64], help="elements, in units of 2**20")
    add("--densities", type=float, nargs="+", default=[0.1, 0.01, 0.001])
    add("--data", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    add("--names", nargs="+", default=None, help="of sparsifiers and peers; all if left out")
    add("--steps", type=int, default=10, help="timed steps, an even number")
    add("--warm-up", type=int, default=20, help="steps before these, an even number: the steady state")
    add("--slow", type=float, default=20.0, help="a peer that takes so many seconds a step is left out")
    add("--kernel", choices=["both", "with", "without"], default="both", help="the compiled loops")
    add("--json", type=Path, metavar="PATH", help="write every number there")
    args = parser.parse_args(argv)
    for name in ("steps", "warm_up"):
        if getattr(args, name) % 2 or getattr(args, name) < 2:
            parser.error(f"--{name.replace('_', '-')} must be even and at least 2: some sparsifiers alternate")
    return args


# -- data -----------------------------------------------------------------------------------------------------------


def shapes_of(n: int) -> list[tuple[int, ...]]:
    """Matrices, wide and tall, and vectors, as networks have them: n elements in all."""
    side = math.isqrt(n // 4)
    wide, tall = max(1, side // 2), 2 * side
    shapes: list[tuple[int, ...]] = [(wide, tall), (tall, wide), (WIDTH,)]
    left = n - 2 * wide * tall - WIDTH
    rows = left // WIDTH
    return [*shapes, (rows, WIDTH), *([(left - rows * WIDTH,)] if left > rows * WIDTH else [])]


def gaussian(n: int, generator: torch.Generator) -> Tensor:
    """Normal, every 1024 elements with a scale of their own, log-normal."""
    scales = torch.randn(-(-n // WIDTH), generator=torch.Generator().manual_seed(0)).exp_()
    vector = torch.randn(n, generator=generator)
    for start in range(0, n, WIDTH):
        vector[start : start + WIDTH] *= scales[start // WIDTH]
    return vector


def mostly_zero(n: int, generator: torch.Generator) -> Tensor:
    """99.5 % zeros, at the same places in every gradient; the others normal."""
    kept = torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.005
    return torch.randn(n, generator=generator).mul_(kept)


def ties(n: int, generator: torch.Generator) -> Tensor:
    """Normal, rounded to multiples of a half: some fifteen values."""
    return torch.randn(n, generator=generator).mul_(2).round_().div_(2)


MAKERS = {"gaussian": gaussian, "zeros 99.5 %": mostly_zero, "ties": ties}


# -- steps ----------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds of this thread between the calls, by name: what others do to the processor does not count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.thread_time()

    def stop(self, name: str) -> None:
        """What passed since the last call is for `name`."""
        now = time.thread_time()
        self.seconds[name] = now - self._last
        self._last = now


def ours(name: str, density: float, n: int) -> Step:
    """A step with a sparsifier of the library, residuals in two slabs, as in the arena."""
    sparsifier, memory = sparsifiers.get(name, density), sparsifiers.memory("residual")
    slabs = [torch.zeros(n), torch.zeros(n)]
    shapes = shapes_of(n)

    def step(gradient: Tensor, number: int) -> dict[str, float]:
        residual, work = slabs[number % 2], slabs[1 - number % 2]
        clock = Clock()
        memory.compensate(work, residual, gradient)
        clock.stop("compensate")
        chosen = sparsifier.select(work, key="all", step=number, shapes=shapes)
        clock.stop("select")
        values = work.index_select(0, chosen.indices)
        if int(chosen.count) < len(values):
            values[int(chosen.count) :] = 0.0
        clock.stop("gather")
        subtract(work, chosen.indices, values)
        clock.stop("commit")
        return clock.seconds

    return step


def peer(select: Callable[[Tensor, int], Tensor], density: float, n: int) -> Step:
    """A step with somebody else's selection and the fastest rest that torch has: one slab, added to in place."""
    work = torch.zeros(n)
    k = sparsifiers.budget(density, n)

    def step(gradient: Tensor, number: int) -> dict[str, float]:
        clock = Clock()
        work.add_(gradient)
        clock.stop("compensate")
        indices = select(work, k)
        clock.stop("select")
        work.index_select(0, indices)
        clock.stop("gather")
        work.index_fill_(0, indices, 0.0)
        clock.stop("commit")
        return clock.seconds

    return step


def torch_topk(work: Tensor, k: int) -> Tensor:
    """torch.topk, unsorted, on the absolute values."""
    return work.abs().topk(k, sorted=False).indices


def argpartition(work: Tensor, k: int) -> Tensor:
    """The same with numpy's."""
    return torch.from_numpy(np.argpartition(np.abs(work.numpy()), len(work) - k)[len(work) - k :])


def published(density: float, n: int) -> Step:
    """As the published compressors write it: every intermediate result is a fresh tensor of full size."""
    k = sparsifiers.budget(density, n)
    residual = torch.zeros(n)

    def step(gradient: Tensor, number: int) -> dict[str, float]:
        nonlocal residual
        clock = Clock()
        work = 1.0 * residual + 1.0 * gradient
        clock.stop("compensate")
        indices = work.abs().topk(k, sorted=False).indices
        clock.stop("select")
        values = torch.gather(work, 0, indices)
        clock.stop("gather")
        sent = torch.zeros(n).scatter_(0, indices, values)
        residual = work - sent
        clock.stop("commit")
        return clock.seconds

    return step


PEERS: dict[str, Callable[[float, int], Step]] = {
    "[torch.topk of abs, in place]": lambda density, n: peer(torch_topk, density, n),
    "[numpy argpartition, in place]": lambda density, n: peer(argpartition, density, n),
    "[torch.topk, fresh temporaries]": published,
}


# -- measuring ------------------------------------------------------------------------------------------------------


def middle(rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the odd steps and over the even steps, averaged."""
    halves = [rows[0::2], rows[1::2]]
    return {part: statistics.fmean(statistics.median(row[part] for row in half) for half in halves) for part in rows[0]}


def measure(make: Callable[[], Step], gradients: list[Tensor], args: Namespace) -> dict[str, float] | None:
    """Multiples of the floor in the steady state, and of two first steps on bare gradients; None if it is too slow."""
    a, b = torch.zeros_like(gradients[0]), gradients[0]
    first = sum(make()(gradients[0], 1).values())
    if first > args.slow:
        return None
    warm_up = args.warm_up if first < 0.3 else 2  # what is so slow remembers nothing
    bare, rows, step = [], [], make()
    for number in range(warm_up + args.steps):
        clock = Clock()
        a.add_(b)
        clock.stop("floor")
        row = {**step(gradients[number % len(gradients)], number), **clock.seconds}
        row["total"] = sum(row[part] for part in PARTS)
        (rows if number >= warm_up else bare).append(row)
    result = middle(rows)
    floor = result.pop("floor")
    multiples = {part: seconds / floor for part, seconds in result.items()}
    early = middle(bare[:2])
    return {**multiples, "first select": early["select"] / floor, "floor ms": 1e3 * floor}


def runs(args: Namespace) -> Iterator[dict[str, Any]]:
    """One dict for each combination, as soon as it is measured."""
    wanted = args.names or [*sparsifiers.names(), *PEERS]
    for millions in args.sizes:
        n = millions << 20
        for data in args.data:
            generator = torch.Generator().manual_seed(1)
            gradients = [MAKERS[data](n, generator) for _ in range(GRADIENTS)]
            for density in args.densities:
                for name in wanted:
                    if name in PEERS and not native.available() and args.kernel == "both":
                        continue  # it was measured with the compiled loops, which it does not use
                    make = (lambda: PEERS[name](density, n)) if name in PEERS else (lambda: ours(name, density, n))  # noqa: B023
                    found = measure(make, gradients, args)
                    if found is not None:
                        key = {"n": n, "data": data, "density": density, "name": name, "kernel": native.available()}
                        yield {**key, **found}


def collect(args: Namespace) -> list[dict[str, Any]]:
    """All runs, with and without the compiled loops: these are chosen when a process starts."""
    found = []
    for setting in {"both": ("", "off"), "with": ("",), "without": ("off",)}[args.kernel]:
        command = [sys.executable, __file__, *sys.argv[1:]]
        environment = {**os.environ, "AGMERGE_KERNEL": setting, "AGMERGE_BENCHMARK_PART": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found.append(json.loads(line))
                print(".", end="", file=sys.stderr, flush=True)
        if process.returncode:
            raise SystemExit(process.returncode)
    print(file=sys.stderr)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """The results, for people: markdown."""
    lines = []
    for n, data, density in dict.fromkeys((run["n"], run["data"], run["density"]) for run in found):
        group = [run for run in found if (run["n"], run["data"], run["density"]) == (n, data, density)]
        floor = statistics.median(run["floor ms"] for run in group)
        columns = [*PARTS, "total", "first select"]
        lines += [f"\n### {n >> 20} M elements, {data}, density {density:g}; 1 = one in-place add = {floor:.2f} ms\n"]
        lines += ["| | loops | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
        for run in group:
            loops = "theirs" if run["name"] in PEERS else "compiled" if run["kernel"] else "numpy"
            lines.append(f"| {run['name']} | {loops} | " + " | ".join(f"{run[c]:.2f}" for c in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure everything, print the table."""
    args = arguments()
    torch.set_num_threads(1)
    if os.environ.get("AGMERGE_BENCHMARK_PART"):
        for run in runs(args):
            print(json.dumps(run), flush=True)
        return
    found = collect(args)
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, numpy {np.__version__}",
        "command": shlex.join(["python", "benchmarks/selection.py", *sys.argv[1:]]),
    }
    print("\n".join(f"{key}: {value}  " for key, value in facts.items()))
    print("`first select`: in the first two steps, on bare gradients; the other columns: with error feedback.")
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps({**facts, "runs": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
