# SPDX-License-Identifier: Apache-2.0
"""Loss of ``sync="updates"`` without one of its parts at a time, beside dense training of the same model and text.

    python benchmarks/updates_ablation.py                    # four workers, two seeds, 1,220 steps; resumable
    python benchmarks/updates_ablation.py --report benchmarks/notebook/updates_ablation.jsonl   # train nothing

Model, text and schedule are those of ``prove.py --size 0.25m``. Each variant changes one thing: an argument, or a
function of the library that is replaced while the variant trains. Trainings run side by side, one for each core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

from evidence import report, text
from evidence.contenders import DENSE
from evidence.models import SIZES
from evidence.training import Training, train_in_memory

from agmerge.backends.horovod import cores
from agmerge.metrics.paired import excess_percent, mean_interval

ROOT = Path(__file__).resolve().parents[1]
TEXTS, OUT = ROOT / "runs/prove/texts", ROOT / "runs/updates_ablation.jsonl"
SIZE, BATCH, TOKENS, RATE = "0.25m", 2048, 2_500_000, 3e-3
FULL = "all parts"
# By variant: arguments of the optimizer, or the name in the library that is replaced, and its replacement.
ARGUMENTS: dict[str, dict[str, Any]] = {
    FULL: {},
    "own second moment and momentum": {"moments": "own"},
    "not late": {"overlap": 0},
    "one fragment": {"compression": "eden-2", "every": 1, "fragments": 1},
    "three fragments": {"compression": "eden-2", "every": 3, "fragments": 3},
}
REPLACED: dict[str, tuple[str, Any]] = {
    "own second moment": ("agmerge.updates.mean_moments.MeanMoments._ratio", lambda self, parameter: None),
    "own momentum": ("agmerge.updates.mean_moments.followed_share", lambda period, overlap: 0.0),
    "unbiased scale": ("agmerge.exchanges.quantised.exchange.contraction", lambda quantizer: 1.0),
    "first steps late": ("agmerge.options.defaults.IN_TIME", 0),
}
VARIANTS = (*ARGUMENTS, *REPLACED)


def train(variant: str, seed: int, workers: int) -> dict[str, Any]:
    """Train one variant, or dense, on one thread, and return its loss.

    Args:
        variant: of ``VARIANTS``, or dense.
        seed: of weights and batches.
        workers: that train; dense is one worker.
    """
    import torch

    torch.set_num_threads(1)
    contender, count = (DENSE, 1) if variant == DENSE else ("updates", workers)
    training = Training(SIZE, contender, "adamw", count, TOKENS, BATCH, seed, RATE)
    corpus = text.prepared(None, SIZES[SIZE].vocabulary, TEXTS)
    kept = OUT.parent / f"updates_ablation-{count}-{seed}-{variant.replace(' ', '_')}.pt"
    with mock.patch(*REPLACED[variant]) if variant in REPLACED else contextlib.nullcontext():
        row = train_in_memory(training, corpus, kept, **ARGUMENTS.get(variant, {}))
    return {"variant": variant, "seed": seed, "workers": workers, "steps": training.steps, "loss": row["loss"]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a row for each variant: the increase of the loss over dense, with its interval, and of each seed."""
    lines = ["| variant | workers | increase of the loss | by seed |", "|---|---|---|---|"]
    for workers in sorted({row["workers"] for row in rows}):
        here = [row for row in rows if row["workers"] == workers]
        dense = {row["seed"]: row["loss"] for row in here if row["variant"] == DENSE}
        for variant in dict.fromkeys(row["variant"] for row in here if row["variant"] != DENSE):
            pairs = [(row["loss"], dense[row["seed"]]) for row in here if row["variant"] == variant]
            excess = excess_percent(*zip(*pairs, strict=True))
            by_seed = ", ".join(f"{one:+.1f}" for one in excess)
            lines.append(f"| {variant} | {workers} | {report.told(mean_interval(excess))} | {by_seed} |")
    return "\n".join(lines)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none if it is not there."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def main(line: Sequence[str] | None = None) -> None:
    """Train the variants that have no row yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT, help="rows that are there are not trained again")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the table of this file")
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args(line)
    if args.report:
        print(table(rows_of(args.report)))
        return
    if args.one:
        print(json.dumps(train(args.one[0], int(args.one[1]), args.workers)))
        return
    done = {(row["variant"], row["seed"]) for row in rows_of(args.out) if row["workers"] == args.workers}
    todo = [(name, seed) for name in (DENSE, *args.variants) for seed in range(args.seeds) if (name, seed) not in done]
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def made(job: tuple[str, int]) -> str:
        command = [sys.executable, __file__, "--workers", str(args.workers), "--one", job[0], str(job[1])]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]

    with ThreadPoolExecutor(cores()) as pool, args.out.open("a", encoding="utf-8") as file:
        for row in pool.map(made, todo):
            print(row, flush=True)
            file.write(row + "\n")
            file.flush()
    print(table([row for row in rows_of(args.out) if row["workers"] == args.workers]))


if __name__ == "__main__":
    main()
