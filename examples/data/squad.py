# SPDX-License-Identifier: Apache-2.0
"""Read SQuAD v1.1: paragraphs, questions, and answers that stand in the paragraph (Rajpurkar et al., 2016)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Question:
    """Hold a question, the paragraph that answers it, and where."""

    name: str  # its "id"
    text: str
    context: str  # the paragraph
    start: int  # character of the paragraph at which the first answer begins
    answers: tuple[str, ...]  # at least one; where people answered differently, each is right


def read(path: Path) -> list[Question]:
    """Return the questions of a file, in its order.

    Raises ``FileNotFoundError``, or ``ValueError`` that names the file and the question: it is not JSON, a key is
    missing, a question has no answer, an answer is not at its place, or there is no question at all.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: put train-v1.1.json, dev-v1.1.json and vocab.txt there; nothing is downloaded"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise ValueError(f"{path} is not JSON: {error}") from error
    try:
        questions = [checked(raw, context, path) for raw, context in raw_questions(data)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not SQuAD v1.1: data, paragraphs, context or qas is missing: {error}") from error
    if not questions:
        raise ValueError(f"{path} has no questions")
    return questions


def raw_questions(data: Any) -> Iterator[tuple[Any, str]]:
    """Yield every question as it is in the file, and its paragraph."""
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            for raw in paragraph["qas"]:
                yield raw, paragraph["context"]


def checked(raw: Any, context: str, path: Path) -> Question:
    """Return a question. Raises ``ValueError`` that names it if something is missing or an answer not at its place."""
    name = raw.get("id", "without an id")
    where = f"{path}: question {name}"
    try:
        places = [(answer["answer_start"], answer["text"]) for answer in raw["answers"]]
        question = Question(name, raw["question"], context, places[0][0], tuple(text for _, text in places))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} is not as in SQuAD v1.1: {error} is missing") from error
    except IndexError:
        raise ValueError(f"{where} has no answer; SQuAD v2.0, where some have none, is another task") from None
    for start, text in places:
        if not text or context[start : start + len(text)] != text:
            raise ValueError(f"{where}: the answer {text!r} is not at character {start} of its paragraph")
    return question
