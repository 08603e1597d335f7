# SPDX-License-Identifier: Apache-2.0
"""Train scikit-learn's digits in replicas whose parameters are sharded (FSDP2); agmerge exchanges between replicas.

Of W workers, W / --shard replicas of so many shards each; "cpu" stands for "cuda" on machines with GPUs, where a
replica would be a node.

python -m torch.distributed.run --standalone --nproc_per_node=4 examples/fsdp2_digits.py
python -m torch.distributed.run --standalone --nproc_per_node=4 examples/fsdp2_digits.py --local-steps 4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from digits import DigitsCNN, load, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from training.progress import Curves, add_log_dir, bar

import agmerge

BATCH = 8  # images of a worker and step


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--shard", type=int, default=2, help="workers of a replica, which hold a shard each")
    parser.add_argument("--compression", default="topk")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--local-steps", type=int, default=0, help="exchange after so many of AdamW; 0: gradients")
    add_log_dir(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the share of test images that are classified right."""
    args = arguments(argv)
    dist.init_process_group("gloo")
    agmerge.init()
    torch.manual_seed(42)
    train_x, train_y, test_x, test_y = load()
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // args.shard, args.shard), mesh_dim_names=("replicate", "shard")
    )
    model = DigitsCNN()
    for layer in model.children():
        fully_shard(layer, mesh=mesh["shard"])  # of one dimension: FSDP itself must not average over replicas
    fully_shard(model, mesh=mesh["shard"])
    agmerge.broadcast_parameters(model.state_dict(), process_set=mesh["replicate"])
    if args.local_steps:
        optimizer: agmerge.DistributedOptimizer = agmerge.LocalOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.002),
            model.named_parameters(),
            every=args.local_steps,
            process_set=mesh["replicate"],
            exchange="sparse",
        )
    else:
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            model.named_parameters(),
            process_set=mesh["replicate"],
            compression=args.compression,
            density=args.density,
            exchange="sparse",
        )
    first, step = dist.get_rank() == 0, 0
    curves = Curves(args.log_dir, first)
    for epoch in range(args.epochs):
        batches = shard(len(train_x), BATCH, dist.get_rank(), dist.get_world_size(), seed=epoch)
        for indices in bar(f"epoch {epoch + 1}/{args.epochs}", batches, first=first):
            optimizer.zero_grad()
            loss = cross_entropy(model(train_x[indices]), train_y[indices])
            loss.backward()
            if args.local_steps:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of this replica's own gradients
                optimizer.step()
            else:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
            step += 1
            curves.add(step, {"train/loss": loss})
    with torch.no_grad(), optimizer.shared():
        accuracy = float((model(test_x).argmax(1) == test_y).float().mean())
    curves.add(step, {"val/accuracy": accuracy})
    curves.close()
    stats = optimizer.stats()
    if first:
        print(f"accuracy {accuracy:.4f}, {stats['bytes_sent']} bytes sent, {stats['bytes_dense']} without compression")
    agmerge.shutdown()
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
