# SPDX-License-Identifier: Apache-2.0
"""Questions and answers in the examples: how SQuAD is read and cut into windows, and how answers are measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data import small_squad, small_text, squad, windows
from data.squad import Question
from jobs import spans
from jobs.base import Settings
from jobs.squad import JOBS, Spans
from torch import Tensor, nn

JOB = JOBS["bert-base-squad"]
CONTEXT = "The cat, a small one, sat on Émile's mat."


def file(path: Path, **changes: Any) -> Path:
    """Write a file with one question, whose fields are ``changes`` or right; None: the field is missing."""
    asked = {"id": "q7", "question": "Who sat?", "answers": [{"text": "cat", "answer_start": 4}], **changes}
    qas = [{key: value for key, value in asked.items() if value is not None}]
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": qas}]}]}))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what ``small_text`` writes."""
    folder = tmp_path_factory.mktemp("small")
    small_text.write(folder)
    return folder


def made(data: Path, network: Callable[..., nn.Module] | None = None, **changes: Any) -> Spans:
    """Return the tiny task, with the same weights in every call, or with another network; ``changes``: of settings."""
    torch.manual_seed(0)
    job = JOB if network is None else replace(JOB, network=network)
    task = job.make(Settings(job.settled(tiny=True), data, tiny=True, **changes))
    assert isinstance(task, Spans)
    return task


def test_a_question_is_read_with_all_its_answers(tmp_path: Path) -> None:
    answers = [{"text": "cat", "answer_start": 4}, {"text": "Émile's mat", "answer_start": 29}]
    assert squad.read(file(tmp_path / "a.json", answers=answers)) == [
        Question("q7", "Who sat?", CONTEXT, 4, ("cat", "Émile's mat"))
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"answers": [{"text": "cat", "answer_start": 5}]}, "the answer 'cat' is not at character 5 of its paragraph"),
        (
            {"answers": [{"text": "cat", "answer_start": 4}, {"text": "", "answer_start": 4}]},
            "the answer '' is not at character 4",
        ),
        ({"answers": [{"text": "cat"}]}, "is not as in SQuAD v1.1: 'answer_start' is missing"),
        ({"answers": None}, "is not as in SQuAD v1.1: 'answers' is missing"),
        ({"question": None}, "is not as in SQuAD v1.1: 'question' is missing"),
        ({"answers": []}, "has no answer; SQuAD v2.0, where some have none, is another task"),
    ],
)
def test_a_broken_question_is_named_with_its_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = file(tmp_path / "broken.json", **changes)
    with pytest.raises(ValueError, match=f"{path}: question q7:? {message}"):
        squad.read(path)


