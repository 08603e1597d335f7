# SPDX-License-Identifier: Apache-2.0
"""Questions and answers in the examples: how SQuAD is read and cut into windows, and how answers are measured."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"data": [', "is not JSON"),
        (b'{"data": "\xff"}', "is not JSON"),
        (b"[1]", "is not SQuAD v1.1: data, paragraphs, context or qas is missing"),
        (b'{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "is not SQuAD v1.1: .*'context'"),
        (b'{"data": []}', "has no questions"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} {message}"):
        squad.read(path)


def test_missing_files_are_named(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="dev-v1.1.json is missing: put train-v1.1.json, dev-v1.1.json and"):
        squad.read(tmp_path / "dev-v1.1.json")
    with pytest.raises(FileNotFoundError, match="vocab.txt is missing: put the word pieces of BERT there"):
        windows.tokenizer(tmp_path / "vocab.txt")
    (tmp_path / "vocab.txt").write_text("[CLS]\na\n")
    with pytest.raises(ValueError, match=r"vocab.txt lacks \[UNK\], \[SEP\]: this is no vocabulary of BERT"):
        windows.tokenizer(tmp_path / "vocab.txt")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="squad needs tokenizers: pip install"):
        windows.tokenizer(small / "squad" / "vocab.txt")


def test_small_questions_have_answers_that_their_sentence_lacks(small: Path) -> None:
    read = {part: squad.read(small / f"squad/{part}-v1.1.json") for part in ("train", "dev")}
    assert len(read["train"]) > 5 * len(read["dev"]) > 100
    for question in [*read["train"], *read["dev"]]:
        answer = question.answers[0]
        assert small_squad.TERM.fullmatch(answer) and question.context.count(answer) == 1
        parts = question.text.split("what")
        ways = ("what".join(parts[:at]) + answer + "what".join(parts[at:]) for at in range(1, len(parts)))
        assert any(way in question.context for way in ways)
    assert not {q.context for q in read["train"]} & {q.context for q in read["dev"]}
    cut = windows.tokenizer(small / "squad" / "vocab.txt")
    ids = [number for q in read["train"] for number in cut.encode(q.context).ids]
    assert ids.count(cut.token_to_id("[UNK]")) < 0.001 * len(ids)


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


def test_an_answer_that_ends_inside_of_a_token_has_the_whole_token(tmp_path: Path, small: Path) -> None:
    questions = squad.read(file(tmp_path / "a.json", answers=[{"text": "mal", "answer_start": 12}]))
    cut = windows.tokenizer(small / "squad" / "vocab.txt")
    (start,), (end,) = (getattr(windows.cut(questions, cut, 384, 128), name) for name in ("start", "end"))
    first = 2 + len(cut.encode("Who sat?", add_special_tokens=False).ids)
    assert "mal" in windows.words(questions[0], cut, start - first, end - first) in "small"


@pytest.mark.parametrize("stride", [0, 30])
def test_windows_without_room_are_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=f"windows of 64 tokens have no room for a question and steps of {stride}"):
        windows.cut([], None, 64, stride)


def test_windows_are_kept_until_something_that_made_them_changes(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, cut, calls = "dev-v1.1.json", windows.cut, []
    for source in (name, "vocab.txt"):
        (tmp_path / source).write_bytes((small / "squad" / source).read_bytes())
    monkeypatch.setattr(windows, "cut", lambda *given: calls.append(given[2:]) or cut(*given))
    first = windows.load(tmp_path / name, tmp_path / "vocab.txt", 64, 21)[1]
    again = windows.load(tmp_path / name, tmp_path / "vocab.txt", 64, 21)[1]
    assert len(calls) == 1 and all(np.array_equal(a, vars(again)[key]) for key, a in vars(first).items())
    windows.load(tmp_path / name, tmp_path / "vocab.txt", 64, 20)
    with (tmp_path / "vocab.txt").open("a") as file:
        file.write("anotherword\n")
    windows.load(tmp_path / name, tmp_path / "vocab.txt", 64, 21)
    assert calls == [(64, 21), (64, 20), (64, 21)] and not list(tmp_path.glob("*.part"))
    for kept in tmp_path.glob("*.npz"):
        kept.write_bytes(b"PK, but no archive")
    repaired = windows.load(tmp_path / name, tmp_path / "vocab.txt", 64, 21)[1]
    assert np.array_equal(repaired.start, first.start) and len(calls) == 4


def test_a_folder_that_cannot_be_written_is_no_error(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    for source in ("dev-v1.1.json", "vocab.txt"):
        (tmp_path / source).write_bytes((small / "squad" / source).read_bytes())
    monkeypatch.setattr(np, "savez", refused)
    assert windows.load(tmp_path / "dev-v1.1.json", tmp_path / "vocab.txt", 64, 21)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dev-v1.1.json", "vocab.txt"]


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


def test_a_word_by_chance_has_the_mean_of_all() -> None:
    assert spans.by_chance("The cat sat", ["cat", "a black cat"]) == pytest.approx((1 + 0) / 2)
    assert spans.by_chance("the", ["cat"]) == 0


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


class Preferring(nn.Module):
    """Score tokens by what they are, wherever they stand."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = torch.tensor(scores)

    def forward(self, tokens: Tensor, **_: Tensor) -> SimpleNamespace:
        return SimpleNamespace(start_logits=self.scores[tokens], end_logits=self.scores[tokens])


