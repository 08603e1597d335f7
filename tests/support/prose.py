# SPDX-License-Identifier: Apache-2.0
"""Habits of prose that readers have to decode, with plain words to write instead, and how often they occur in texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Habit:
    """A pattern of prose with a limit. Only places with prose are searched: no code, links' targets or comments."""

    name: str
    pattern: re.Pattern[str]
    most: float  # times per 1,000 words
    instead: str

    def places(self, text: str) -> Iterator[str]:
        """Yield each sentence in which the habit occurs, once for every time."""
        for match in self.pattern.finditer(text):
            yield sentence_at(text, match.start())


def habit(name: str, most: float, instead: str, pattern: str) -> Habit:
    return Habit(name, re.compile(pattern, re.MULTILINE), most, instead)


HABITS = (
    habit(
        "a what-clause", 1.0, "name the thing: 'values that are not sent', not 'what is not sent'",
        r"\b[Ww]hat (?:is|was|are|were|has|have|it|they|each|all|a|an|the|this|that|others?|ranks?|workers?|"
        r"no|nobody|one|their|we|selects?|waits?|remains|comes|goes|means?|differs?)\b",
    ),
    habit(
        "a person's verb", 0.8, "systems log, report, raise, require or check; they do not say, tell, judge or ask",
        r"\b(?:is|are|was|were|be) (?:said|told|judged|asked)\b",
    ),
    habit("refuse", 0.2, "'is not supported (raises ValueError)'", r"\b[Rr]efus(?:e|es|ed|al)\b"),
    habit("go on", 1.0, "'continue', or 'resume' from a file", r"\b[Gg]o(?:es|ing)? on\b"),
    habit("to the bit", 0.2, "'bitwise identical'", r"\bto the bit\b"),
    habit(
        "a rate without 'per'", 0.8, "'bits per value', 'one file per rank'",
        r"\b(?:bits|bytes|MB|seconds|ms|file|line|message|worker|process|shard|density) an? "
        r"(?:number|step|rank|value|worker|parameter|tensor|machine|pod|message|node|element|module|second|host)\b",
    ),
    habit(
        "an old adverb", 1.0, "next to, again, as before, alternately, the same, also",
        r"\b(?:as ever|all the same|by turns|in turn|beside|besides|alike|anew|likewise)\b",
    ),
    habit(
        "of ours", 0.8, "agmerge's, third-party, separate, its own",
        r"\bof (?:ours|yours|theirs|others|(?:its|their|a|our) own)\b",
    ),
    habit("whole for uncompressed", 0.4, "'uncompressed'; 'the full name'",
          r"\bwhole (?:gradients?|names?)\b|\b(?:sent|send|travels?|goes?) whole\b"),
    habit(
        "where for if", 1.5, "'if' or 'when'; 'where' is a place",
        r"(?:^|[,;:(] )[Ww]here (?:a|an|the|it|that|there|this|no|all|one|they|both|several|ranks?)\b",
    ),
    habit("die, newcomer", 0.8, "fail, join, be admitted, new worker", r"\b(?:die|dies|died|newcomers?|let in)\b"),
    habit("pretend", 0.2, "'simulate'", r"\b[Pp]retend"),
    habit("history", 0.2, "nothing: a page describes the present version", r"\b(?:[Ss]ince then|that day|of today)\b"),
    habit("a date", 0.2, "nothing, or the notebook of the benchmarks", r"\b20\d\d-\d\d-\d\d\b"),
    habit("a semicolon", 2.0, "two sentences, or a list", r";"),
)  # fmt: skip
YOU = re.compile(r"\b[Yy]ou(?:rs?|'re)?\b")
EXAMPLE = re.compile(r"\b(?:[Ff]or example|such as|e\.g\.)")
LONG = 32  # words: a longer sentence has to be read twice
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*])|\n\s*\n|\n(?=\s*[*|#-])")


def prose_of(page: str) -> str:
    """Return a page of Markdown without code blocks, comments, targets of links; short code becomes ``CODE``."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.DOTALL)
    text = re.sub(r"(?m)^( {4,}|\t).*$", "", text)
    return re.sub(r"`[^`]*`", "CODE", re.sub(r"\]\([^)]*\)", "]", text))


def words_of(text: str) -> int:
    """Return how many words a text has."""
    return len(text.split())


def table_rows(text: str) -> list[str]:
    """Return the rows of the tables of a page."""
    return [line for line in text.splitlines() if line.lstrip().startswith("|")]


def cells(text: str) -> Iterator[str]:
    """Yield the cells of the tables of a page."""
    for row in table_rows(text):
        yield from (cell.strip() for cell in row.strip().strip("|").split("|"))


def sentence_at(text: str, place: int) -> str:
    """Return the sentence of a text around a place, on one line."""
    begin, end = 0, len(text)
    for match in _SENTENCE_END.finditer(text):
        if match.end() <= place:
            begin = match.end()
        elif match.start() >= place:
            end = match.start()
            break
    return " ".join(text[begin:end].split())


def long_sentences(text: str) -> list[str]:
    """Return the sentences of a page, outside of tables, with more than ``LONG`` words."""
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("|"))
    return [" ".join(one.split()) for one in _SENTENCE_END.split(plain) if words_of(one) > LONG]
