"""Which exchange wins where: step times and bytes for 2 to 4096 workers, by the cost model. A simulation.

    python benchmarks/scale.py                                   # tables; --picture docs/pictures draws them
    python benchmarks/scale.py --check runs/step_time.jsonl      # the model against what step_time.py measured

Every strategy is planned by ``agmerge`` (greedy) for its own costs, and its step is forward and the predicted finish of
the last exchange. Collectives cost alpha-beta, the cheaper of a ring and a tree (Thakur et al., 2005; Sanders et al.,
2009); see :data:`RATES`. Compute is 2 (forward) and 4 (backward) operations a weight and position at :data:`SPEED`;
selection reads and writes memory at :data:`MEMORY`, and so do projections on bases of low rank. Bytes of a selected
element are those of this library's wire, those of factors follow from the shapes: "powersgd 4" is PowerSGD at rank 4,
two all-reduces of which the second one needs what the first one gave; "acpsgd 4" is ACP-SGD, one factor a step. Nothing
here says what a strategy costs in loss at equal steps: docs/parity.md does.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import shapes
import step_time
from network import named

import merging
from agmerge.exchanges.low_rank.factors import matrix_shape, rank_of, saves

RATES = {"1 Gbit": (50e-6, 1e9), "10 Gbit": (30e-6, 10e9), "25 Gbit": (20e-6, 25e9), "100 Gbit": (15e-6, 100e9)}
"""Seconds a hop, and bits a second of a worker's port. Assumptions: TCP at the slow end, RDMA at the fast."""
SPEED = 40e12  # operations a second: a training GPU at a good half of its half-precision peak
MEMORY = 600e9  # bytes a second
LAUNCH = 4e-5  # seconds to select from one vector: a handful of kernels
FACTORISING = {1: 22, 2: 28}
"""Bytes of memory an element, by rounds, in the passes of the compiled loops: adding the residual and projecting is
one, which for ACP-SGD takes off, too, where the basis is of the right side. Selection has 20. One core takes 1.1 and
1.4 times as long at rank 4 (factorising.py), and with selection 1.4 times (selection.py)."""
BASES = 2e-4  # seconds to orthonormalize the factors of one side of a merge buffer, in batches of one shape
NODE = 8  # workers a node, for two-level; inside, ten times the port's rate
WORKERS = tuple(2**power for power in range(1, 13))
POSITIONS = {
    "resnet152": 32 * 192,
    "vgg16": 32 * 112,
    "bert-large": 8 * 384,
    "gpt2-large": 4 * 1024,
    "vit-large": 32 * 197,
}
"""Multiplications per weight in a batch: samples times positions; for the two CNNs the mean over their weights."""


@dataclass(frozen=True)
class Network:
    """Workers at ports: ``alpha`` seconds a hop, ``beta`` seconds a byte."""

    workers: int
    alpha: float
    beta: float

    def reduce(self, size: Any) -> Any:
        """An all-reduce of so many bytes."""
        w, hops = self.workers, math.log2(self.workers)
        ring = 2 * (w - 1) * self.alpha + 2 * (w - 1) / w * size * self.beta
        return np.minimum(ring, 2 * hops * self.alpha + 2 * size * self.beta)

    def gather(self, size: Any) -> Any:
        """An all-gather of so many bytes a worker."""
        return math.ceil(math.log2(self.workers)) * self.alpha + (self.workers - 1) * size * self.beta

    def split(self, size: Any) -> Any:
        """Okay-topk's exchange of so many bytes selected a worker (Li and Hoefler, 2022, section 3)."""
        w = self.workers
        return (2 * math.sqrt(w) + 2 * math.log2(w)) * self.alpha + 6 * (w - 1) / w / 2 * size * self.beta


@dataclass(frozen=True)
class Strategy:
    """Say what one buffer of n elements costs, or one of n elements of factors."""

    select: bool  # whether elements are selected
    exchange: Callable[[Network, Any], Any]  # seconds
    sent: Callable[[Network, Any], Any]  # bytes a worker
    rank: int = 0  # of factors, if it is they that are sent
    rounds: int = 1  # one factor a step, or both one after the other


def two_level(network: Network, elements: Any, each: float) -> Any:
    """Dense inside the node, a shard of its sum sparse between nodes."""
    nodes = network.workers // NODE
    if nodes < 2:
        return network.gather(each * elements)
    inside = Network(NODE, network.alpha / 4, network.beta / 10)
    across = Network(nodes, network.alpha, network.beta)
    return inside.reduce(4 * elements) + across.gather(each * elements / NODE)


def sparse(density: float, each: float) -> Strategy:
    return Strategy(
        True,
        lambda net, n: net.gather(each * density * n),
        lambda net, n: (net.workers - 1) * each * density * n,
    )