@pytest.mark.parametrize("answer", ["w10", "w90"])  # one that only the first window has, and one of the last
def test_the_best_of_all_windows_answers_with_a_word_of_the_paragraph(tmp_path: Path, answer: str) -> None:
    names = [f"w{number}" for number in range(100)]
    asked = {
        "id": "q",
        "question": "w98 w99",
        "answers": [{"text": answer, "answer_start": " ".join(names).index(answer)}],
    }
    paragraph = {"context": " ".join(names), "qas": [asked]}
    for part in ("train", "dev"):
        (tmp_path / f"{part}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    special = {"[PAD]": 9.0, "[UNK]": 0.0, "[CLS]": 9.0, "[SEP]": 9.0}
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *names]) + "\n")
    words = [5.0 if name == answer else 3.0 if name == "w99" else 0.0 for name in names]
    task = made(tmp_path, lambda **_: Preferring([*special.values(), *words]))
    assert len(task.dev.tokens) > 2 and task.evaluate()["exact"].item() == 1
    batch = next(iter(task.batches(0)))
    rows = batch.tokens.tolist()
    assert [sum(token != 0 for token in row) for row in rows] == batch.mask.sum(1).tolist()
    assert (batch.mask * (batch.tokens == 0)).sum() == 0
    question = [row.index(3) + 1 for row in rows]  # [CLS] w98 w99 [SEP]
    assert question == [4] * len(rows) and (batch.part.cumsum(1) == 0).sum(1).tolist() == question
    assert torch.equal(batch.part[:, 4:], batch.mask[:, 4:])


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


def test_every_parameter_of_a_tiny_network_has_a_gradient(small: Path) -> None:
    task = made(small)
    batch = next(iter(task.batches(0)))
    loss = task.loss(batch)
    loss.backward()
    both = [nn.functional.cross_entropy(part, batch.answer[:, at]) for at, part in enumerate(task.scores(batch))]
    assert loss.item() == pytest.approx(sum(one.item() for one in both) / 2, rel=0.1)  # dropout is what differs
    assert loss.isfinite() and task.samples == len(batch.tokens)
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in task.model.parameters())


@pytest.mark.long
@pytest.mark.slow
def test_a_tiny_network_learns_to_find_terms(small: Path) -> None:
    task = made(small)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.003)
    for batch in task.batches(0):
        optimizer.zero_grad()
        task.loss(batch).backward()
        optimizer.step()
    task.model.eval()
    figures = task.figures({key: value.item() for key, value in task.evaluate().items()})
    chance = float(task.notes()["of a random word"].removeprefix("f1 "))
    assert 0 < chance < 0.1 and figures["f1"] > 3 * chance


@pytest.mark.parametrize("size, parameters, tensors", [("base", 108_893_186, 199), ("large", 334_094_338, 391)])
def test_published_sizes(size: str, parameters: int, tensors: int) -> None:
    with torch.device("meta"):
        found = list(JOBS[f"bert-{size}-squad"].network().parameters())
    assert (sum(p.numel() for p in found), len(found)) == (parameters, tensors)


def test_what_would_be_ignored_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tokenizer has no meaning here: squad has its word pieces in vocab.txt"):
        made(small, tokenizer=tmp_path)
    JOB.network(vocabulary=50, tiny=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="knows 50 tokens, and the data have"):
        made(small, weights=tmp_path)
