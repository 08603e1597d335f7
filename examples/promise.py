# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT over a pretended slow link: dense, with the default, and with a compressor by name.

This is what `make train` shows.

python examples/promise.py [--workers 2] [--compression dgc] [--link 200mbit] [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import torch
from gpt import GPT, corpus, windows
from torch.nn import functional as F

import agmerge

WIDTH, LENGTH, BATCH = 256, 32, 8
MARK = "RESULT "


def train(compression: str, steps: int) -> dict[str, float]:
    """Return seconds, MB that have left this worker, and loss and accuracy on held-out text, after so many steps."""
    agmerge.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text, held_out = corpus()
    model = GPT(width=WIDTH, layers=4, heads=4, context=LENGTH)
    optimizer = agmerge.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), compression=compression
    )
    chance = torch.Generator().manual_seed(agmerge.rank())
    agmerge.barrier()
    began = time.monotonic()
    for _ in range(steps):
        inputs, targets = windows(text, torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=chance), LENGTH)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    seconds = time.monotonic() - began
    with torch.no_grad():
        inputs, targets = windows(held_out, torch.arange(0, 512 * LENGTH, LENGTH), LENGTH)
        scores = model(inputs).flatten(0, 1)
    return {
        "seconds": seconds,
        "MB": optimizer.stats()["link_bytes"] / 1e6,
        "loss": F.cross_entropy(scores, targets.flatten()).item(),
        "accuracy": (scores.argmax(1) == targets.flatten()).double().mean().item(),
    }


def run(compression: str, chosen: argparse.Namespace) -> dict[str, float]:
    """Train with so many workers, each a process; return what the first one has measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={chosen.workers}"]
    done = subprocess.run(
        [*command, __file__, "--worker", "--compression", compression, "--steps", str(chosen.steps)],
        env={**os.environ, "AGMERGE_LINK": chosen.link, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    results = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not results:
        sys.exit(f"{done.stdout}\n{done.stderr}\nthe training with compression={compression!r} has failed, see above")
    figures: dict[str, float] = json.loads(results[0])
    return figures


def table(rows: list[tuple[str, dict[str, float]]], chosen: argparse.Namespace) -> str:
    """Return the figures of all trainings, a line each, for people."""
    lines = [
        f"{chosen.steps} steps of a GPT of 3.2 million parameters, AdamW, {chosen.workers} workers; each has a link of "
        f"{chosen.link} (pretended)",
        f"{'':14} {'seconds':>8} {'x dense':>8} {'MB sent':>8} {'held-out loss':>14} {'accuracy':>9}",
    ]
    dense = rows[0][1]["seconds"]
    for name, figures in rows:
        lines.append(
            f"{name:14} {figures['seconds']:8.1f} {dense / figures['seconds']:8.1f} {figures['MB']:8.1f} "
            f"{figures['loss']:14.3f} {figures['accuracy']:8.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the three trainings, or one of their workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compression", default="dgc", help="of the third training, by name (default: dgc)")
    parser.add_argument("--link", default="200mbit", help="rate of each worker's link (default: 200mbit)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        figures = train(chosen.compression, chosen.steps)
        if agmerge.rank() == 0:
            print(MARK + json.dumps(figures), flush=True)
        return
    rows = []
    for name, compression in (("dense", "none"), ("the default", "auto"), (chosen.compression, chosen.compression)):
        print(f"training: {name} ...", flush=True)
        rows.append((name, run(compression, chosen)))
    print(table(rows, chosen))


if __name__ == "__main__":
    main()
