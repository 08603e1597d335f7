# SPDX-License-Identifier: Apache-2.0
"""How much of a gradient do sparsifiers leave behind, and how long do rows of the model wait for an update?

    python benchmarks/row_coverage.py --epochs 20 --json coverage.json

Every sparsifier trains the job ``digits`` of ``examples/train.py`` from the same weights and on the same batches, with
a residual; the workers are threads of one in-memory group. The figures are those of ``sparsifiers.proof``, over the
vectors that selection reads (gradient plus residual) and the rows of tensors that are not sent whole: means over
workers, and the worst for maxima. A row is counted where its own worker sends something. dgc selects what topk does, by
default; with a residual alone the two rows agree.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import torch
from tqdm import tqdm

import agmerge.testing

# isort: split

import jobs
from jobs.base import Settings
from training import optimizers
from training.loop import Loop, Way

JOB = jobs.get("digits")
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
    add("--epochs", type=int, default=JOB.recipe.epochs)
    add("--density", type=float, default=0.01)
    add("--workers", type=int, default=2)
    add("--seed", type=int, default=0, help="of the weights and of the images' order")
    add("--json", type=Path, metavar="FILE", help="write every number there")
    args = parser.parse_args(argv)
    if args.epochs < 1 or args.workers < 1:
        parser.error("there is nothing to measure: --epochs and --workers are 1 or more")
    return args


def worker(args: Namespace, name: str, model: torch.nn.Module) -> Figures:
    """Collective. Train from the weights of ``model`` on one worker's part of the images; measure its selections."""
    recipe = replace(JOB.recipe, epochs=args.epochs)
    task = JOB.make(Settings(recipe, seed=args.seed, rank=agmerge.rank(), workers=args.workers))
    task.model.load_state_dict(model.state_dict())
    options = {"compression": name, "density": args.density, "memory": "residual", "exchange": "sparse"}
    plain = optimizers.plain(recipe, task.model, optimizers.rate(recipe, args.workers, 1))
    optimizer = optimizers.wrapped(plain, task.model, options, None, 1)
    optimizer.measure_selection()
    schedule = recipe.schedule.of(optimizer, task.passes(0), recipe.epochs, args.workers)
    loop = Loop(task, optimizer, schedule, Way(), torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu"), [])
    for _ in range(args.epochs):
        for _ in loop.epoch(lambda: False):
            pass
        loop.end_epoch({})
    stats, accuracy = optimizer.stats(), loop.evaluate()["accuracy"]
    optimizer.close()
    return {**stats["selection"], "density": stats["density"], "accuracy": accuracy}


def measure(args: Namespace, name: str) -> Figures:
    """One sparsifier's figures, over all workers."""
    torch.manual_seed(args.seed)
    model = JOB.network()
    found = agmerge.testing.run(args.workers, lambda rank: worker(args, name, model))
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
    results = {name: measure(args, name) for name in tqdm(args.names, unit="sparsifier")}
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
