# SPDX-License-Identifier: Apache-2.0
"""Define the jobs that train GPT-2 in three sizes on WikiText, in blocks of 1024 tokens that are shuffled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from data import text
from networks.gpt2 import SIZES, gpt2
from torch import Tensor, nn
from torch.nn import functional as F

from jobs.base import Job, Recipe, Settings, folder, held_out, share
from jobs.perplexity import LanguageTask
from jobs.schedules import Linear


class Blocks(LanguageTask):
    """Cut the text into blocks of equal length; a worker's part of them is another one in every epoch.

    Each block predicts the tokens behind its own, the first one of the next block among them.
    """

    unit = "sequences"

    def __init__(self, data: str, settings: Settings, network: Callable[..., nn.Module]) -> None:
        self.settings, self.samples = settings, settings.recipe.batch_size
        self.text = text.tokens(folder(settings, data), settings.tokenizer or text.beside(settings.weights))
        count = (len(self.text.train) - 1) // settings.recipe.length
        if count < settings.workers:
            raise ValueError(f"{data} has {count} blocks of {settings.recipe.length} tokens, fewer than workers")
        self.x, self.y = text.columns(self.text.train[: count * settings.recipe.length + 1], count)
        self.model = network(vocabulary=self.text.vocabulary, weights=settings.weights)

    def passes(self, epoch: int) -> int:
        return len(self._order(epoch))

    def batches(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for mine in self._order(epoch)[first:]:
            yield self.x[mine].to(self.settings.device).long(), self.y[mine].to(self.settings.device).long()

    def _order(self, epoch: int) -> tuple[Tensor, ...]:
        return share(len(self.x), self.settings, epoch).split(self.samples)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.scores(x, None)[0].flatten(0, 1), y.flatten())

    def scores(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.model(x, use_cache=False).logits, None

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = text.rows(self.text.valid, self.settings.recipe.length)
        mine = held_out(len(x), self.settings)
        for one, other in zip(x[mine].split(self.samples), y[mine].split(self.samples), strict=True):
            yield one.to(self.settings.device), other.to(self.settings.device)


RECIPE = Recipe("adamw", 5e-5, 2, 30, schedule=Linear(), length=1024)
TINY = {"lr": 0.005, "batch_size": 8, "epochs": 2, "length": 64, "clip": 1.0}

JOBS = {
    f"{size}-{data}": Job(
        f"{size}-{data}",
        f"{size} on {title} (ADTopk)",
        RECIPE,
        partial(gpt2, size),
        partial(Blocks, data),
        TINY,
    )
    for size in SIZES
    for data, title in (("wikitext2", "WikiText-2"), ("wikitext103", "WikiText-103"))
}
