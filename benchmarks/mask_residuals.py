# SPDX-License-Identifier: Apache-2.0
"""What does an agreed mask leave behind, beside own choices? The energy of residuals after some steps, in memory.

    python benchmarks/mask_residuals.py
    python benchmarks/mask_residuals.py --wires    # the same of exchanges and value codecs

Gradients are normal, times a log-normal scale of each element, with a given correlation between ranks; ranks are
threads of one in-memory group that take real steps. Energies are in units of one gradient's, means over ranks. Two
columns are at the density, in brackets, at which as many bytes move as with ``sparse`` at 1 %, indices of four bytes.
With ``--wires`` the energy of the mean of all ranks' residuals is in brackets: what the sum of gradients lacks.
"""

from __future__ import annotations

import sys
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import torch
from torch import nn

# isort: split

import agmerge
import agmerge.testing

SHAPE, STEPS, DENSITY = (200, 100), 60, 0.01
LARGE = (200, 500)  # of which 1 % are several blocks of a codec
CASES = [(4, 0.0), (4, 0.9), (16, 0.0), (16, 0.9)]


def equal_bytes(workers: int, *, votes: bool) -> float:
    """The density at which an agreed mask receives as many bytes as ``sparse`` does at ``DENSITY``."""
    sparse = 8 * (workers - 1)
    masked = (8 + (4 if votes else 0)) * (workers - 1) / workers
    return DENSITY * sparse / masked


def energies(shape: tuple[int, int], workers: int, correlation: float, **options: Any) -> tuple[float, float]:
    """Return the energy of the residuals after ``STEPS``, and of their mean, in units of one gradient's."""
    scale = torch.randn(shape, generator=torch.Generator().manual_seed(0)).exp()

    def gradient(rank: int, step: int) -> torch.Tensor:
        both = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step))
        own = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + 1 + rank))
        return scale * (correlation**0.5 * both + (1 - correlation) ** 0.5 * own)

    def body(rank: int) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(shape))
        inner = torch.optim.SGD([weight], lr=0.0)
        optimizer = agmerge.DistributedOptimizer(inner, [("weight", weight)], merging="single", **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            (weight * gradient(rank, step)).sum().backward()
            optimizer.step()
        kept: torch.Tensor = optimizer.state_dict()["agmerge"]["residuals"]["weight"]
        return kept

    kept = torch.stack(agmerge.testing.run(workers, body))
    unit = float(scale.square().sum())
    return float(kept.square().sum()) / workers / unit, float(kept.mean(dim=0).square().sum()) / unit


def energy(workers: int, correlation: float, **options: Any) -> float:
    """Return the energy of the residuals after ``STEPS``, in units of one gradient's."""
    return energies(SHAPE, workers, correlation, **options)[0]


def wires() -> None:
    """Print a table of exchanges and value codecs, of four workers."""
    names = ("fp32", "int8", "int4", "2bit", "sign")
    print("| correlation | | " + " | ".join(names) + " |\n|---|---|" + "---|" * len(names))
    for correlation in (0.0, 0.9):
        for exchange in ("sparse", "oktopk", "masked"):
            cells = []
            for wire in names[:3] if exchange == "masked" else names:
                options = {"compression": "topk", "exchange": exchange, "wire": wire, "density": DENSITY}
                cells.append("{:.2g} ({:.2g})".format(*energies(LARGE, 4, correlation, **options)))
            print(f"| {correlation:g} | `{exchange}` | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print a table."""
    if "--wires" in sys.argv[1:]:
        wires()
        return
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
