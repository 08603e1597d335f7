# SPDX-License-Identifier: Apache-2.0
"""Write small data in the form of SQuAD: a sentence without its quoted term asks for the term.

Quotation marks are typographic ones and belong to the answer: they say where a term begins and where it ends, which is
what a network of some thousand parameters learns in a minute.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

QUOTED = re.compile(r'"([^"\s]*\w[^"\s]*)"')
TERM = re.compile(r"“[^“”]+”")
LONGEST = 40  # words of a paragraph, so that it fits into few windows of the tiny network
WORDS = 2000  # of vocab.txt, the most frequent ones


def write(folder: Path, train: Mapping[str, list[str]], dev: Mapping[str, list[str]]) -> None:
    """Write train-v1.1.json, dev-v1.1.json and vocab.txt, of paragraphs by topic."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, topics in (("train", train), ("dev", dev)):
        marked = {topic: [QUOTED.sub(r"“\1”", p) for p in paragraphs] for topic, paragraphs in topics.items()}
        articles = [{"title": topic, "paragraphs": list(asked(topic, ps))} for topic, ps in marked.items()]
        data = {"version": "1.1", "data": [article for article in articles if article["paragraphs"]]}
        (folder / f"{name}-v1.1.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(vocabulary(train)) + "\n", encoding="utf-8")


def asked(topic: str, paragraphs: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the paragraphs that have questions, with them."""
    for number, context in enumerate(paragraphs):
        questions = list(questions_of(context)) if len(context.split()) <= LONGEST else []
        if questions:
            named = [{"id": f"{topic}-{number}-{place}", **one} for place, one in enumerate(questions)]
            yield {"context": context, "qas": named}


def questions_of(context: str) -> Iterator[dict[str, Any]]:
    """Yield a question and its answer for each quoted term that the paragraph has once."""
    start = 0
    for sentence in re.split(r"(?<=[.:;]) ", context):
        for term in TERM.finditer(sentence):
            if context.count(term[0]) == 1:
                question = sentence[: term.start()] + "what" + sentence[term.end() :]
                yield {"question": question, "answers": [{"text": term[0], "answer_start": start + term.start()}]}
        start += len(sentence) + 1


def vocabulary(topics: Mapping[str, list[str]]) -> list[str]:
    """Return word pieces: the special ones, all letters, alone and inside of words, and the most frequent words."""
    text = "\n".join(p.lower() for ps in topics.values() for p in ps)
    letters = sorted(
        {*text, *string.ascii_lowercase, *string.digits, *string.punctuation, *"“”"} - {*string.whitespace}
    )
    inside = [f"##{letter}" for letter in letters if letter.isalnum()]
    frequent = [word for word, _ in Counter(re.findall(r"[a-z]{2,}", text)).most_common(WORDS)]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *inside, *frequent]
