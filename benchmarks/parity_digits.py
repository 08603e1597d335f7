"""Does compression cost accuracy? Paired runs on the digits: the same folds, weights and order of the images.

    python benchmarks/parity_digits.py --folds 5 --seeds 3 --json parity.json

Every pair trains twice as ``examples/train_digits.py`` does, for equally many epochs: dense and compressed.
The workers are threads of one in-memory group. The interval is Student's for the mean paired difference; runs
count as independent, although the folds of one seed share training images.
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
from typing import Any

import torch
from scipy.stats import t as student
from tqdm import tqdm

import agmerge.testing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_digits  # noqa: E402  (found only through the line above)
from digits import Data, DigitsCNN, load  # noqa: E402


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="accuracy on the digits, compressed against dense, in pairs")
    add = parser.add_argument
    add("--folds", type=int, default=5, help="cross-validation over all 1797 images")
    add("--seeds", type=int, default=3, help="repetitions; each has its own folds, weights and order")
    add("--epochs", type=int, default=train_digits.arguments([]).epochs)
    add("--compression", default="topk", help="what is held against dense")
    add("--density", type=float, default=0.01)
    add("--exchange", default="sparse")
    add("--workers", type=int, default=2)
    add("--json", type=Path, metavar="FILE", help="write every pair and the summary there")
    args = parser.parse_args(argv)
    if args.folds * args.seeds < 2:
        parser.error("an interval needs two pairs or more: raise --folds or --seeds")
    return args


def run(recipe: Namespace, workers: int, model: torch.nn.Module, data: Data) -> dict[str, Any]:
    """Train a copy of ``model`` on each worker; rank 0's results."""

    def worker(rank: int) -> dict[str, Any]:
        return train_digits.train(recipe, copy.deepcopy(model), data)

    results = agmerge.testing.run(workers, worker)
    if not all(result["replicas_equal"] for result in results):
        raise RuntimeError(f"replicas differ after {recipe.compression}, seed {recipe.seed}")
    return results[0]


def pair(args: Namespace, fold: int, seed: int) -> dict[str, Any]:
    """Both runs on one fold."""
    recipe = train_digits.arguments([])
    recipe.epochs, recipe.seed = args.epochs, seed
    recipe.density, recipe.exchange = args.density, args.exchange
    data = load(fold, args.folds, seed)
    torch.manual_seed(seed)
    model = DigitsCNN()
    row: dict[str, Any] = {"fold": fold, "seed": seed}
    for side, compression in (("dense", "none"), ("compressed", args.compression)):
        recipe.compression = compression
        row[side] = run(recipe, args.workers, model, data)
    row["difference"] = row["compressed"]["accuracy"] - row["dense"]["accuracy"]
    return row


def summary(pairs: list[dict[str, Any]]) -> dict[str, float]:
    """Means, and the 95 % interval of the mean difference."""
    differences = [row["difference"] for row in pairs]
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    half = float(student.ppf(0.975, len(pairs) - 1)) * deviation / math.sqrt(len(pairs))
    totals = {side: sum(row[side]["bytes_sent"] for row in pairs) for side in ("dense", "compressed")}
    return {
        "pairs": len(pairs),
        "dense": statistics.fmean(row["dense"]["accuracy"] for row in pairs),
        "compressed": statistics.fmean(row["compressed"]["accuracy"] for row in pairs),
        "worst": min(row["compressed"]["accuracy"] for row in pairs),
        "difference": mean,
        "low": mean - half,
        "high": mean + half,
        "width": 2 * half,
        "bytes_ratio": totals["dense"] / totals["compressed"],
    }


def table(args: Namespace, s: dict[str, float], facts: dict[str, Any]) -> str:
    """The summary, for people."""
    name = args.compression
    if name not in train_digits.CASTS:
        name += f", density {args.density:.4g}, {args.exchange} exchange"
    low, high, width = (f"{100 * s[key]:+.2f}" for key in ("low", "high", "width"))
    rows = {
        "accuracy, dense": f"{s['dense']:.2%}",
        f"accuracy, {name}": f"{s['compressed']:.2%} (worst run {s['worst']:.2%})",
        "mean paired difference": f"{100 * s['difference']:+.2f} points",
        "95 % interval": f"{low} to {high} points, {width[1:]} wide",
        "bytes sent, dense / compressed": f"{s['bytes_ratio']:.1f}",
        "pairs": f"{s['pairs']}: {args.folds} folds x {args.seeds} seeds",
        "each run": f"{args.workers} workers, {args.epochs} epochs",
        **{key: str(value) for key, value in facts.items()},
    }
    column = max(map(len, rows))
    return "\n".join(f"{key:<{column}}  {value}" for key, value in rows.items())


def main() -> None:
    """Run all pairs, print the table."""
    args = arguments()
    torch.set_num_threads(1)
    order = [(fold, seed) for seed in range(args.seeds) for fold in range(args.folds)]
    pairs = [pair(args, fold, seed) for fold, seed in tqdm(order, unit="pair")]
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "command": shlex.join(["python", "benchmarks/parity_digits.py", *sys.argv[1:]]),
    }
    result = summary(pairs)
    print(table(args, result, facts))
    if args.json is not None:
        report = {**facts, "summary": result, "pairs": pairs}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if result["width"] > 0.01:
        print("the interval is more than 1 point wide: raise --seeds", file=sys.stderr)


if __name__ == "__main__":
    main()
