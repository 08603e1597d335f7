"""Train a small network on handwritten digits with several workers that exchange 1 % of their gradients.

python -m torch.distributed.run --standalone --nproc_per_node=2 examples/train_digits.py
python examples/train_digits.py                      # alone
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from digits import Data, DigitsCNN, load, shard
from options import add_options, described, given, planned
from replicas import replicas_equal
from tensorboardX import SummaryWriter
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

import agmerge

Report = Callable[[int, dict[str, float]], None]


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="agmerge on scikit-learn's digits")
    add = parser.add_argument
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=16, help="images per worker and step")
    add("--base-lr", type=float, default=0.035, help="for one worker; grows with the root of their number")
    add("--momentum", type=float, default=0.9)
    add("--wd", type=float, default=5e-4, help="weight decay")
    add("--seed", type=int, default=0, help="of the weights and of the images' order")
    add_options(parser)
    add("--log-dir", type=Path, default=Path("runs"), help="where TensorBoard finds the scalars")
    add("--json", type=Path, metavar="FILE", help="write the results there, too")
    return parser.parse_args(argv)


def wrapped(args: Namespace, model: nn.Module) -> agmerge.DistributedOptimizer:
    """SGD, distributed; all workers start from worker 0's parameters."""
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.base_lr * math.sqrt(agmerge.size()),
        momentum=args.momentum,
        weight_decay=args.wd,
    )
    agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
    agmerge.broadcast_optimizer_state(optimizer, root_rank=0)
    return agmerge.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        **given(args, model),
    )


def train(args: Namespace, model: nn.Module, optimizer: Any, data: Data, report: Report | None) -> dict[str, Any]:
    """Train ``model`` on this worker's part of the images; returns what the run measured."""
    train_x, train_y, test_x, test_y = data
    epochs = [
        shard(len(train_x), args.batch_size, agmerge.rank(), agmerge.size(), seed=10_000 * args.seed + epoch)
        for epoch in range(args.epochs)
    ]
    schedule = OneCycleLR(
        optimizer,
        max_lr=optimizer.param_groups[0]["lr"],
        total_steps=sum(map(len, epochs)),
        pct_start=0.2,
        cycle_momentum=False,
    )

    seconds = []
    scalars: dict[str, float] = {}
    for epoch, batches in enumerate(epochs):
        total = torch.zeros(())
        for batch in batches:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = cross_entropy(model(train_x[batch]), train_y[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            seconds.append(time.perf_counter() - start)
            total += loss.detach()
        stats = optimizer.stats()
        scalars = {
            "loss": agmerge.allreduce(total / len(batches)).item(),
            "accuracy": accuracy(model, test_x, test_y),
            **{name: stats[name] for name in ("bytes_sent", "bytes_dense", "density", "residual_norm")},
        }
        if report is not None:
            report(epoch, scalars)
    return {
        "workers": agmerge.size(),
        "backend": agmerge.backend_name(),
        "settings": optimizer.settings,
        "buffers": stats["buffers"],
        **scalars,
        "seconds_per_step": statistics.median(seconds),
        "replicas_equal": replicas_equal(model),
    }


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of images that are recognised; every worker looks at its part of them."""
    mine = slice(agmerge.rank(), None, agmerge.size())
    with torch.no_grad():
        hits = (model(x[mine]).argmax(1) == y[mine]).sum()
    return agmerge.allreduce(hits, op=agmerge.Sum).item() / len(y)


def progress(args: Namespace) -> Report:
    """A bar and TensorBoard scalars, for the one worker that shows them."""
    name = f"digits-{args.compression or 'default'}-{agmerge.size()}w-{time.strftime('%Y%m%d-%H%M%S')}"
    writer = SummaryWriter(str(args.log_dir / name))
    bar = tqdm(total=args.epochs, unit="epoch")

    def report(epoch: int, scalars: dict[str, float]) -> None:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, epoch + 1)
        bar.set_postfix(loss=f"{scalars['loss']:.3f}", accuracy=f"{scalars['accuracy']:.2%}")
        bar.update()
        if epoch + 1 == args.epochs:
            bar.close()
            writer.close()

    return report


def table(results: dict[str, Any]) -> str:
    """The results, for people."""
    r = results
    sent, dense = r["bytes_sent"], r["bytes_dense"]
    rows = {
        "workers": f"{r['workers']} ({r['backend']} backend)",
        "compressor": described(r["settings"]),
        "plan": planned(r["settings"], r["buffers"]),
        "test accuracy": f"{r['accuracy']:.2%}",
        "elements sent": f"{r['density']:.2%} of all, small tensors included",
        "bytes sent": f"{sent / 1e6:.2f} MB per worker; dense {dense / 1e6:.2f} MB ({dense / sent:.1f}x)",
        "seconds per step": f"{r['seconds_per_step']:.4f} (median)",
        "replicas": "bitwise equal" if r["replicas_equal"] else "DIFFERENT",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def main() -> None:
    """Train, and show the results."""
    args = arguments()
    agmerge.init()
    torch.manual_seed(args.seed)
    first = agmerge.rank() == 0
    model = DigitsCNN()
    try:
        optimizer = wrapped(args, model)
    except (TypeError, ValueError) as error:  # options that do not go together
        raise SystemExit(f"train_digits.py: {error}") from None
    results = train(args, model, optimizer, load(), progress(args) if first else None)
    if first:
        print(table(results))
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    agmerge.shutdown()
    if not results["replicas_equal"]:
        raise SystemExit("the workers' replicas differ; this is a bug in agmerge")


if __name__ == "__main__":
    main()
