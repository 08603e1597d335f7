# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on the source text of Python's standard library; workers exchange what their AdamW did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from gpt import GPT, VOCABULARY, corpus, unigram_loss, windows
from torch import Tensor, nn

from jobs.base import Job, Recipe, Settings, Task
from jobs.schedules import OneCycle

Batch = tuple[Tensor, Tensor]
PASSES = 100  # batches of an epoch, which are drawn anywhere in the text
HELD_OUT = 256  # sequences that are evaluated


class Stdlib(Task):
    """Predict the next byte."""

    unit, metric = "sequences", "perplexity"

    def __init__(self, settings: Settings, network: Callable[..., nn.Module]) -> None:
        self.settings, self.samples, self.length = settings, settings.recipe.batch_size, settings.recipe.length
        self.text, self.rest = corpus()
        self.model = network(context=self.length)

    def passes(self, epoch: int) -> int:
        return PASSES

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        s = self.settings
        for number in range(epoch * PASSES + first, (epoch + 1) * PASSES):
            source = torch.Generator().manual_seed(1_000_000 * s.seed + number)
            starts = torch.randint(len(self.text) - self.length, (self.samples * s.workers,), generator=source)
            yield self._at(self.text, starts[s.rank :: s.workers])

    def _at(self, text: Tensor, starts: Tensor) -> Batch:
        x, y = windows(text, starts, self.length)
        return x.to(self.settings.device), y.to(self.settings.device)

    def loss(self, batch: Batch) -> Tensor:
        return self.model.loss(*batch)

    def evaluate(self) -> dict[str, Tensor]:
        s = self.settings
        starts = torch.linspace(0, len(self.rest) - self.length - 1, HELD_OUT).long()[s.rank :: s.workers]
        losses = [self.model.loss(*self._at(self.rest, part)) * len(part) for part in starts.split(32)]
        return {"loss": torch.stack(losses).sum(), "count": torch.tensor(len(starts))}

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / sums["count"]
        return {"loss": loss, "perplexity": math.exp(loss)}

    def notes(self) -> dict[str, str]:
        unigram = unigram_loss(self.text, self.rest)
        return {"of a unigram model": f"loss {unigram:.3f}, perplexity {math.exp(unigram):.3f}; a guess {VOCABULARY}"}


def network(tiny: bool = False, context: int = 64) -> nn.Module:
    """Return a GPT of 0.82 million parameters, or of some thousand."""
    return GPT(width=32, layers=1, heads=2, context=context) if tiny else GPT(context=context)


RECIPE = Recipe("adamw", 3e-3, 4, 8, wd=1e-2, clip=1.0, schedule=OneCycle(0.2), length=64)
JOBS = {
    "gpt-stdlib": Job(
        "gpt-stdlib",
        "a GPT of 0.82 million parameters, Python's standard library byte by byte",
        RECIPE,
        network,
        Stdlib,
        tiny={"lr": 1e-2, "epochs": 3},
        options={"sync": "updates"},
    )
}
