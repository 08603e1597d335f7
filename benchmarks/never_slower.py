# SPDX-License-Identifier: Apache-2.0
"""Is ``exchange="auto"`` never slower than dense, nor than the best fixed choice? Interleaved blocks on shaped links.

    python benchmarks/never_slower.py                                    # the matrix: minutes a cell
    python benchmarks/never_slower.py --workers 2 --rates 100mbit --models mlp --blocks 40
    python benchmarks/never_slower.py --report                           # only read what has been measured

Each cell is one launch that trains every strategy in turn, a block of steps each, so that all see the same machine.
A finished cell is a line of ``--out`` and is not run again. The best fixed choice is chosen on the odd blocks and
judged on the even ones; ratios are of medians, by block; intervals are bootstrapped over blocks; A/A is dense against
a second dense run of the same launch. A cell takes ``--blocks``, and more until both intervals of auto are at most
``--width`` wide, or ``--seconds`` are over. Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

from lab.intervals import interval
from lab.worker_results import received_results, send_result

STRATEGIES: dict[str, dict[str, Any]] = {
    "dense": {"compression": "none"},
    "dense again": {"compression": "none"},
    "fp16": {"compression": "fp16"},
    "sparse 1 %": {"compression": "topk", "exchange": "sparse", "density": 0.01},
    "auto": {"compression": "topk", "exchange": "auto", "density": 0.01},
}
FIXED = ("dense", "fp16", "sparse 1 %")
COLUMNS = ("workers", "rate", "model", *(f"{name}, ms" for name in (*FIXED, "auto")), "dense merge buffers of auto")
COLUMNS += ("auto / dense", "auto / best fixed", "A/A", "blocks")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
SETTLE = 50  # steps before the first block: measuring, planning, the trial
WARM = 12  # the same of those that plan nothing
PLANNED = ("sparse 1 %", "auto")
MOST, LOOK = 10, 20  # steps of a block; blocks between looks at the intervals
BLOCK = 0.25  # seconds, about, of a block: a slow strategy takes fewer steps, at least one


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="auto against dense and the best fixed choice, on shaped links")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "none"])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--width", type=float, default=0.1, help="of an interval, beyond which more blocks are run")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a cell has blocks enough")
    parser.add_argument("--out", type=Path, default=Path("runs/never_slower.jsonl"))
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    return parser.parse_args()


def workload(model: str) -> Any:
    """A model with its batch."""
    import models
    import torch
    from torch import nn

    if model != "mlp":
        return models.build(model, 8, 32)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    whole = nn.Sequential(*layers, nn.Linear(512, models.CLASSES))
    return models.Workload(whole, torch.randn(64, 512), torch.randint(models.CLASSES, (64,)), "samples")


def worker(args: argparse.Namespace) -> None:
    """One rank: all strategies in turn."""
    import warnings

    import torch

    import agmerge

    warnings.simplefilter("ignore")
    agmerge.init()
    torch.set_num_threads(1)

    def stepper(options: dict[str, Any]) -> tuple[Callable[[], float], Any]:
        torch.manual_seed(0)
        work = workload(args.worker)
        inner = torch.optim.SGD(work.model.parameters(), lr=0.001)
        optimizer = agmerge.DistributedOptimizer(inner, work.model.named_parameters(), **options)

        def step() -> float:
            start = time.perf_counter()
            optimizer.zero_grad()
            work.loss().backward()
            optimizer.step()
            return time.perf_counter() - start

        return step, optimizer

    steppers = {name: stepper(options) for name, options in STRATEGIES.items()}

    def agreed(mine: float) -> float:
        return float(agmerge.allreduce(torch.tensor([mine], dtype=torch.float64)))

    steps = {}
    for name, (step, _) in steppers.items():
        for _ in range(SETTLE if name in PLANNED else WARM):
            last = step()
        steps[name] = max(1, min(MOST, round(BLOCK / agreed(last))))
    took: dict[str, list[float]] = {name: [] for name in steppers}
    start, block = time.perf_counter(), 0
    while block < args.blocks or (agreed(time.perf_counter() - start) < args.seconds and not narrow(took, args.width)):
        order = list(steppers)
        random.Random(block).shuffle(order)  # the same on all ranks
        for name in order:
            agmerge.barrier()
            mine = statistics.median(steppers[name][0]() for _ in range(steps[name]))
            took[name].append(agreed(mine))
        block += 1
    if agmerge.rank() == 0:
        plan = steppers["auto"][1].plan
        send_result({"took": took, "dense": sum(plan.dense), "buffers": len(plan.counts)})
    agmerge.shutdown()


def best_of(took: dict[str, list[float]]) -> str:
    """The fixed choice that is the fastest on the odd blocks."""
    return min(FIXED, key=lambda name: statistics.median(took[name][1::2]))


def ratio(took: dict[str, list[float]], name: str, against: str) -> tuple[float, float, float]:
    """The median and the interval of the ratio on the even blocks."""
    return interval([a / b for a, b in zip(took[name][::2], took[against][::2], strict=True)])


def narrow(took: dict[str, list[float]], width: float) -> bool:
    """Whether both intervals of auto are: looked at now and then, the same on all ranks."""
    if len(took["auto"]) % LOOK:
        return False
    found = [ratio(took, "auto", against) for against in ("dense", best_of(took))]
    return all(high - low <= width for _, low, high in found)


def row(cell: dict[str, Any]) -> str:
    """One line of the report."""
    took = cell["took"]
    best = best_of(took)
    parts = [f"{cell['workers']} | {cell['rate']} | {cell['model']}"]
    parts += [f"{1e3 * statistics.median(took[name]):.1f}" for name in (*FIXED, "auto")]
    parts.append(f"{cell['dense']} of {cell['buffers']}")
    for name, against in (("auto", "dense"), ("auto", best), ("dense again", "dense")):
        middle, low, high = ratio(took, name, against)
        title = f"{best}: " if against == best and name == "auto" and against != "dense" else ""
        parts.append(f"{title}{middle:.3f} ({low:.3f} to {high:.3f})")
    parts.append(str(len(took["auto"])))
    return "| " + " | ".join(parts) + " |"


def main() -> None:
    """Measure the cells that are missing, then report all."""
    args = arguments()
    if args.worker:
        worker(args)
        return
    from lab.network import Network

    cells = []
    if args.out.exists():
        cells = [json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines()]
    known = {(cell["workers"], cell["rate"], cell["model"]) for cell in cells}
    wanted = [(w, rate, model) for w in args.workers for rate in args.rates for model in args.models]
    for workers, rate, model in wanted if not args.report else []:
        if (workers, rate, model) in known:
            continue
        with Network(workers, None if rate == "none" else rate) as network:
            command = [sys.executable, "-W", "ignore", __file__, "--worker", model]
            command += ["--blocks", str(args.blocks), "--width", str(args.width), "--seconds", str(args.seconds)]
            output = network.run(command, timeout=1800)[0]
        found = received_results(output)[0]
        cells.append({"workers": workers, "rate": rate, "link": "duplex", "model": model, **found})
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(cells[-1]) + "\n")
        print(row(cells[-1]), flush=True)
    print(f"every worker at a full-duplex link of its own\n\n{HEAD}")
    for cell in cells:
        print(row(cell))


if __name__ == "__main__":
    main()
