"""The cost of sending a matrix as two factors, as a multiple of adding two such matrices: the floor.

    python benchmarks/factorising.py --shapes 1024x1024 768x3072 --ranks 4 32

One thread. The parts and the floor, ``a.add_(b)``, are timed in the same loop, so that all see the same neighbours;
medians. ``right`` makes the left factor for a basis of the right side, ``left`` the other way about; ``take off`` makes
the residual, ``product`` the update. Orthonormalizing a factor, "basis", is in microseconds: it takes so little.
PowerSGD takes all of it in a step. ACP-SGD takes one projection and one basis, of either side every other step: half of
both on average. What every compressor does, adding the residual to the gradient, is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agmerge.exchanges.low_rank import factors  # noqa: E402  (found only through the line above)

FLOOR, PROJECTIONS, BASES = "add", ("right", "left"), ("left basis", "right basis")
OTHERS = ("take off", "product")  # of either method, in every step


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
    matrix, gradient, update = torch.randn(n, m), torch.randn(n, m), torch.empty(n, m)
    left, right = torch.randn(rank, n), torch.randn(rank, m)
    factors.orthonormalize([left, right])
    spare, other = torch.empty_like(left), torch.empty_like(right)
    parts: dict[str, Callable[[], object]] = {
        FLOOR: lambda: matrix.add_(gradient),
        "right": lambda: factors.project(matrix, factors.RIGHT, right, spare),
        "left basis": lambda: factors.orthonormalize([spare]),
        "left": lambda: factors.project(matrix, factors.LEFT, left, other),
        "right basis": lambda: factors.orthonormalize([other]),
        "take off": lambda: factors.take_off(matrix, left, right),
        "product": lambda: factors.product(left, right, 0.5, update),
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
    both, each = sum(took[name] for name in (*PROJECTIONS, *BASES)), sum(took[name] for name in OTHERS)
    return (both + each) / took[FLOOR], (both / 2 + each) / took[FLOOR]


def table(args: Namespace) -> str:
    """Measure, and return the results as a table."""
    parts = (*PROJECTIONS, *OTHERS)
    head = ["matrix", "rank", "add, us", *parts, *(f"{name}, us" for name in BASES), "PowerSGD", "ACP-SGD"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for shape in args.shapes:
        n, m = map(int, shape.split("x"))
        for rank in args.ranks:
            took = measure(n, m, min(rank, n, m), args.repeats)
            cells = [
                shape,
                str(rank),
                f"{1e6 * took[FLOOR]:.0f}",
                *(f"{took[name] / took[FLOOR]:.2f}" for name in parts),
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