def low_rank(rank: int, rounds: int) -> Strategy:
    """Return PowerSGD (two rounds) or ACP-SGD (one). Bytes do not grow with the number of workers."""
    return Strategy(
        False,
        lambda net, n: rounds * net.reduce(4 * n / rounds),
        lambda net, n: 2 * (net.workers - 1) / net.workers * 4 * n,
        rank,
        rounds,
    )


STRATEGIES: dict[str, Strategy] = {
    "dense": Strategy(
        False, lambda net, n: net.reduce(4 * n), lambda net, n: 2 * (net.workers - 1) / net.workers * 4 * n
    ),
    "fp16": Strategy(
        False, lambda net, n: net.reduce(2 * n), lambda net, n: 2 * (net.workers - 1) / net.workers * 2 * n
    ),
    "sparse 1 %": sparse(0.01, 5.1),
    "sparse 0.1 %": sparse(0.001, 5.6),
    "oktopk 1 %": Strategy(
        True,
        lambda net, n: net.split(8 * 0.01 * n),
        lambda net, n: 6 * (net.workers - 1) / net.workers / 2 * 8 * 0.01 * n,
    ),
    "masked 1 %": Strategy(
        True,
        lambda net, n: net.reduce(4 * 0.01 * n),
        lambda net, n: 2 * (net.workers - 1) / net.workers * 4 * 0.01 * n,
    ),
    "two-level 1 %": Strategy(
        True,
        lambda net, n: two_level(net, n, 0.01 * 5.1),
        lambda net, n: max(1, net.workers // NODE - 1) * 0.01 * 5.1 / NODE * n,
    ),
    **{f"powersgd {rank}": low_rank(rank, 2) for rank in (4, 32)},
    **{f"acpsgd {rank}": low_rank(rank, 1) for rank in (4, 32)},
}


COMPARED = ("dense", "fp16", "sparse 1 %", "oktopk 1 %", "two-level 1 %", "powersgd 4", "acpsgd 4")
"""Of the tables. At 0.1 % training loses more, with a mask drawn at random (masked) far more: docs/parity.md."""


def profile(model: str) -> tuple[float, merging.Profile, shapes.Shapes]:
    """Return seconds of forward, the tensors with their times, and their shapes."""
    sizes = shapes.sizes(model)
    work = np.array(sizes, dtype=np.float64) * POSITIONS[model]
    names = [f"t{i}" for i in range(len(sizes))]
    return float(2 * work.sum() / SPEED), merging.Profile(names, sizes, 4 * work / SPEED + 5e-6), shapes.shapes(model)


def factorised(strategy: Strategy, tensors: merging.Profile, dimensions: shapes.Shapes) -> merging.Profile:
    """Return the tensors with ``work`` in bytes of memory, to find factors, and those factors' elements as ``load``.

    Products of a tensor take a launch, here as bytes. What factors do not make smaller is sent whole.
    """
    work, load = [], []
    for shape in dimensions:
        elements = math.prod(shape)
        if saves(shape, strategy.rank):
            work.append(FACTORISING[strategy.rounds] * elements + round(LAUNCH * MEMORY))
            load.append(rank_of(shape, strategy.rank) * sum(matrix_shape(shape)) * strategy.rounds // 2)
        else:
            work.append(0)
            load.append(elements)
    return merging.Profile(tensors.names, tensors.numel, tensors.backward, work=work, load=load)


def select(elements: Any) -> Any:
    """Compensation, selection, packing: three reads and two writes of memory."""
    x = np.asarray(elements)
    return np.where(x > 0, LAUNCH + 5 * 4 * x / MEMORY, 0.0)


def project(strategy: Strategy, size: Any) -> Any:
    """Return the seconds in which a merge buffer is factorised, for which so many bytes are read and written."""
    x = np.asarray(size)
    return np.where(x > 0, strategy.rounds * BASES + x / MEMORY, 0.0)


def step(
    strategy: Strategy, network: Network, forward: float, tensors: merging.Profile, dimensions: shapes.Shapes
) -> float:
    """Return the predicted seconds of a step."""
    compute: Callable[[Any], Any] = select if strategy.select else lambda x: 0.0 * x
    if strategy.rank:
        tensors, compute = factorised(strategy, tensors, dimensions), partial(project, strategy)
    costs = merging.Costs(compute, lambda x: strategy.exchange(network, np.asarray(x, float)))
    mode = "behind" if strategy.select or strategy.rank else "dense"
    plan = merging.get("agmerge", solver="greedy").plan(tensors, costs, mode)
    return forward + merging.predict(plan, tensors, costs, mode).finish


def loaded(strategy: Strategy, tensors: merging.Profile, dimensions: shapes.Shapes) -> float:
    """Return the elements that the strategy's bytes are counted of."""
    counted = factorised(strategy, tensors, dimensions) if strategy.rank else tensors
    return float(counted.load.sum())


def simulate() -> list[dict[str, Any]]:
    """Return every model, rate, number of workers and strategy."""
    rows = []
    for model in POSITIONS:
        forward, tensors, dimensions = profile(model)
        elements = {name: loaded(one, tensors, dimensions) for name, one in STRATEGIES.items()}
        for rate, (alpha, bits) in RATES.items():
            for workers in WORKERS:
                network = Network(workers, alpha, 8 / bits)
                steps = {name: step(one, network, forward, tensors, dimensions) for name, one in STRATEGIES.items()}
                sent = {name: float(one.sent(network, elements[name])) for name, one in STRATEGIES.items()}
                alone = forward + float(tensors.backward.sum())
                rows.append(
                    {"model": model, "rate": rate, "workers": workers, "alone": alone, "steps": steps, "bytes": sent}
                )
    return rows


def tables(rows: list[dict[str, Any]]) -> str:
    """Per model: the fastest strategy of :data:`COMPARED`, and how many times as fast as dense it is."""
    lines = []
    for model in POSITIONS:
        here = [row for row in rows if row["model"] == model]
        lines += [f"**{model}**, {1e3 * here[0]['alone']:.0f} ms a step alone", ""]
        lines += ["| workers | " + " | ".join(RATES) + " |", "|---|" + "---|" * len(RATES)]
        for workers in WORKERS:
            cells = []
            for rate in RATES:
                steps = next(r["steps"] for r in here if r["rate"] == rate and r["workers"] == workers)
                best = min(COMPARED, key=steps.__getitem__)
                gain = steps["dense"] / steps[best]
                cells.append("dense" if gain < 1.02 else f"{best}, {gain:.1f}x")
            lines.append(f"| {workers} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]], folder: Path) -> None:
    """Step time relative to computing alone, over workers; one panel a model and rate."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    models, rates = ("resnet152", "bert-large", "gpt2-large"), list(RATES)
    figure, axes = plt.subplots(len(models), len(rates), figsize=(12, 8), sharex=True, squeeze=False)
    for i, model in enumerate(models):
        for j, rate in enumerate(rates):
            here = [row for row in rows if row["model"] == model and row["rate"] == rate]
            for name in STRATEGIES:
                steps = [row["steps"][name] / row["alone"] for row in here]
                axes[i][j].loglog([row["workers"] for row in here], steps, label=name, base=2)
            axes[i][j].set_title(f"{model}, {rate}", fontsize=9)
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("workers")
    figure.supylabel("step / step of one worker alone (simulated)")
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "scale.svg")


def check(path: Path) -> str:
    """The model with this machine's compute, beside what ``step_time.py`` measured."""
    lines = ["| model | link | workers | strategy | predicted, ms | measured, ms | |", "|---|---|---|---|---|---|---|"]
    strategies = {"agmerge dense": "dense", "Horovod": "dense", "Horovod fp16": "fp16", "agmerge topk": "sparse 1 %"}
    strategies |= {"agmerge powersgd": "powersgd 4", "agmerge acpsgd": "acpsgd 4"}
    for cell in step_time.cells_of(path):
        found, rate = cell["found"], cell["rate"]
        if rate == "none" or cell["model"] not in shapes.MEASURED:
            continue
        bits = float(rate.removesuffix("mbit").removesuffix("gbit")) * (1e6 if rate.endswith("mbit") else 1e9)
        dimensions = shapes.MEASURED[cell["model"]]()[::-1]
        sizes = [math.prod(shape) for shape in dimensions]
        alone = statistics.median(found["floor"]["seconds"])
        share = np.array(sizes) / sum(sizes) * alone
        tensors = merging.Profile([f"t{i}" for i in range(len(sizes))], sizes, share * 2 / 3)
        sharing = cell["workers"] if cell["link"] == "shared" else 1
        network = Network(cell["workers"], 5e-4, 8 / bits * sharing)
        for name, strategy in strategies.items():
            if name in found and found[name]["seconds"]:
                predicted = step(STRATEGIES[strategy], network, alone / 3, tensors, dimensions)
                measured = statistics.median(found[name]["seconds"])
                error = f"{100 * (predicted / measured - 1):+.0f} %"
                link = named(rate, cell["link"])
                row = f"{cell['model']} | {link} | {cell['workers']} | {name} | {1e3 * predicted:.0f}"
                lines.append(f"| {row} | {1e3 * measured:.0f} | {error} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or the check."""
    parser = argparse.ArgumentParser(description="simulated step times for 2 to 4096 workers")
    parser.add_argument("--check", type=Path, metavar="FILE", help="what step_time.py has measured")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--picture", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.check:
        print(check(args.check))
        return
    rows = simulate()
    print(tables(rows))
    if args.json:
        args.json.write_text(json.dumps(rows), encoding="utf-8")
    if args.picture:
        picture(rows, args.picture)


if __name__ == "__main__":
    main()
