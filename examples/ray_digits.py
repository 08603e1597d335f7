# SPDX-License-Identifier: Apache-2.0
"""Train scikit-learn's digits under Ray Train, whose DistributedDataParallel agmerge compresses: one line more.

python examples/ray_digits.py --workers 2 --epochs 4                      # needs: pip install "ray[train]"
python examples/ray_digits.py --workers 2 --epochs 8 --name digits-run    # goes on where a run of this name was saved
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch
from digits import DigitsCNN, load, shard
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.nn.functional import cross_entropy

from agmerge.integrations import ddp, files

BATCH = 16  # images of a worker and step


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--compression", default="topk")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--storage", type=Path, default=Path("runs").absolute(), help="where all hosts can write")
    parser.add_argument("--name", help="of the run; without it a new one")
    return parser.parse_args(argv)


def train(config: dict[str, Any]) -> None:
    """One worker. Ray has made the process group, so agmerge takes that."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(42)
    train_x, train_y, test_x, test_y = load()
    model = prepare_model(DigitsCNN())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compressed = ddp.compress(
        model, compression=config["compression"], density=config["density"], exchange="sparse", merging="threshold"
    )
    first = restore(ray.train.get_checkpoint(), model, optimizer, compressed)
    for epoch in range(first, config["epochs"]):
        for indices in shard(len(train_x), BATCH, rank, size, seed=epoch):
            optimizer.zero_grad()
            cross_entropy(model(train_x[indices]), train_y[indices]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float((model.module(test_x).argmax(1) == test_y).float().mean())
        stats = compressed.stats()
        report = {"epoch": epoch, "accuracy": accuracy, "sent": stats["bytes_sent"], "dense": stats["bytes_dense"]}
        with tempfile.TemporaryDirectory() as folder:
            files.save(compressed, folder)  # every rank its own file; Ray puts those of all workers together
            if rank == 0:
                state = {"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, Path(folder, "training.pt"))
            ray.train.report(report, checkpoint=ray.train.Checkpoint.from_directory(folder))


def restore(checkpoint: Any, model: Any, optimizer: torch.optim.Optimizer, compressed: ddp.Compressed) -> int:
    """Take back what was saved, if anything was; return the epoch to begin with."""
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, "training.pt"), weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        files.load(compressed, folder)
    return int(state["epoch"]) + 1


def main(argv: Sequence[str] | None = None) -> float:
    """Have Ray start the workers; return the share of test images that are classified right."""
    args = arguments(argv)
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs, "compression": args.compression, "density": args.density},
        torch_config=TorchConfig(backend=None if torch.cuda.is_available() else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(name=args.name, storage_path=str(args.storage)),
    )
    metrics = trainer.fit().metrics
    assert metrics is not None
    print(f"accuracy {metrics['accuracy']:.4f}, {metrics['sent']} bytes sent, {metrics['dense']} without compression")
    return float(metrics["accuracy"])


if __name__ == "__main__":
    main()
