# SPDX-License-Identifier: Apache-2.0
"""Train a small network on scikit-learn's digits: the job of ``make train``, which needs no data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from digits import DigitsCNN, load, shard
from torch import Tensor, nn
from torch.nn import functional as F

from jobs.base import Job, Recipe, Settings, Task, held_out
from jobs.schedules import OneCycle

Batch = tuple[Tensor, Tensor]


class Digits(Task):
    """Classify images of 8 x 8 pixels: 1437 to train with, 360 held out."""

    unit, metric = "images", "accuracy"

    def __init__(self, settings: Settings, network: Callable[..., nn.Module]) -> None:
        self.settings, self.samples = settings, settings.recipe.batch_size
        self.train_x, self.train_y, self.test_x, self.test_y = (part.to(settings.device) for part in load())
        self.model = network()

    def _epoch(self, epoch: int) -> Tensor:
        s = self.settings
        return shard(len(self.train_x), self.samples, s.rank, s.workers, seed=10_000 * s.seed + epoch)

    def passes(self, epoch: int) -> int:
        return len(self._epoch(epoch))

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        for chosen in self._epoch(epoch)[first:]:
            yield self.train_x[chosen], self.train_y[chosen]

    def loss(self, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def evaluate(self) -> dict[str, Tensor]:
        part = held_out(len(self.test_x), self.settings)
        hits = (self.model(self.test_x[part]).argmax(1) == self.test_y[part]).sum()
        return {"hits": hits, "count": torch.tensor(len(self.test_y[part]))}

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"accuracy": sums["hits"] / sums["count"]}


def network(tiny: bool = False) -> nn.Module:
    """Return the network, which is small already."""
    return DigitsCNN()


RECIPE = Recipe("sgd", 0.035, 16, 20, growth="root", momentum=0.9, wd=5e-4, schedule=OneCycle(0.2))
JOBS = {
    "digits": Job(
        "digits", "a CNN of 151,306 parameters, scikit-learn's digits", RECIPE, network, Digits, tiny={"epochs": 5}
    )
}
