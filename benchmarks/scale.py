# SPDX-License-Identifier: Apache-2.0
"""Which exchange wins where: step times and bytes for 2 to 4096 workers, by the cost model. A simulation.

    python benchmarks/scale.py                                   # tables; --picture docs/pictures draws them
    python benchmarks/scale.py --wire int4                       # with values of other bytes, see docs/dev/wire.md
    python benchmarks/scale.py --check runs/step_time.jsonl      # the model against what step_time.py measured

Every strategy is planned by ``agmerge`` (greedy) for its own costs, and its step is forward and the predicted finish of
the last exchange. Collectives cost alpha-beta, the cheaper of a ring and a tree (Thakur et al., 2005; Sanders et al.,
2009); see :data:`RATES`. Compute is 2 (forward) and 4 (backward) operations a weight and position at :data:`SPEED`;
selection reads and writes memory at :data:`MEMORY`, and so do projections on bases of low rank. Bytes of a selected
element are those of this library's wire, and small tensors go whole with them, as they do in training; bytes of factors
follow from the shapes: "powersgd 4" is PowerSGD at rank 4, two all-reduces of which the second one needs what the first
one gave; "acpsgd 4" is ACP-SGD, one factor a step. Nothing here says what a strategy costs in loss at equal steps:
benchmarks/notebook/parity.md does.

``--check`` takes three things from measurements, and nothing from what it predicts: the floor of each cell and its
:data:`PHASES`, what a link passes on of its rate (:data:`PASSED`), and what the library takes of the processor, as a
share of the floor, from the unshaped cell of as many workers in the same file, else of two: there hardly anything is
waited for.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import numpy as np

# isort: split

import step_time
from lab.network import named
from speed import shapes

import merging
import sparsifiers
from agmerge.exchanges.low_rank.bases import matrix_shape, rank_of

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
INDEX = {0.01: 1.07, 0.001: 1.5}  # bytes of an index, by density: docs/dev/wire.md
VALUE = {"fp32": 4.0, "fp16": 2.0, "int8": 1.016, "int4": 0.516, "2bit": 0.281, "sign": 0.141}  # bytes of a value
PASSED = {"duplex": 0.94, "shared": 0.97}
"""Of a shaped link's rate, what payload gets: links.py measures it where frames have 1500 bytes; on the loopback, with
frames of 64 KB, dense exchanges between two workers reached that much."""
PHASES = {"gpt2": (0.34, 0.53, 0.13), "resnet50": (0.29, 0.55, 0.16)}
"""Of a step without exchange, forward, backward, and the update, which waits for the last message: one core, SGD."""
READY = {
    "gpt2": ((0.0, 0.26), (0.77, 0.93), (1.0, 1.0)),
    "resnet50": ((0.0, 0.01), (0.12, 0.04), (0.43, 0.24), (0.71, 0.58), (0.8, 0.65), (0.9, 0.74), (0.98, 0.88), (1, 1)),
}
"""Shares of the elements that are ready, and of backward that have passed then: one core. The first product of backward
in a language model is that with its embedding, whose gradient is the last to be ready."""
LAST = 0.2  # of the library's work: reading messages and writing the update (step_profile.py), after the last one
WORKERS = tuple(2**power for power in range(1, 13))
POSITIONS = {
    "resnet152": 32 * 192,
    "vgg16": 32 * 112,
    "bert-large": 8 * 384,
    "gpt2-large": 4 * 1024,
    "vit-large": 32 * 197,
}
"""Multiplications per weight in a batch: samples times positions; for the two CNNs the mean over their weights."""
TIED = ("gpt2-large",)  # whose first product of backward is that with the embedding, which is the last to be ready


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
    """Say what one buffer costs of which so many bytes are sent by each worker."""

    select: bool  # whether elements are selected
    load: Callable[[tuple[int, ...]], float]  # bytes of a tensor
    exchange: Callable[[Network, Any], Any]  # seconds
    sent: Callable[[Network, Any], Any]  # bytes a worker
    rank: int = 0  # of factors, if it is they that are sent
    rounds: int = 1  # one factor a step, or both one after the other


def two_level(network: Network, size: Any, share: float) -> Any:
    """Dense inside the node, a shard of its sum sparse between nodes: so many bytes, ``share`` of the dense ones."""
    nodes = network.workers // NODE
    if nodes < 2:
        return network.gather(size)
    inside = Network(NODE, network.alpha / 4, network.beta / 10)
    across = Network(nodes, network.alpha, network.beta)
    return inside.reduce(size / share) + across.gather(size / NODE)


def whole(shape: tuple[int, ...], each: float = 4.0) -> float:
    """Return the bytes of a tensor that is sent whole, with so many an element."""
    return each * math.prod(shape)


def selected(density: float, each: float, shape: tuple[int, ...]) -> float:
    """Return the bytes of a tensor of which a share is sent, with so many an element; small ones are sent whole."""
    small = len(shape) < 2 or math.prod(shape) < 1024
    return whole(shape) if small else each * math.ceil(density * math.prod(shape))


def reduced(net: Network, size: Any) -> Any:
    """Return the bytes that a worker sends for an all-reduce."""
    return 2 * (net.workers - 1) / net.workers * size


def sparse(density: float, wire: str) -> Strategy:
    """Return an all-gather of what is selected."""
    return Strategy(
        True,
        partial(selected, density, INDEX[density] + VALUE[wire]),
        lambda net, size: net.gather(size),
        lambda net, size: (net.workers - 1) * size,
    )


def low_rank(rank: int, rounds: int) -> Strategy:
    """Return PowerSGD (two rounds) or ACP-SGD (one). Bytes do not grow with the number of workers."""
    compressor = sparsifiers.low_rank("powersgd", rank)

    def load(shape: tuple[int, ...]) -> float:
        factors = rank_of(shape, rank) * sum(matrix_shape(shape)) * rounds // 2
        return 4.0 * factors if compressor.shrinks("", shape) else whole(shape)

    return Strategy(
        False, load, lambda net, size: rounds * net.reduce(np.asarray(size) / rounds), reduced, rank, rounds
    )


def strategies(wire: str = "fp32") -> dict[str, Strategy]:
    """Return what is compared, with values of this wire where elements are selected."""
    each = INDEX[0.01] + VALUE[wire]
    return {
        "dense": Strategy(False, whole, lambda net, size: net.reduce(size), reduced),
        "fp16": Strategy(False, partial(whole, each=2.0), lambda net, size: net.reduce(size), reduced),
        "sparse 1 %": sparse(0.01, wire),
        "sparse 0.1 %": sparse(0.001, wire),
        "oktopk 1 %": Strategy(
            True,
            partial(selected, 0.01, 4 + VALUE[wire]),
            lambda net, size: net.split(size),
            lambda net, size: 6 * (net.workers - 1) / net.workers / 2 * size,
        ),
        "masked 1 %": Strategy(True, partial(selected, 0.01, 4.0), lambda net, size: net.reduce(size), reduced),
        "two-level 1 %": Strategy(
            True,
            lambda shape: 0.01 * each * math.prod(shape),  # small tensors are in the dense part
            lambda net, size: two_level(net, size, 0.01 * each / 4),
            lambda net, size: max(1, net.workers // NODE - 1) * size / NODE,
        ),
        **{f"powersgd {rank}": low_rank(rank, 2) for rank in (4, 32)},
        **{f"acpsgd {rank}": low_rank(rank, 1) for rank in (4, 32)},
    }


STRATEGIES = strategies()
COMPARED = ("dense", "fp16", "sparse 1 %", "oktopk 1 %", "two-level 1 %", "powersgd 4", "acpsgd 4")
"""Of the tables. At 0.1 % the loss grows more, with masks drawn at random far more: benchmarks/notebook/parity.md."""


def profile(model: str) -> tuple[float, merging.Profile, shapes.Shapes]:
    """Return seconds of forward, the tensors with their times, and their shapes."""
    sizes = shapes.sizes(model)
    work = np.array(sizes, dtype=np.float64) * POSITIONS[model]
    if model in TIED:
        work[[0, -1]] = work[0] + work[-1], 0.0
    names = [f"t{i}" for i in range(len(sizes))]
    return float(2 * work.sum() / SPEED), merging.Profile(names, sizes, 4 * work / SPEED + 5e-6), shapes.shapes(model)


def loaded(strategy: Strategy, tensors: merging.Profile, dimensions: shapes.Shapes) -> merging.Profile:
    """Return the tensors with what the strategy sends of them as ``load``, in bytes.

    Where factors are found ``work`` is in bytes of memory; products of a tensor take a launch, here as bytes.
    """
    load = [math.ceil(strategy.load(shape)) for shape in dimensions]
    work = [
        0 if size == math.ceil(whole(shape)) else math.prod(shape) for size, shape in zip(load, dimensions, strict=True)
    ]
    if strategy.rank:
        passes, launch = FACTORISING[strategy.rounds], round(LAUNCH * MEMORY)
        work = [passes * elements + launch if elements else 0 for elements in work]
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
    strategy: Strategy,
    network: Network,
    forward: float,
    tensors: merging.Profile,
    dimensions: shapes.Shapes,
    select: Callable[[Any], Any] = select,
) -> float:
    """Return the predicted seconds of a step. ``select``: seconds to select from so many elements, all its work."""
    compute: Callable[[Any], Any] = select if strategy.select else lambda x: 0.0 * x
    if strategy.rank:
        compute = partial(project, strategy)
    tensors = loaded(strategy, tensors, dimensions)
    costs = merging.Costs(compute, lambda size: strategy.exchange(network, np.asarray(size, float)))
    mode = "behind" if strategy.select or strategy.rank else "dense"
    plan = merging.get("agmerge", solver="greedy").plan(tensors, costs, mode)
    return forward + merging.predict(plan, tensors, costs, mode).finish


def simulate(wire: str = "fp32") -> list[dict[str, Any]]:
    """Return every model, rate, number of workers and strategy, with values of this wire."""
    rows, compared = [], strategies(wire)
    for model in POSITIONS:
        forward, tensors, dimensions = profile(model)
        sizes = {name: float(loaded(one, tensors, dimensions).load.sum()) for name, one in compared.items()}
        for rate, (alpha, bits) in RATES.items():
            for workers in WORKERS:
                network = Network(workers, alpha, 8 / bits)
                steps = {name: step(one, network, forward, tensors, dimensions) for name, one in compared.items()}
                sent = {name: float(one.sent(network, sizes[name])) for name, one in compared.items()}
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
                levels = workers >= 2 * NODE  # with one node there are no two levels
                best = min((name for name in COMPARED if levels or name != "two-level 1 %"), key=steps.__getitem__)
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


def measured_strategies(wire: str) -> dict[str, Strategy]:
    """Return which strategy a contender of step_time.py is; ``wire``: of the one that chooses it by itself."""
    compared = strategies(wire)
    return {
        "agmerge dense": compared["dense"],
        "Horovod": compared["dense"],
        "Horovod fp16": compared["fp16"],
        "agmerge topk": compared["sparse 1 %"],
        "agmerge topk fp16": strategies("fp16")["sparse 1 %"],
        "agmerge powersgd": compared["powersgd 4"],
        "agmerge acpsgd": compared["acpsgd 4"],
    }


def middle(cell: dict[str, Any], name: str) -> float:
    """Return the median seconds of a step that a contender took in a cell; 0 where it has none."""
    return statistics.median(cell["found"].get(name, {}).get("seconds") or [0.0])


def check(path: Path, wire: str = "fp32") -> str:
    """Return the model with this machine's compute, beside what ``step_time.py`` measured, as a table in Markdown.

    ``wire``: that "agmerge topk" had chosen, where a cell does not say.
    """
    lines = ["| model | link | workers | strategy | predicted, ms | measured, ms | |", "|---|---|---|---|---|---|---|"]
    cells = step_time.cells_of(path)
    unshaped = {(cell["model"], cell["workers"]): cell for cell in cells if cell["rate"] == "none"}
    for cell in cells:
        model, rate, workers, link = cell["model"], cell["rate"], cell["workers"], cell["link"]
        if rate == "none" or model not in shapes.MEASURED:
            continue
        bits = float(rate.removesuffix("mbit").removesuffix("gbit")) * (1e6 if rate.endswith("mbit") else 1e9)
        network = Network(workers, 5e-4, 8 / (PASSED[link] * bits) * (workers if link == "shared" else 1))
        dimensions, floor = shapes.MEASURED[model]()[::-1], middle(cell, step_time.FLOOR)
        sizes = np.array([math.prod(shape) for shape in dimensions])
        forward, backward, update = (part * floor for part in PHASES[model])
        ready = backward * np.interp(sizes.cumsum() / sizes.sum(), *zip(*READY[model], strict=True))
        tensors = merging.Profile([f"t{i}" for i in range(len(sizes))], sizes, np.diff(ready, prepend=0.0))
        known = unshaped.get((model, workers)) or unshaped.get((model, 2))
        chosen = cell["found"].get("agmerge topk", {}).get("wire", wire)
        for name, strategy in measured_strategies(chosen).items():
            measured, work = middle(cell, name), 0.0
            if not measured:
                continue
            if known is not None and middle(known, name):
                work = max(0.0, middle(known, name) / middle(known, step_time.FLOOR) - 1) * floor
            each = partial(np.multiply, (1 - LAST) * work / sizes.sum())
            predicted = step(strategy, network, forward, tensors, dimensions, each) + update + LAST * work
            row = f"{model} | {named(rate, link)} | {workers} | {name} | {1e3 * predicted:.0f}"
            lines.append(f"| {row} | {1e3 * measured:.0f} | {100 * (predicted / measured - 1):+.0f} % |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or the check."""
    parser = argparse.ArgumentParser(description="simulated step times for 2 to 4096 workers")
    parser.add_argument("--check", type=Path, metavar="FILE", help="what step_time.py has measured")
    parser.add_argument(
        "--wire",
        choices=VALUE,
        default="fp32",
        help="of selected values; with --check what 'agmerge topk' had chosen, if a cell does not say",
    )
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--picture", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.check:
        print(check(args.check, args.wire))
        return
    rows = simulate(args.wire)
    print(tables(rows))
    if args.json:
        args.json.write_text(json.dumps(rows), encoding="utf-8")
    if args.picture:
        picture(rows, args.picture)


if __name__ == "__main__":
    main()
