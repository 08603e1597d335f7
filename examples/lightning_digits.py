# SPDX-License-Identifier: Apache-2.0
"""Train on the digits with Lightning, SGD and compressed messages.

    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/lightning_digits.py

One argument differs from a script without agmerge: the strategy. Without a launcher Lightning starts the workers.
"""

from __future__ import annotations

import argparse

import torch
from digits import DigitsCNN, load
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from agmerge.integrations.lightning import CompressedDDPStrategy


class Digits(LightningModule):
    """Learn which digit an image shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DigitsCNN()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        right = (self.net(x).argmax(1) == y).float().mean()
        self.log("accuracy", right, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    """Train on every worker's part of the images, and test the model on all the others."""
    parser = argparse.ArgumentParser(description="Digits, trained with Lightning")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--devices", type=int, default=2, help="workers on this machine")
    parser.add_argument("--out", default="runs/lightning_digits", help="for checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    args = parser.parse_args()

    seed_everything(0)
    train_x, train_y, test_x, test_y = load()
    train = DataLoader(TensorDataset(train_x, train_y), batch_size=16, shuffle=True, drop_last=True)
    test = DataLoader(TensorDataset(test_x, test_y), batch_size=60)
    strategy = CompressedDDPStrategy(compression="topk", density=0.01, exchange="sparse")
    trainer = Trainer(
        strategy=strategy,  # the one line
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        gradient_clip_val=5.0,
        default_root_dir=args.out,
        callbacks=[ModelCheckpoint(args.out, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), train, test, ckpt_path="last" if args.resume else None)

    if trainer.is_global_zero and strategy.compressed is not None:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")
        stats = strategy.compressed.stats()
        print(f"bytes sent {stats['bytes_sent']}, dense {stats['bytes_dense']}")


if __name__ == "__main__":
    main()
