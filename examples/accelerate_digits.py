# SPDX-License-Identifier: Apache-2.0
"""Train on the digits with Accelerate, SGD and compressed messages.

    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/accelerate_digits.py

One line differs from a script without agmerge: the call of ``compress``. ``accelerate launch`` starts it too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import DigitsCNN, load
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from agmerge.integrations.accelerate import compress


def main() -> None:
    """Train on every worker's part of the images, and test the model on all the others."""
    parser = argparse.ArgumentParser(description="Digits, trained with Accelerate")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate_digits"), help="for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint")
    args = parser.parse_args()

    set_seed(0)
    train_x, train_y, test_x, test_y = load()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = DigitsCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    compressed = compress(accelerator, model, compression="topk", density=0.01, exchange="sparse")  # the one line
    if args.resume:
        accelerator.load_state(str(args.out))

    for _ in range(args.epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state(str(args.out))

    model.eval()
    with torch.no_grad():
        right = model(test_x.to(accelerator.device)).argmax(1).cpu() == test_y
    accelerator.print(f"accuracy {right.float().mean():.4f}")
    if compressed is not None:  # more than one process
        stats = compressed.stats()
        accelerator.print(f"bytes sent {stats['bytes_sent']}, dense {stats['bytes_dense']}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
