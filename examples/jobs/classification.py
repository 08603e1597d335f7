# SPDX-License-Identifier: Apache-2.0
"""Train a network to classify pictures, wherever they come from: what the jobs with pictures have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jobs.base import Settings, Task, held_out, share

Batch = tuple[Tensor, Tensor]  # pictures, floats [n, channels, side, side], and classes, int64 [n]

TOP = 5  # classes that may be guessed for the second metric of ImageNet


class Classification(Task):
    """Train a network that gives a number for each class; a subclass reads the pictures.

    network: makes it, with ``sizes``. counts: of pictures that are trained with, by all workers, and held out. weights:
    whether the network takes ``--weights``. Raises ``ValueError`` if a worker has not one batch.
    """

    unit = "images"
    metric = "accuracy"

    def __init__(
        self,
        settings: Settings,
        network: Callable[..., nn.Module],
        counts: tuple[int, int],
        weights: bool,
        **sizes: Any,
    ) -> None:
        if settings.weights is not None:
            if not weights:
                raise ValueError("--weights: only networks of transformers (vit, gpt2, bert) are read from a folder")
            sizes["weights"] = settings.weights
        self.settings = settings
        self.samples = settings.recipe.batch_size
        self.count, held = counts
        self.held = torch.arange(held)[held_out(held, settings)]  # this worker's
        self.model = network(**sizes)
        if not self.passes(0):
            raise ValueError(
                f"{self.count} pictures are not one batch of {self.samples} for each of {settings.workers} workers: "
                "give a smaller --batch-size"
            )

    def passes(self, epoch: int) -> int:
        own = len(share(self.count, self.settings, epoch))
        return -(-own // self.samples) if self.settings.uneven else own // self.samples

    def order(self, epoch: int) -> tuple[Tensor, ...]:
        """Return the pictures of each of this worker's batches, of equal numbers; uneven, they may differ by one."""
        passes = self.passes(epoch)
        return share(self.count, self.settings, epoch)[: passes * self.samples].tensor_split(passes)

    def loss(self, batch: Batch) -> Tensor:
        pictures, classes = batch
        return F.cross_entropy(self.model(pictures), classes)

    @abstractmethod
    def held_batches(self) -> Iterator[Batch]:
        """Yield this worker's part of what is held out, as it is."""

    def evaluate(self) -> dict[str, Tensor]:
        sums = torch.zeros(4, dtype=torch.float64)
        for pictures, classes in self.held_batches():
            scores = self.model(pictures).float()
            best = scores.topk(min(TOP, scores.shape[1])).indices == classes[:, None]
            loss = F.cross_entropy(scores, classes, reduction="sum")
            found = (loss, best[:, 0].sum(), best.sum(), len(classes))
            sums += torch.tensor([float(value) for value in found], dtype=torch.float64)
        return dict(zip(("loss", "hits", "hits5", "count"), sums, strict=True))

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"accuracy": sums["hits"] / sums["count"], "loss": sums["loss"] / sums["count"]}
