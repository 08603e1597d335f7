# SPDX-License-Identifier: Apache-2.0
"""Tasks on which ``agmerge compare`` trains: three small models, on data that is installed already."""

from __future__ import annotations

import copy
import importlib.util
import math
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import agmerge
from agmerge import testing

Pair = tuple[Tensor, Tensor]  # inputs and targets
POINTS = 12  # evaluations of a training
WARM_UP = 0.1  # share of the steps in which the learning rate rises

# Models.


def perceptron() -> nn.Module:
    """Return a network of two layers for pictures of 8 x 8 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


class Residual(nn.Module):
    """Two convolutions, added to what comes in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, pictures: Tensor) -> Tensor:
        """Return pictures of the same shape: (n, channels, height, width)."""
        result: Tensor = pictures + self.body(pictures)
        return result


def residual_network() -> nn.Module:
    """Return a convolutional network with three residual blocks for pictures of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), Residual(16), nn.Conv2d(16, 32, 3, stride=2, padding=1), Residual(32),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), Residual(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip


CONTEXT, WIDTH, HEADS = 64, 64, 4  # of the language model


class Block(nn.Module):
    """Layer of a transformer: causal attention, then two linear maps, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape: (rows, tokens, width)."""
        rows, length, width = hidden.shape
        parts = self.mixed(self.first(hidden)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        moved: Tensor = hidden + self.down(F.gelu(self.up(self.second(hidden))))
        return moved


class Language(nn.Module):
    """Transformer of two layers over bytes, 0.1 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next byte, (rows, 256, tokens), for bytes, int64 (rows, tokens)."""
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(hidden))).transpose(1, 2)
        return logits


# Data.


def digits() -> tuple[Pair, Pair]:
    """Return pictures of digits, for training and for evaluation. Raises ModuleNotFoundError without scikit-learn."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the digits are a file of scikit-learn: pip install scikit-learn")
    rows = torch.from_numpy(
        np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    )
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    pictures, labels = rows[:, :-1].float().view(-1, 1, 8, 8) / 16.0, rows[:, -1].long()
    return (pictures[:-360], labels[:-360]), (pictures[-360:], labels[-360:])


def text() -> tuple[Pair, Pair]:
    """Return rows of bytes of Python's standard library: those to read, and those to predict."""
    folder = Path(sysconfig.get_path("stdlib"))
    content = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    rows = rows[: len(rows) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    inputs, targets = rows[:, :-1], rows[:, 1:]
    return (inputs[:-256], targets[:-256]), (inputs[-256:], targets[-256:])


# Trainings.


@dataclass(frozen=True)
class Task:
    """Model, data, and how it is trained."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Pair, Pair]]  # for training, for evaluation
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: int  # rows of a step, of all workers together
    steps: int
    bound: float | None = None  # of the gradient's norm


def _sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


TASKS = {
    "digits": Task(perceptron, digits, _sgd, batch=64, steps=300),
    "gpt-small": Task(Language, text, _adamw, batch=32, steps=400, bound=1.0),
    # With a rate of 0.1 uncompressed training diverges.
    "resnet-digits": Task(residual_network, digits, partial(_sgd, rate=0.03), batch=64, steps=150),
}


@dataclass(frozen=True)
class Outcome:
    """Result of a training: losses, traffic and processor time."""

    losses: list[float]  # on the rows for evaluation, at equal distances in steps; the last one is at the end
    bytes_per_step: float  # that leave a worker
    seconds_per_step: float  # of a worker's processor: the backward pass and the step, with all that is exchanged


def train(task: Task, options: Mapping[str, Any], workers: int, seed: int, steps: int) -> Outcome:
    """Train ranks in memory, and return the outcome.

    Args:
        task: model, data and optimizer.
        options: of :class:`agmerge.DistributedOptimizer`; objects in it are copied for each rank.
        workers: number of ranks, which divides the batch.
        seed: of weights and batches.
        steps: at least ``POINTS``.
    """
    torch.manual_seed(seed)
    model, (known, held_out) = task.model(), task.data()
    copies = [(copy.deepcopy(model), copy.deepcopy(dict(options))) for _ in range(workers)]
    every = steps // POINTS

    def body(rank: int) -> tuple[list[float], float, float]:
        own, arguments = copies[rank]
        optimizer = agmerge.DistributedOptimizer(
            task.optimizer(own), own.named_parameters(), timeout=3600.0, **arguments
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
        losses: list[float] = []
        spent = 0.0
        for step in range(1, steps + 1):
            rows = torch.randint(
                len(known[0]), (task.batch,), generator=torch.Generator().manual_seed(seed * 1_000_003 + step)
            )[rank::workers]
            optimizer.zero_grad()
            loss = F.cross_entropy(own(known[0][rows]), known[1][rows])
            began = time.thread_time()
            loss.backward()  # type: ignore[no-untyped-call]
            try:
                if task.bound is not None:
                    optimizer.clip_grad_norm_(task.bound)
                optimizer.step()
            except agmerge.NonFiniteError:  # on all ranks
                losses += [math.inf] * (POINTS - len(losses))
                return losses, optimizer.stats()["link_bytes"] / step, spent / step
            spent += time.thread_time() - began
            schedule.step()
            if rank == 0 and step % every == 0 and len(losses) < POINTS:
                losses.append(evaluated(own, held_out))
        return losses, optimizer.stats()["link_bytes"] / steps, spent / steps

    found = testing.run(workers, body)
    seconds = sum(each[2] for each in found) / workers
    return Outcome(found[0][0], found[0][1], seconds)


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate of a step in units of the highest one: a warm-up, then half a cosine."""
    warm = max(1, round(WARM_UP * steps))
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@torch.no_grad()
def evaluated(model: nn.Module, rows: Pair) -> float:
    """Return the mean loss on ``rows``."""
    model.eval()
    loss = F.cross_entropy(model(rows[0]), rows[1])
    model.train()
    return float(loss)


def steps_to(losses: list[float], target: float, steps: int) -> float | None:
    """Return after how many of ``steps`` a loss is reached, between two evaluations by a straight line; None: never."""
    every, before = steps / POINTS, math.inf
    for number, loss in enumerate(losses):
        if loss <= target:
            return every * (number + ((before - target) / (before - loss) if math.isfinite(before) else 1.0))
        before = loss
    return None
