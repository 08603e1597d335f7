"""What does an agreed mask leave behind, beside own choices? The energy of residuals after some steps, in memory.

    python benchmarks/masks.py

Gradients are normal, times a log-normal scale of each element, with a given correlation between ranks; ranks are
threads of one in-memory group that take real steps. Energies are in units of one gradient's, means over ranks. Two
columns are at the density, in brackets, at which as many bytes move as with ``sparse`` at 1 %, indices of four bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import agmerge
import agmerge.testing

SHAPE, STEPS, DENSITY = (200, 100), 60, 0.01
CASES = [(4, 0.0), (4, 0.9), (16, 0.0), (16, 0.9)]


def equal_bytes(workers: int, *, votes: bool) -> float:
    """The density at which an agreed mask receives as many bytes as ``sparse`` does at ``DENSITY``."""
    sparse = 8 * (workers - 1)
    masked = (8 + (4 if votes else 0)) * (workers - 1) / workers
    return DENSITY * sparse / masked


def energy(workers: int, correlation: float, **options: Any) -> float:
    """Of the residuals after ``STEPS``, in units of one gradient's."""
    scale = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).exp()

    def gradient(rank: int, step: int) -> torch.Tensor:
        both = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1000 * step))
        own = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1000 * step + 1 + rank))
        return scale * (correlation**0.5 * both + (1 - correlation) ** 0.5 * own)

    def body(rank: int) -> float:
        weight = nn.Parameter(torch.zeros(SHAPE))
        inner = torch.optim.SGD([weight], lr=0.0)
        optimizer = agmerge.DistributedOptimizer(inner, [("weight", weight)], merging="single", **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            (weight * gradient(rank, step)).sum().backward()
            optimizer.step()
        kept = optimizer.state_dict()["agmerge"]["residuals"]["weight"]
        return float(kept.square().sum()) / float(scale.square().sum())

    return sum(agmerge.testing.run(workers, body)) / workers


def main() -> None:
    """Print the table."""
    print("| W, correlation | `sparse` 1 % | vote 1 % | `randomk` 1 % | vote, equal bytes | `randomk`, equal bytes |")
    print("|---|---|---|---|---|---|")
    for workers, correlation in CASES:
        vote, drawn = equal_bytes(workers, votes=True), equal_bytes(workers, votes=False)
        cells = [
            f"{energy(workers, correlation, compression=name, exchange=exchange, density=density):.2g}{note}"
            for name, exchange, density, note in (
                ("topk", "sparse", DENSITY, ""),
                ("topk", "masked", DENSITY, ""),
                ("randomk", "masked", DENSITY, ""),
                ("topk", "masked", vote, f" ({vote:.1%})"),
                ("randomk", "masked", drawn, f" ({drawn:.1%})"),
            )
        ]
        print(f"| {workers}, {correlation:g} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
