# SPDX-License-Identifier: Apache-2.0
"""Does the plan follow the network? Two workers train while their links slow down from one rate to another.

    python benchmarks/adaptation.py
    python benchmarks/adaptation.py --fast 1gbit --slow 100mbit --density 0.02

Three plans are compared in interleaved blocks of steps on the slow link, all of them frozen: the one from before the
change ("old"), the one that the same training had adapted to some steps after it ("adapted"), and one that was made
on the slow link from the start ("fresh"). Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

from lab.worker_results import received_results, send_result

BEFORE, AFTER, FRESH, BLOCK = 60, 100, 12, 8  # steps


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="a change of the network's rate during training")
    parser.add_argument("--model", default="mlp", help="mlp, or one of examples/models.py")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--fast", default="1gbit")
    parser.add_argument("--slow", default="100mbit")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


class Training:
    """One optimizer on the model, and how long its steps take."""

    def __init__(self, args: argparse.Namespace, plan: Any) -> None:
        import models
        import torch

        import agmerge

        torch.manual_seed(0)
        self.work = _mlp(args.batch) if args.model == "mlp" else models.build(args.model, args.batch, 64)
        self.optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(self.work.model.parameters(), lr=0.001),
            self.work.model.named_parameters(),
            compression="topk",
            density=args.density,
            exchange="sparse",
            merging=plan,
        )

    def steps(self, count: int) -> list[float]:
        """Seconds of each of so many steps."""
        took = []
        for _ in range(count):
            start = time.perf_counter()
            self.optimizer.zero_grad()
            self.work.loss().backward()
            self.optimizer.step()
            took.append(time.perf_counter() - start)
        return took

    def residuals(self) -> str:
        """A digest of all residuals."""
        found = self.optimizer.state_dict()["agmerge"]["residuals"]
        return hashlib.sha256(b"".join(found[name].numpy().tobytes() for name in sorted(found))).hexdigest()


def _mlp(batch: int) -> Any:
    """Sixteen linear layers, four million parameters: backward takes about as long as its message on a slow link."""
    import models
    import torch
    from torch import nn

    layers = [layer for _ in range(16) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(512, models.CLASSES))
    return models.Workload(model, torch.randn(batch, 512), torch.randint(models.CLASSES, (batch,)), "samples")


def worker(args: argparse.Namespace) -> None:
    """One rank."""
    import torch

    import agmerge

    agmerge.init()
    torch.set_num_threads(1)
    training = Training(args, "agmerge")
    training.steps(BEFORE)
    old = training.optimizer.plan
    agmerge.barrier()
    if agmerge.rank() == 0:
        args.worker.write_text("slow", encoding="utf-8")
    while args.worker.exists():  # until the links have changed
        time.sleep(0.01)
    agmerge.barrier()
    changed = None
    for step in range(AFTER):
        training.steps(1)
        if changed is None and training.optimizer.plan != old:
            changed = step + 1
    adapted = training.optimizer.plan
    fresh = Training(args, "agmerge")
    fresh.steps(FRESH)
    plans = {"old": old, "adapted": adapted, "fresh": fresh.optimizer.plan}
    fresh.optimizer.close()
    training.optimizer.close()
    rounds = {name: Training(args, plan) for name, plan in plans.items()}
    for one in rounds.values():
        one.steps(2)
    took: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(args.blocks):
        for name, one in rounds.items():
            took[name].append(statistics.median(one.steps(BLOCK)))
    if agmerge.rank() == 0:
        counts = {name: plan.counts for name, plan in plans.items()}
        modes = {name: plan.labels[0] or "behind" for name, plan in plans.items()}
        send_result({"changed": changed, "plans": counts, "modes": modes, "took": took})
    agmerge.shutdown()


def main() -> None:
    """Launch, change the rate when the workers ask for it, report."""
    args = arguments()
    if args.worker:
        worker(args)
        return
    from lab.network import Network

    signal = Path(f"/tmp/agmerge-adaptation-{time.time_ns()}")
    with Network(2, args.fast) as network:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", str(signal), "--model", args.model]
        command += ["--batch", str(args.batch), "--density", str(args.density), "--blocks", str(args.blocks)]
        started = network.start(command)
        while not signal.exists() and all(process.poll() is None for process in started):
            time.sleep(0.05)
        network.shape(args.slow)
        signal.unlink(missing_ok=True)
        output = network.wait(started, timeout=1200)[0]
    found = received_results(output)[0]
    print(f"{args.model}, density {args.density}, {args.fast} to {args.slow}: changed after {found['changed']} steps")
    for name, counts in found["plans"].items():
        median = 1e3 * statistics.median(found["took"][name])
        print(f"  {name:8} {found['modes'][name]:7} {median:8.1f} ms a step  {len(counts)} merge buffers: {counts}")
    for name in ("old", "adapted"):
        ratios = [a / b for a, b in zip(found["took"][name], found["took"]["fresh"], strict=True)]
        print(f"  {name} / fresh: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
