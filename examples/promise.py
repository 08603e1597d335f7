# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT over a simulated slow network: without compression, with the default, and with another setting.

This is what `make train` shows.

python examples/promise.py [--workers 2] [--compression dgc] [--link 200mbit] [--steps 400]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
from gpt import GPT, corpus, windows
from torch.nn import functional as F

import agmerge

WIDTH, LENGTH, BATCH, RATE = 128, 64, 4, 3e-3
MARK = "RESULT "
DEFAULT = "default"  # the label of a training without arguments


def label(options: dict[str, str]) -> str:
    """Return the arguments of a training as they are written in a script."""
    return ", ".join(f'{name}="{value}"' for name, value in options.items()) or DEFAULT


def train(options: dict[str, Any], steps: int) -> dict[str, float]:
    """Train; return the seconds, the MB that left this worker, and loss and accuracy on held-out text.

    ``options``: arguments of ``DistributedOptimizer``.
    """
    agmerge.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text, held_out = corpus()
    model = GPT(width=WIDTH, layers=4, heads=4, context=LENGTH)
    inner = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(inner, RATE, total_steps=steps + 1)
    optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), **options)
    chance = torch.Generator().manual_seed(agmerge.rank())
    agmerge.barrier()
    began = time.monotonic()
    for _ in range(steps):
        inputs, targets = windows(text, torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=chance), LENGTH)
        optimizer.zero_grad()
        model.loss(inputs, targets).backward()
        optimizer.step()
        schedule.step()
    seconds = time.monotonic() - began
    with torch.no_grad(), optimizer.shared():
        inputs, targets = windows(held_out, torch.arange(0, 512 * LENGTH, LENGTH), LENGTH)
        scores = model(inputs).flatten(0, 1)
    return {
        "seconds": seconds,
        "MB": optimizer.stats()["link_bytes"] / 1e6,
        "loss": F.cross_entropy(scores, targets.flatten()).item(),
        "accuracy": (scores.argmax(1) == targets.flatten()).double().mean().item(),
    }


def run(options: dict[str, str], chosen: argparse.Namespace) -> dict[str, float]:
    """Train with several workers, each a process; return the figures of the first one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={chosen.workers}"]
    done = subprocess.run(
        [*command, __file__, "--worker", json.dumps(options), "--steps", str(chosen.steps)],
        env={**os.environ, "AGMERGE_LINK": chosen.link, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    results = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not results:
        sys.exit(f"{done.stdout}\n{done.stderr}\nthe training with {label(options)} failed, see above")
    figures: dict[str, float] = json.loads(results[0])
    return figures


def table(rows: list[tuple[str, dict[str, float]]], chosen: argparse.Namespace) -> str:
    """Return the figures of all trainings as text, one line for each; the first row is the base of the speedup."""
    lines = [
        f"GPT (0.8 million parameters), AdamW, {chosen.steps} steps, {chosen.workers} workers; "
        f"simulated network: {chosen.link} per worker",
        f"{'':20} {'seconds':>8} {'speedup':>8} {'MB sent':>8} {'held-out loss':>14} {'accuracy':>9}",
    ]
    uncompressed = rows[0][1]["seconds"]
    for name, figures in rows:
        lines.append(
            f"{name:20} {figures['seconds']:8.1f} {uncompressed / figures['seconds']:8.1f} {figures['MB']:8.1f} "
            f"{figures['loss']:14.3f} {figures['accuracy']:9.1%}"
        )
    lines.append("One short run each: differences of the loss by a few percent are chance. See docs/evidence.md.")
    return "\n".join(lines)


def main() -> None:
    """Run the three trainings, or one of their workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compression", help='compressor of the third training (default: sync="updates" instead)')
    parser.add_argument("--link", default="200mbit", help="rate of each worker's simulated network (default: 200mbit)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker is not None:
        figures = train(chosen.worker, chosen.steps)
        if agmerge.rank() == 0:
            print(MARK + json.dumps(figures), flush=True)
        return
    third = {"compression": chosen.compression} if chosen.compression else {"sync": "updates"}
    rows = []
    for options in ({"compression": "none"}, {}, third):
        print(f"training with {label(options)} ...", flush=True)
        rows.append((label(options), run(options, chosen)))
    print(table(rows, chosen))


if __name__ == "__main__":
    main()
