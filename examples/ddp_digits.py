# SPDX-License-Identifier: Apache-2.0
"""Train scikit-learn's digits in DistributedDataParallel, whose gradients agmerge exchanges: one line more.

python -m torch.distributed.run --standalone --nproc_per_node=2 examples/ddp_digits.py
python -m torch.distributed.run --standalone --nproc_per_node=2 examples/ddp_digits.py --local-steps 4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from digits import DigitsCNN, load, shard
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from training.progress import Curves, add_log_dir, bar

from agmerge.integrations import ddp

BATCH = 16  # images of a worker and step


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--compression", default="topk")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--local-steps", type=int, default=0, help="exchange after so many of AdamW; 0: gradients")
    add_log_dir(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the share of test images that are classified right."""
    args = arguments(argv)
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    train_x, train_y, test_x, test_y = load()
    net = DigitsCNN()
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    if args.local_steps:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.002)
        compressed = ddp.compress(model, optimizer=optimizer, sync="updates", every=args.local_steps, exchange="sparse")
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        compressed = ddp.compress(model, compression=args.compression, density=args.density, exchange="sparse")
    first, step = dist.get_rank() == 0, 0
    curves = Curves(args.log_dir, first)
    for epoch in range(args.epochs):
        batches = shard(len(train_x), BATCH, dist.get_rank(), dist.get_world_size(), seed=epoch)
        for indices in bar(f"epoch {epoch + 1}/{args.epochs}", batches, first=first):
            optimizer.zero_grad()
            loss = cross_entropy(model(train_x[indices]), train_y[indices])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            curves.add(step, {"train/loss": loss})
    with torch.no_grad(), compressed.shared():
        accuracy = float((net(test_x).argmax(1) == test_y).float().mean())
    curves.add(step, {"val/accuracy": accuracy})
    curves.close()
    stats = compressed.stats()
    if first:
        print(f"accuracy {accuracy:.4f}, {stats['bytes_sent']} bytes sent, {stats['bytes_dense']} without compression")
    compressed.close()
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