@pytest.mark.parametrize("length, stride", [(64, 21), (40, 5), (384, 128)])
def test_windows_have_every_token_and_say_where_answers_are(small: Path, length: int, stride: int) -> None:
    questions = squad.read(small / "squad/dev-v1.1.json")
    cut = windows.tokenizer(small / "squad" / "vocab.txt")
    found = windows.cut(questions, cut, length, stride)
    assert found.tokens.shape == (len(found.used), length) and found.question.tolist() == sorted(found.question)
    for number, question in enumerate(questions):
        told = cut.encode(question.context, add_special_tokens=False).ids
        seen: dict[int, int] = {}
        answered, room = 0, length - found.first[np.flatnonzero(found.question == number)[0]] - 1
        for row in np.flatnonzero(found.question == number):
            first, begin, used = found.first[row], found.begin[row], found.used[row]
            tokens = found.tokens[row].tolist()
            assert (tokens[0], tokens[first - 1], tokens[used - 1]) == tuple(
                cut.token_to_id(name) for name in ("[CLS]", "[SEP]", "[SEP]")
            )
            assert not any(tokens[used:]) and first - 2 <= min(64, length // 2)
            seen |= {begin + place: token for place, token in enumerate(tokens[first : used - 1])}
            if found.end[row]:
                low, high = (int(place[row] - first + begin) for place in (found.start, found.end))
                assert windows.words(question, cut, low, high) == question.answers[0]
                answered += 1
        assert seen == dict(enumerate(told))
        # A longer one than what two windows share may be cut by both.
        assert answered or len(cut.encode(question.answers[0], add_special_tokens=False).ids) > room - stride


@pytest.mark.parametrize(
    "answer, right, exact, f1",
    [
        ("The Cat!", ["a cat"], 1, 1),
        ("small cat", ["cat"], 0, 2 / 3),
        ("cat cat", ["cat dog", "mat"], 0, 1 / 2),
        ("theory", ["the ory"], 0, 0),
        ("dog", ["cat", "dogs and dog"], 0, 1 / 2),
        ("U.S.", ["us"], 1, 1),
        ("the", ["a"], 1, 0),  # nothing is left of both: as the published evaluation counts
    ],
)
def test_answers_are_compared_as_published(answer: str, right: list[str], exact: float, f1: float) -> None:
    assert spans.exact(answer, right) == exact and spans.f1(answer, right) == pytest.approx(f1)


def test_the_best_span_is_that_of_all_spans_that_are_allowed() -> None:
    source = torch.Generator().manual_seed(0)
    start, end = torch.randn(2, 40, 12, generator=source)
    allowed = torch.rand(40, 12, generator=source) < 0.6
    allowed[0] = False
    scores, found = spans.best(start, end, allowed, longest=3)
    assert scores[0] == -torch.inf
    for row in range(1, 40):
        every = {
            (low, high): (start[row, low] + end[row, high]).item()
            for low in range(12)
            for high in range(low, min(12, low + 3))
            if allowed[row, low] and allowed[row, high]
        }
        assert tuple(found[row].tolist()) == max(every, key=lambda span: every[span])
        assert scores[row].item() == max(every.values())


class Knowing(nn.Module):
    """Score the first marks of the paragraph as answer: right where a question is about the only term."""

    def __init__(self, opening: int, closing: int) -> None:
        super().__init__()
        self.marks = opening, closing

    def forward(self, tokens: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> SimpleNamespace:
        start, end = ((tokens == mark) * token_type_ids * attention_mask.float() for mark in self.marks)
        return SimpleNamespace(start_logits=start, end_logits=end)


def test_a_network_that_knows_is_right_and_workers_share_the_questions(small: Path) -> None:
    cut = windows.tokenizer(small / "squad" / "vocab.txt")
    marks = [cut.token_to_id(mark) for mark in "“”"]
    only = [len(small_squad.TERM.findall(q.context)) == 1 for q in squad.read(small / "squad/dev-v1.1.json")]
    expected = {key: value.item() for key, value in made(small, lambda **_: Knowing(*marks)).evaluate().items()}
    assert expected["count"] == len(only) and sum(only) <= expected["exact"] < len(only)
    workers = len(only) + 1  # one of them has no question
    tasks = [made(small, lambda **_: Knowing(*marks), rank=rank, workers=workers) for rank in (0, 5, len(only))]
    assert [task.evaluate()["count"].item() for task in tasks] == [1, 1, 0]
    halves = [made(small, lambda **_: Knowing(*marks), rank=rank, workers=2).evaluate() for rank in (0, 1)]
    assert {key: halves[0][key].item() + halves[1][key].item() for key in expected} == pytest.approx(expected)
    figures = tasks[0].figures(expected)
    assert 0.3 < figures["exact"] <= figures["f1"] < 1


@pytest.mark.parametrize("workers", [1, 3])
def test_windows_are_shared_by_workers_and_begin_anywhere_again(small: Path, workers: int) -> None:
    tasks = [made(small, rank=rank, workers=workers) for rank in range(workers)]
    rows = [[row for batch in task.batches(0) for row in batch.tokens.tolist()] for task in tasks]
    assert len({task.passes(0) for task in tasks}) == 1 == len({len(part) for part in rows})
    everything = tasks[0].train.tokens.tolist()
    assert sum(map(len, rows)) == len(everything) - len(everything) % workers
    counts = [sorted(map(tuple, found)) for found in (everything, [row for part in rows for row in part])]
    assert set(counts[1]) <= set(counts[0])
    batches, rest = list(tasks[0].batches(1)), list(tasks[0].batches(1, 3))
    assert len(rest) == tasks[0].passes(1) - 3
    assert all(torch.equal(a, b) for pair in zip(batches[3:], rest, strict=True) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("size, parameters, tensors", [("base", 108_893_186, 199), ("large", 334_094_338, 391)])
def test_published_sizes(size: str, parameters: int, tensors: int) -> None:
    with torch.device("meta"):
        found = list(JOBS[f"bert-{size}-squad"].network().parameters())
    assert (sum(p.numel() for p in found), len(found)) == (parameters, tensors)
