# SPDX-License-Identifier: Apache-2.0
"""Scikit-learn's handwritten digits and a small network for them: what the examples and benchmarks share."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import Tensor, nn

Data = tuple[Tensor, Tensor, Tensor, Tensor]


def load(fold: int | None = None, folds: int = 5, seed: int = 0) -> Data:
    """(train_x, train_y, test_x, test_y), standardised by the mean and deviation of the training images.

    Without a fold: one stratified 80/20 split. With one: that fold of all 1797 images is the test set.
    ``seed`` decides which images meet in a split; it has nothing to do with training.
    """
    images, labels = load_digits(return_X_y=True)
    if fold is None:
        train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=seed)
    elif 0 <= fold < folds:
        splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
        train, test = list(splitter.split(images, labels))[fold]
    else:
        raise ValueError(f"fold={fold}: there are {folds} folds, 0 to {folds - 1}")
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels, dtype=torch.int64)
    x = (x - x[train].mean()) / x[train].std()
    return x[train], y[train], x[test], y[test]


def shard(count: int, batch_size: int, rank: int, size: int, seed: int) -> Tensor:
    """The batches of one rank for one epoch, as indices [steps, batch_size]; equally many on every rank.

    All ranks draw the same order from ``seed`` and deal it out, so no image is used twice in an epoch.
    """
    steps = count // (batch_size * size)
    if steps == 0:
        raise ValueError(f"{count} images are not one batch of {batch_size} for each of {size} workers")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[: steps * size * batch_size].view(steps, size, batch_size)[:, rank]


class DigitsCNN(nn.Module):
    """Two convolutions and two linear layers for images of ``side`` x ``side`` pixels.

    With the digits' 8 they have 151,306 parameters, so that 1 % still means something. width: channels of the first
    convolution; the second has twice as many, and the first linear layer four times as many outputs.
    """

    def __init__(self, side: int = 8, width: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc1 = nn.Linear(2 * width * (side // 2) ** 2, 4 * width)
        self.fc2 = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).relu()
        x = self.conv2(x).relu()
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        return self.fc2(self.fc1(x).relu())
