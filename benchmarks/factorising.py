# SPDX-License-Identifier: Apache-2.0
"""Measure what sending a matrix as two factors costs, as a multiple of adding two such matrices: the floor.

    python benchmarks/factorising.py --shapes 1024x1024 768x3072 --ranks 4 32

One thread, the compiled loops if they are there. The parts and the floor, ``a.add_(b)``, are timed in the same loop, so
that all see the same neighbours; medians. ``right`` makes the left factor for a basis of the right side, ``left`` the
other way about; ``take off`` makes the residual, ``product`` the update, "basis" orthonormalizes a factor. Adding the
residual to the gradient goes with the first projection, and taking off too where the basis is there. The last two
columns are whole steps, as those of selection.py: PowerSGD's, and the mean of both sides of ACP-SGD.
"""

from __future__ import annotations

import argparse
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import torch

# isort: split

from agmerge.exchanges.low_rank import bases
from agmerge.exchanges.low_rank.bases import LEFT, RIGHT

FLOOR = "add"
PARTS = ("add, right", "add, right, take off", "add, left", "left", "take off", "product")
BASES = ("left basis", "right basis")


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="cost of factorising a matrix, in in-place additions")
    shapes = ["1024x1024", "1024x4096", "4096x1024", "512x4608", "8192x384"]
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="ROWSxCOLUMNS")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args(argv)


def measure(n: int, m: int, rank: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of each part, for a matrix of n rows and m columns."""
    torch.manual_seed(0)
    matrix, residual, gradient, update = torch.randn(4, n, m)
    left, right = torch.randn(rank, n), torch.randn(rank, m)
    bases.orthonormalize([left, right])
    of_left, of_right = torch.empty_like(left), torch.empty_like(right)

    def add(side: str, off: bool = False) -> None:
        basis, out = (right, of_left) if side == RIGHT else (left, of_right)
        if bases.add_and_project(matrix, residual, gradient, side, basis, out, off=off) is None:
            torch.add(residual, gradient, out=matrix)
            bases.project(matrix, side, basis, out)
            if off:
                bases.take_off(matrix, out, basis)

    parts: dict[str, Callable[[], object]] = {
        FLOOR: lambda: update.add_(gradient),
        "add, right": lambda: add(RIGHT),
        "add, right, take off": lambda: add(RIGHT, off=True),
        "left basis": lambda: bases.orthonormalize([of_left]),
        "add, left": lambda: add(LEFT),
        "left": lambda: bases.project(matrix, LEFT, left, of_right),
        "right basis": lambda: bases.orthonormalize([of_right]),
        "take off": lambda: bases.take_off(matrix, left, right),
        "product": lambda: bases.product(left, right, 0.5, update),
    }
    took: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats + 2):
        for name, part in parts.items():
            start = time.perf_counter()
            part()
            took[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[2:]) for name, seconds in took.items()}


def totals(took: dict[str, float]) -> tuple[float, float]:
    """Return what a step takes with PowerSGD and with ACP-SGD, in additions."""
    powersgd = sum(took[name] for name in ("add, right", "left", "take off", "product", *BASES))
    either = took["add, right, take off"], took["add, left"] + took["take off"]
    acpsgd = (sum(either) + sum(took[name] for name in BASES)) / 2 + took["product"]
    return powersgd / took[FLOOR], acpsgd / took[FLOOR]


def table(args: Namespace) -> str:
    """Measure, and return the results as a table."""
    head = ["matrix", "rank", "add, us", *PARTS, *(f"{name}, us" for name in BASES), "PowerSGD", "ACP-SGD"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for shape in args.shapes:
        n, m = map(int, shape.split("x"))
        for rank in args.ranks:
            took = measure(n, m, min(rank, n, m), args.repeats)
            cells = [
                shape,
                str(rank),
                f"{1e6 * took[FLOOR]:.0f}",
                *(f"{took[name] / took[FLOOR]:.2f}" for name in PARTS),
            ]
            cells += [f"{1e6 * took[name]:.0f}" for name in BASES]
            cells += [f"{total:.2f}" for total in totals(took)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all, print the table."""
    torch.set_num_threads(1)
    print(table(arguments()))


if __name__ == "__main__":
    main()
