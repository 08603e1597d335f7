# SPDX-License-Identifier: Apache-2.0
"""Horovod's MNIST example with one line changed: its flags, its structure and its lines of output.

``--compression topk --density 0.01`` is what this library adds, and ``--compression acpsgd --rank 4`` is the example of
the ACP-SGD project. Nothing is downloaded: ``--data-dir`` is a folder with MNIST's four files as they are published
(``train-images-idx3-ubyte.gz`` and so on, gzipped or not); without it the images are the 1797 of 8 x 8 pixels that come
with scikit-learn.

    horovodrun -np 2 python examples/mnist.py --compression topk --data-dir ~/mnist
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/mnist.py
    python examples/mnist.py                             # alone
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from data import idx
from digits import Data, DigitsCNN, load
from options import add_options, given
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from training.progress import Curves, add_log_dir, bar, say

import agmerge as hvd  # the migrated line; it was: import horovod.torch as hvd

HALF = {"cuda": torch.float16, "cpu": torch.bfloat16}  # what a device computes with in mixed precision


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line: Horovod's flags, then ours."""
    parser = argparse.ArgumentParser(description="Digits, trained by several workers")
    add = parser.add_argument
    add("--data-dir", type=Path, help="a folder with MNIST's four idx files; without it: scikit-learn's digits")
    add("--batch-size", type=int, help="training images per worker and step; without it: 64, of the digits 16")
    add("--test-batch-size", type=int, default=1000, help="test images per batch")
    add("--epochs", type=int, default=10)
    add("--lr", type=float, default=0.01, help="for one worker; it grows with their number")
    add("--momentum", type=float, default=0.5)
    add("--no-cuda", action="store_true", help="train on the CPU")
    add("--seed", type=int, default=42)
    add("--log-interval", type=int, default=10, help="batches between two lines of output")
    add("--fp16-allreduce", action="store_true", help="exchange gradients in 16 bits; the same as --compression fp16")
    add("--use-mixed-precision", action="store_true", help="compute in 16 bits, with a GradScaler")
    add("--use-adasum", action="store_true", help="refused")
    add("--gradient-predivide-factor", type=float, default=1.0, help="divide by it before the sum, multiply after it")
    add_log_dir(parser)
    add_options(parser, "none, as in Horovod's script")
    args = parser.parse_args(argv)
    if args.use_adasum:
        parser.error("--use-adasum: agmerge does not combine gradients by Adasum; leave it out to average them")
    if args.fp16_allreduce and args.compression not in (None, "fp16"):
        parser.error(f"--fp16-allreduce and --compression {args.compression} contradict each other; give one")
    args.compression = "fp16" if args.fp16_allreduce else args.compression or "none"
    if args.batch_size is None:
        # A quarter of Horovod's: there are 40 times fewer images, and ten epochs should be enough steps.
        args.batch_size = 64 if args.data_dir else 16
    return args


def data(folder: Path | None) -> Data:
    """(train_x, train_y, test_x, test_y): MNIST's from ``folder``, or the digits.

    Images are [n, 1, side, side], standardised by the mean and deviation of those for training. Raises ``OSError`` or
    ``ValueError`` for files that are missing or broken.
    """
    if folder is None:
        return load()
    train_x, train_y, test_x, test_y = (torch.tensor(part) for part in idx.load(folder))
    if train_x.shape[1] != train_x.shape[2]:
        raise ValueError(f"{folder}: images of {train_x.shape[1]} x {train_x.shape[2]} pixels are not square")
    mean, deviation = train_x.float().mean(), train_x.float().std()
    train_x, test_x = ((x.float()[:, None] - mean) / deviation for x in (train_x, test_x))
    return train_x, train_y.long(), test_x, test_y.long()


def loaders(args: Namespace, found: Data) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Training and test images; each worker's sampler gives it a part of its own."""
    train_x, train_y, test_x, test_y = found

    def loader(x: Tensor, y: Tensor, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
        images = TensorDataset(x, y)
        sampler = DistributedSampler(images, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
        return DataLoader(images, batch_size=batch_size, sampler=sampler)

    return loader(train_x, train_y, args.batch_size), loader(test_x, test_y, args.test_batch_size)


def train(
    epoch: int,
    args: Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, ...]],
    device: torch.device,
    scaler: torch.amp.GradScaler,
    curves: Curves,
) -> None:
    """One epoch. A ``scaler`` that is not enabled changes nothing."""
    model.train()
    loader.sampler.set_epoch(epoch)  # another order in every epoch
    images, before = len(loader.sampler), (epoch - 1) * len(loader)
    for index, (data, target) in enumerate(bar(f"epoch {epoch}/{args.epochs}", loader, first=hvd.rank() == 0)):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, HALF[device.type], enabled=scaler.is_enabled()):
            loss = F.cross_entropy(model(data), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        curves.add(before + index + 1, {"train/loss": loss})
        if index % args.log_interval == 0 and hvd.rank() == 0:
            done, share = index * args.batch_size, index / len(loader)
            say(f"Train Epoch: {epoch} [{done}/{images} ({share:.0%})]\tLoss: {loss.item():.6f}")


def metric_average(value: float, name: str) -> float:
    """The average of every worker's ``value``."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], device: torch.device) -> dict[str, float]:
    """Print and return loss and accuracy on the test images; every worker looks at its part."""
    model.eval()
    loss = hits = 0.0
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        output = model(data)
        loss += F.cross_entropy(output, target, reduction="sum").item()
        hits += (output.argmax(1) == target).sum().item()
    images = len(loader.sampler)
    loss = metric_average(loss / images, "avg_loss")
    accuracy = metric_average(hits / images, "avg_accuracy")
    if hvd.rank() == 0:
        print(f"\nTest set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%\n", flush=True)
    return {"val/loss": loss, "val/accuracy": accuracy}


def main() -> None:
    """Train, with a test after every epoch."""
    args = arguments()
    try:
        images = data(args.data_dir)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--data-dir: {error}") from None
    hvd.init()
    torch.manual_seed(args.seed)
    cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())  # workers may share one
        torch.cuda.set_device(device)
        torch.cuda.manual_seed(args.seed)
    if args.data_dir is None and hvd.rank() == 0:
        print("Images: scikit-learn's digits, 8 x 8 pixels; --data-dir takes MNIST's own files", flush=True)
    train_loader, test_loader = loaders(args, images)
    model = DigitsCNN(side=images[0].shape[-1]).to(device)

    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scaler = torch.amp.GradScaler(device.type, enabled=args.use_mixed_precision)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        op=hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
        scaler=scaler,
        **given(args, model),
    )
    curves = Curves(args.log_dir, first=hvd.rank() == 0)
    for epoch in range(1, args.epochs + 1):
        train(epoch, args, model, optimizer, train_loader, device, scaler, curves)
        curves.add(epoch * len(train_loader), test(model, test_loader, device))
    curves.close()
    hvd.shutdown()


if __name__ == "__main__":
    main()
