# SPDX-License-Identifier: Apache-2.0
"""Define the jobs that model words with an LSTM or a Transformer: a stream of text for each sequence of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from data import text
from networks.lstm import lstm
from networks.transformer import transformer
from torch import Tensor, nn
from torch.nn import functional as F

from jobs.base import Job, Recipe, Settings, folder, held_out
from jobs.perplexity import LanguageTask
from jobs.schedules import Noam, Plateau, Steps

STREAMS = 10  # in which the text held out is read, however many workers share them: figures are the same with any


class Piece(NamedTuple):
    """Hold the next words of each stream."""

    x: Tensor  # int64 [batch, length]
    y: Tensor  # what comes next, as long
    first: bool  # of an epoch: nothing came before


class Words(LanguageTask):
    """Read the text in W times batch streams at once, of which a worker has its own, anew in every epoch."""

    unit = "words"

    def __init__(self, data: str, settings: Settings, network: Callable[..., nn.Module]) -> None:
        for option in ("weights", "tokenizer", "uneven"):
            if getattr(settings, option):
                raise ValueError(f"--{option} has no meaning here: {REFUSED[option]}")
        recipe, self.settings = settings.recipe, settings
        self.text = text.words(folder(settings, data))
        mine = slice(settings.rank * recipe.batch_size, (settings.rank + 1) * recipe.batch_size)
        streams = text.columns(self.text.train, settings.workers * recipe.batch_size)
        self.x, self.y = (part[mine].to(settings.device) for part in streams)
        self.model = network(vocabulary=self.text.vocabulary)
        self.samples = recipe.batch_size * recipe.length
        self.state: Any = None  # of the model, after the last batch

    def passes(self, epoch: int) -> int:
        return -(-self.x.shape[1] // self.settings.recipe.length)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Piece]:
        length = self.settings.recipe.length
        for start in range(first * length, self.x.shape[1], length):
            here = slice(start, start + length)
            yield Piece(self.x[:, here].long(), self.y[:, here].long(), start == 0)

    def loss(self, batch: Piece) -> Tensor:
        """Return the mean loss of the batch. Its state is kept for the next one, without a graph, in full precision."""
        found, state = self.scores(batch.x, None if batch.first else self.state)
        self.state = state if state is None else tuple(part.detach().float() for part in state)
        return F.cross_entropy(found.flatten(0, 1), batch.y.flatten())

    def scores(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.model(x, state)

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        valid = self.text.valid
        mine = held_out(STREAMS, self.settings)
        x, y = (part[mine].to(self.settings.device) for part in text.rows(valid, -(-(len(valid) - 1) // STREAMS)))
        if len(x):  # with more workers than streams, some have none
            length = self.settings.recipe.length
            yield from zip(x.split(length, 1), y.split(length, 1), strict=True)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = state["state"]
        self.state = found if found is None else tuple(part.to(self.settings.device) for part in found)


REFUSED = {
    "weights": "these networks begin with random weights",
    "tokenizer": "words are what stands between spaces",
    "uneven": "all streams are equally long",
}
TINY = {"lr": 0.005, "growth": "none", "batch_size": 4, "epochs": 8, "length": 64, "clip": 1.0}

JOBS = {
    job.name: job
    for job in (
        Job(
            "lstm-wikitext2",
            "LSTM of width 500 on WikiText-2 (ADTopk, FGBuff)",
            Recipe("adam", 1e-3, 80, 100, "workers", wd=1.2e-6, clip=0.1, schedule=Plateau(0.5, 3), length=70),
            lstm,
            partial(Words, "wikitext2"),
            TINY,
        ),
        Job(
            "lstm-ptb",
            "LSTM of width 1500 on Penn Treebank (OMGS-SGD)",
            Recipe("sgd", 22.0, 20, 100, clip=0.25, schedule=Steps(((63, 0.01), (80, 0.001))), length=35),
            partial(lstm, vocabulary=10_000, width=1500, dropout=0.65),
            partial(Words, "ptb"),
            TINY | {"lr": 15.0, "epochs": 12, "clip": 0.25},
        ),
        Job(
            "transformer-wikitext2",
            "Transformer of width 400 and 8 layers on WikiText-2 (FGBuff)",
            Recipe("adam", 2e-3, 64, 100, "workers", wd=1.2e-5, clip=0.1, schedule=Noam(100), length=100),
            transformer,
            partial(Words, "wikitext2"),
            TINY,
        ),
    )
}
