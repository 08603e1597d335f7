# SPDX-License-Identifier: Apache-2.0
"""Define the jobs that teach BERT to find answers in paragraphs: SQuAD v1.1, in windows of 384 tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from data import windows
from data.windows import Windows
from networks import bert_checkpoint
from networks.bert import SIZES, bert, named
from torch import Tensor, nn
from torch.nn import functional as F

from jobs import spans
from jobs.base import Job, Recipe, Settings, Task, folder, held_out, share
from jobs.schedules import Linear

STEP = 3  # windows begin a third of their length after each other: 128 tokens of the published 384
AT_A_TIME = 8  # windows that are evaluated, as published


class Batch(NamedTuple):
    """Hold windows as the network reads them, all [batch, length] but for the answer."""

    tokens: Tensor  # int64
    mask: Tensor  # int64: 1 for what is used
    part: Tensor  # int64: 0 for the question, 1 for the paragraph
    answer: Tensor  # int64 [batch, 2]: its first and its last token; zeros if it is not in the window


class Spans(Task):
    """Give the loop the mean of the cross entropies of an answer's first and last token."""

    unit, metric = "sequences", "f1"

    def __init__(self, settings: Settings, network: Callable[..., nn.Module]) -> None:
        if settings.tokenizer:
            raise ValueError("--tokenizer has no meaning here: squad has its word pieces in vocab.txt")
        place, length = folder(settings, "squad"), settings.recipe.length
        self.settings, self.samples = settings, settings.recipe.batch_size
        vocabulary = settings.vocab_file or place / windows.PIECES
        self.pieces = windows.tokenizer(vocabulary)
        _, self.train = windows.load(place / "train-v1.1.json", vocabulary, length, length // STEP)
        self.questions, self.dev = windows.load(place / "dev-v1.1.json", vocabulary, length, length // STEP)
        begin = bert_checkpoint.read(settings.init_checkpoint) if settings.init_checkpoint else None
        self.model = network(vocabulary=self.pieces.get_vocab_size(), weights=settings.weights, checkpoint=begin)
        if begin is not None and settings.rank == 0:
            print(begin.about, file=sys.stderr, flush=True)

    def passes(self, epoch: int) -> int:
        return len(self._order(epoch))

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        for mine in self._order(epoch)[first:]:
            yield batch(self.train, mine.numpy(), self.settings.device)

    def _order(self, epoch: int) -> tuple[Tensor, ...]:
        return share(len(self.train.tokens), self.settings, epoch).split(self.samples)

    def scores(self, batch: Batch) -> Tensor:
        """Return the scores of each token as the first and as the last one of the answer: [2, batch, length]."""
        out = self.model(batch.tokens, attention_mask=batch.mask, token_type_ids=batch.part)
        return torch.stack([out.start_logits, out.end_logits])

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.scores(batch).flatten(0, 1), batch.answer.T.flatten())

    @torch.no_grad()
    def evaluate(self) -> dict[str, Tensor]:
        """Return exact matches and F1 summed over this worker's questions, and how many these are."""
        mine = range(len(self.questions))[held_out(len(self.questions), self.settings)]
        right = [self.questions[number].answers for number in mine]
        pairs = list(zip(self._answers(mine), right, strict=True))
        exact, f1 = (sum(score(*pair) for pair in pairs) for score in (spans.exact, spans.f1))
        sums, device = {"exact": exact, "f1": f1, "count": len(pairs)}, self.settings.device
        return {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in sums.items()}

    def _answers(self, mine: range) -> list[str]:
        """Return the answer to each question, from the window whose best span has the highest score."""
        found = dict.fromkeys(mine, (-np.inf, (0, 0)))
        order = np.flatnonzero(np.isin(self.dev.question, mine))
        for at in range(0, len(order), AT_A_TIME):
            for number, score, span in self._best(order[at : at + AT_A_TIME]):
                if score > found[number][0]:
                    found[number] = score, span
        return [windows.words(self.questions[number], self.pieces, *span) for number, (_, span) in found.items()]

    def _best(self, some: np.ndarray) -> Iterator[tuple[int, float, list[int]]]:
        """Yield the question of each window, and its best span: the score, and tokens of the paragraph."""
        start, end = self.scores(batch(self.dev, some, self.settings.device)).float().cpu()
        places = torch.arange(start.shape[1])
        columns = (self.dev.first, self.dev.used, self.dev.begin)
        first, used, begin = (torch.from_numpy(column[some, None]) for column in columns)
        scores, tokens = spans.best(start, end, (places >= first) & (places < used - 1))
        tokens += begin - first
        yield from zip(self.dev.question[some].tolist(), scores.tolist(), tokens.tolist(), strict=True)

    def notes(self) -> dict[str, str]:
        """Return the F1 of an answer by chance, one word of the paragraph."""
        score = sum(spans.by_chance(one.context, one.answers) for one in self.questions) / len(self.questions)
        return {"of a random word": f"f1 {score:.3f}"}

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return both, each between 0 and 1."""
        return {name: sums[name] / sums["count"] for name in ("f1", "exact")}


def batch(made: Windows, some: np.ndarray, device: torch.device) -> Batch:
    """Return ``some`` of the windows, int64 [batch], as the network reads them, on ``device``."""
    within = np.arange(made.tokens.shape[1])
    used, first = made.used[some, None], made.first[some, None]
    arrays = (
        made.tokens[some],
        within < used,
        (within >= first) & (within < used),
        np.stack([made.start[some], made.end[some]], 1),
    )
    return Batch(*(torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays))


def size_of(path: Path) -> str:
    """Return which BERT a file like the published bert_config.json describes: the first part of its job's name.

    Raises ``OSError``, or ``ValueError`` if the file describes none that is here.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no object of JSON")
        return named(config)
    except ValueError as error:  # of JSON, too
        raise ValueError(f"--config_file {path} describes no BERT that is here: {error}") from error


RECIPE = Recipe("adamw", 3e-5, 4, 3, wd=0.01, spared=True, schedule=Linear(0.1), length=384)
TINY = {"lr": 0.003, "batch_size": 8, "epochs": 6, "length": 64}

JOBS = {
    f"{size}-squad": Job(
        f"{size}-squad", f"{size} on SQuAD v1.1 (ADTopk, FGBuff)", RECIPE, partial(bert, size), Spans, TINY
    )
    for size in SIZES
}
