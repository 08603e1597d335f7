"""How much of a gradient do sparsifiers leave behind, and how long do rows of the model wait for an update?

    python benchmarks/row_coverage.py --epochs 20 --json coverage.json

Every sparsifier trains the digits CNN as ``examples/train_digits.py`` does, from the same weights and on the same
batches, with a residual; the workers are threads of one in-memory group. The figures are those of
``sparsifiers.proof``, over the vectors that selection reads (gradient plus residual) and the rows of tensors that are
not sent whole: means over workers, and the worst for maxima. A row is counted where its own worker sends something.
dgc selects what topk does, by default; with a residual alone the two rows agree.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

import agmerge.testing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_digits  # noqa: E402  (found only through the line above)
from digits import Data, DigitsCNN, load, shard  # noqa: E402

NAMES = ("topk", "adtopk", "adtopk-row", "adtopk-fill", "dgc", "randomk")
WORST = ("contraction_max", "longest_wait")
COLUMNS = {  # heading: figure and its format
    "left behind, mean": ("contraction_mean", ".3f"),
    "left behind, max": ("contraction_max", ".3f"),
    "rows that send in a step": ("row_coverage", ".1%"),
    "rows that ever sent": ("rows_reached", ".1%"),
    "longest wait, steps": ("longest_wait", ".0f"),
    "elements sent": ("density", ".2%"),
    "test accuracy": ("accuracy", ".2%"),
}

Figures = dict[str, float]


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="contraction and row coverage of sparsifiers, measured in training")
    add = parser.add_argument
    add("--names", nargs="+", default=list(NAMES), help="of sparsifiers")
    add("--epochs", type=int, default=train_digits.arguments([]).epochs)
    add("--density", type=float, default=0.01)
    add("--workers", type=int, default=2)
    add("--seed", type=int, default=0, help="of the weights and of the images' order")
    add("--json", type=Path, metavar="FILE", help="write every number there")
    args = parser.parse_args(argv)
    if args.epochs < 1 or args.workers < 1:
        parser.error("there is nothing to measure: --epochs and --workers are 1 or more")
    return args


def worker(args: Namespace, name: str, model: torch.nn.Module, data: Data) -> Figures:
    """Train ``model`` on one worker's part of the images; what its selections were like."""
    recipe = train_digits.arguments([])
    train_x, train_y, test_x, test_y = data
    lr, count = recipe.base_lr * math.sqrt(args.workers), len(train_x)
    optimizer = agmerge.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=recipe.momentum, weight_decay=recipe.wd),
        named_parameters=model.named_parameters(),
        compression=name,
        density=args.density,
        memory="residual",
    )
    optimizer.measure_selection()
    seeds = range(10_000 * args.seed, 10_000 * args.seed + args.epochs)
    batches = [batch for seed in seeds for batch in shard(count, recipe.batch_size, agmerge.rank(), args.workers, seed)]
    schedule = OneCycleLR(optimizer, lr, len(batches), pct_start=0.2, cycle_momentum=False)
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model(train_x[batch]), train_y[batch]).backward()
        optimizer.step()
        schedule.step()
    stats = optimizer.stats()
    accuracy = train_digits.accuracy(model, test_x, test_y)
    optimizer.close()
    return {**stats["selection"], "density": stats["density"], "accuracy": accuracy}


def measure(args: Namespace, name: str, data: Data) -> Figures:
    """One sparsifier's figures, over all workers."""
    torch.manual_seed(args.seed)
    model = DigitsCNN()
    found = agmerge.testing.run(args.workers, lambda rank: worker(args, name, copy.deepcopy(model), data))
    return {
        key: max(one[key] for one in found) if key in WORST else statistics.fmean(one[key] for one in found)
        for key in found[0]
    }


def table(results: dict[str, Figures]) -> str:
    """The figures in Markdown."""
    lines = [["sparsifier", *COLUMNS], ["---", *("---:" for _ in COLUMNS)]]
    lines += [[name, *(f"{row[key]:{form}}" for key, form in COLUMNS.values())] for name, row in results.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"| {' | '.join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(pairs))} |"
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    )


def main() -> None:
    """Train with every sparsifier, print the table."""
    args = arguments()
    torch.set_num_threads(1)
    data = load()
    results = {name: measure(args, name, data) for name in tqdm(args.names, unit="sparsifier")}
    first = next(iter(results.values()))
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "command": shlex.join(["python", "benchmarks/row_coverage.py", *sys.argv[1:]]),
        "workers": args.workers,
        "selections per worker": round(first["observations"]),
        "rows": round(first["rows"]),
    }
    print(table(results), end="\n\n")
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    if args.json is not None:
        report = {**facts, "density": args.density, "epochs": args.epochs, "seed": args.seed, "results": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
