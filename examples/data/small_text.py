# SPDX-License-Identifier: Apache-2.0
"""Write small data in the forms of WikiText, Penn Treebank and SQuAD: the English that is a part of Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

from data import small_squad

PARTS = ("train", "valid", "test")
RARE = 3  # a word that comes less often in what is trained with is "<unk>", as in WikiText-2


def write(folder: Path) -> None:
    """Write wikitext2/, wikitext103/, ptb/ and squad/ into ``folder``: some MB, the same bytes in every run."""
    parts = split()
    paragraphs = {part: [p for topic in texts.values() for p in topic] for part, texts in parts.items()}
    spaced = {part: [" ".join(tokens(p)) for p in ps] for part, ps in paragraphs.items()}
    lowered = {part: [" ".join(plain(p)) for p in ps] for part, ps in paragraphs.items()}
    for part in PARTS:
        save(folder / "wikitext2" / f"wiki.{part}.tokens", known(spaced[part], spaced["train"]))
        save(folder / "wikitext103" / f"wiki.{part}.raw", spaced[part])
        save(folder / "ptb" / f"ptb.{part}.txt", known(lowered[part], lowered["train"]))
    small_squad.write(folder / "squad", parts["train"], parts["valid"])


def split() -> dict[str, dict[str, list[str]]]:
    """Return the paragraphs of each topic, by part and name: 8 of 10 topics to train with, one each held out.

    Topics are dealt by length, so that parts have lengths in proportion. A paragraph that came before, as some topics
    repeat others, is left out, so that nothing held out is known.
    """
    parts: dict[str, dict[str, list[str]]] = {part: {} for part in PARTS}
    seen: set[str] = set()
    order = sorted(topics, key=lambda name: (-len(topics[name]), name))
    dealt = [(PARTS[max(0, place % 10 - 7)], name) for place, name in enumerate(order)]
    for part, name in sorted(dealt, key=lambda one: -PARTS.index(one[0])):
        ours = [p for p in map(clean, topics[name].split("\n\n")) if len(p.split()) > 3 and p not in seen]
        seen.update(ours)
        parts[part][name] = ours
    return parts


def clean(paragraph: str) -> str:
    """Return a paragraph in one line, without what underlines its heading."""
    return " ".join(re.sub(r"^[*=~^-]{3,}$", "", paragraph, flags=re.MULTILINE).split())


def tokens(paragraph: str) -> list[str]:
    """Return words and marks, each alone."""
    return re.findall(r"\w+|[^\w\s]", paragraph)


def plain(paragraph: str) -> list[str]:
    """Return words in lower case, without marks, and "N" for a number."""
    return [re.sub(r"^\d+$", "N", word) for word in re.findall(r"\w+", paragraph.lower())]


def known(lines: list[str], train: list[str]) -> list[str]:
    """Return ``lines`` with "<unk>" for each word that is rare in ``train``."""
    counts = Counter(word for line in train for word in line.split())
    return [" ".join(word if counts[word] >= RARE else "<unk>" for word in line.split()) for line in lines]


def save(path: Path, lines: Iterable[str]) -> None:
    """Write ``lines``, each between spaces, as WikiText and Penn Treebank do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f" {line} \n" for line in lines), encoding="utf-8")
