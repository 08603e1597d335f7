# SPDX-License-Identifier: Apache-2.0
"""Measure models of language: by how many words a model hesitates between, on average, on a text held out."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from data.text import IGNORED, Text
from torch import Tensor
from torch.nn import functional as F

from jobs.base import Task


class LanguageTask(Task):
    """Give the loop the cross entropy of what comes next; a subclass says how the text is read."""

    metric = "perplexity"
    text: Text

    @abstractmethod
    def scores(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return scores of what comes next, [batch, length, vocabulary], and the state for the next piece."""

    @abstractmethod
    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pieces of this worker's part of what is held out: int64 [batch, length], and what comes next."""

    @torch.no_grad()
    def evaluate(self) -> dict[str, Tensor]:
        """Return the loss, in nats, summed over what comes next in this worker's part, and how much that is."""
        loss = torch.zeros((), dtype=torch.float64, device=next(self.model.parameters()).device)
        count, state = torch.zeros_like(loss), None
        for x, y in self.validation():
            found, state = self.scores(x, state)
            loss += F.cross_entropy(found.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
            count += (y != IGNORED).sum()
        return {"loss": loss, "count": count}

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the perplexity, and the loss that it is the exponential of, in nats."""
        loss = sums["loss"] / sums["count"]
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf, "loss": loss}

    def notes(self) -> dict[str, str]:
        """Return the perplexity of a model that knows how frequent each word is, and nothing else."""
        return {"of a unigram model": f"perplexity {unigram(self.text):.1f}"}


def unigram(text: Text) -> float:
    """Return the perplexity on what is held out of the frequencies in what is trained with, each counted once more."""
    counts = torch.bincount(text.train, minlength=text.vocabulary).double() + 1
    return math.exp(-(counts / counts.sum()).log()[text.valid[1:].long()].mean().item())
