# SPDX-License-Identifier: Apache-2.0
"""Compare answers with right ones, as SQuAD does, and find the best ones by the scores of a model."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

MARKS = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normal(answer: str) -> list[str]:
    """Return the words of an answer in lower case, without punctuation and articles."""
    return ARTICLES.sub(" ", answer.lower().translate(MARKS)).split()


def exact(answer: str, right: Sequence[str]) -> float:
    """Return 1 if ``answer`` has the words of one of the right ones, else 0."""
    return float(any(normal(answer) == normal(one) for one in right))


def f1(answer: str, right: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of the words of ``answer``, by the right one where it is best.

    An answer without words has 0, as in the published evaluation.
    """
    return max(_f1(normal(answer), normal(one)) for one in right)


def by_chance(context: str, right: Sequence[str]) -> float:
    """Return the F1 to be expected of an answer that is one word of ``context``, whichever."""
    words, answers = normal(context), [normal(one) for one in right]
    return sum(max(_f1([word], one) for one in answers) for word in words) / max(1, len(words))


def _f1(found: list[str], right: list[str]) -> float:
    same = sum((Counter(found) & Counter(right)).values())
    return 2 * same / (len(found) + len(right)) if same else 0.0


def best(start: Tensor, end: Tensor, allowed: Tensor, most: int = 20, longest: int = 30) -> tuple[Tensor, Tensor]:
    """Return the score of the best span of each window, and its first and last token: [windows], int64 [windows, 2].

    start, end: scores of each token as the first and the last one, [windows, length]. allowed: bool, as large: whether
    a token may be either; a window without any has a score of minus infinity. most: how many of the best are looked at
    each. longest: tokens a span.
    """
    most = min(most, start.shape[1])
    firsts = start.masked_fill(~allowed, -torch.inf).topk(most)
    lasts = end.masked_fill(~allowed, -torch.inf).topk(most)
    tokens = lasts.indices[:, None, :] - firsts.indices[:, :, None] + 1
    scores = firsts.values[:, :, None] + lasts.values[:, None, :]
    score, at = scores.masked_fill((tokens < 1) | (tokens > longest), -torch.inf).flatten(1).max(1)
    low = firsts.indices.gather(1, (at // most)[:, None])
    high = lasts.indices.gather(1, (at % most)[:, None])
    return score, torch.cat([low, high], 1)
