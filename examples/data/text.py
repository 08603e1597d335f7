# SPDX-License-Identifier: Apache-2.0
"""Read WikiText and Penn Treebank as words, as tokens of a tokenizer or as bytes, and lay them out in rows."""

from __future__ import annotations

import importlib.util
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

END, UNKNOWN = "<eos>", "<unk>"
NAMES = ("wiki.{}.tokens", "wiki.{}.raw", "{}.txt", "ptb.{}.txt")  # of files; the first that is there is read
PARQUET = "{}*.parquet"  # or several of these, which have a column "text" with a line a row
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json")  # files, of which a tokenizer has one at least
IGNORED = -100  # fills up the last row of what comes next; torch's cross_entropy does not count it


@dataclass(frozen=True)
class Text:
    """Hold what is trained with and what is held out, as numbers from 0 to ``vocabulary`` - 1: of an int type, 1-D."""

    train: Tensor
    valid: Tensor
    vocabulary: int  # how many numbers there may be

    def __post_init__(self) -> None:
        """Raise ``ValueError`` where nothing is to be predicted."""
        for name, part in (("train", self.train), ("valid", self.valid)):
            if len(part) < 2:
                raise ValueError(f"the text called {name} has fewer than two words or tokens")


def words(folder: Path) -> Text:
    """Return the words between spaces, and one more at each line's end.

    They are numbered as they come in the text that is trained with. A word that does not come there reads as "<unk>",
    which has a number in any case.

    Raises ``FileNotFoundError`` or ``ValueError`` if a file is missing, empty or not UTF-8.
    """
    numbers: dict[str, int] = {}

    def number(line: str) -> Iterator[int]:
        return (numbers.setdefault(word, len(numbers)) for word in (*line.split(), END))

    train = as_tensor(number(line) for line in lines(folder, "train"))
    unknown = numbers.setdefault(UNKNOWN, len(numbers))
    held_out = lines(folder, "valid")
    valid = as_tensor((numbers.get(word, unknown) for word in (*line.split(), END)) for line in held_out)
    return Text(train, valid, len(numbers))


def tokens(folder: Path, tokenizer: Path | None) -> Text:
    """Return the tokens of a tokenizer of transformers, from a folder with its files; None: bytes, a token each.

    Raises ``FileNotFoundError`` or ``ValueError`` as :func:`words` does, or if ``tokenizer`` holds none.
    """
    if tokenizer is None:
        train, valid = (np.frombuffer("".join(lines(folder, part)).encode(), np.uint8) for part in ("train", "valid"))
        return Text(torch.from_numpy(train.copy()), torch.from_numpy(valid.copy()), 256)
    cut = load(tokenizer)

    def read(part: str) -> Tensor:
        source = lines(folder, part)
        pieces = iter(lambda: list(islice(source, 10_000)), [])
        return as_tensor(chain(*cut(piece, add_special_tokens=False, verbose=False)["input_ids"]) for piece in pieces)

    return Text(read("train"), read("valid"), len(cut))


def beside(weights: Path | None) -> Path | None:
    """Return the folder of ``weights`` if it holds a tokenizer's files, too, as published ones do; else None."""
    return weights if weights is not None and any((weights / name).is_file() for name in TOKENIZERS) else None


def load(folder: Path) -> Any:
    """Return the tokenizer whose files ``folder`` holds. Raises ``ValueError`` if it holds none."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--tokenizer needs transformers: pip install -r requirements-examples.txt")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported, which would ask a hub otherwise
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ValueError(f"--tokenizer {folder}: there is no such folder")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--tokenizer {folder}: this is no folder of a tokenizer of transformers: {error}") from error


def as_tensor(parts: Iterable[Iterable[int]]) -> Tensor:
    """Return all numbers, one after the other: int32."""
    numbers = array("i")
    for part in parts:
        numbers.extend(part)
    return torch.from_numpy(np.array(numbers, np.int32))


def lines(folder: Path, part: str) -> Iterator[str]:
    """Yield the lines of a part, "train" or "valid", with their ends, from the first of ``NAMES`` in ``folder``.

    Raises ``FileNotFoundError`` that names what may be there, ``ValueError`` if a file is empty or not UTF-8.
    """
    for name in NAMES:
        path = folder / name.format(part)
        if path.is_file():
            return of_text(path)
    paths = sorted(folder.glob(PARQUET.format(part)))
    if paths:
        return chain.from_iterable(of_parquet(path) for path in paths)
    names = ", ".join(name.format(part) for name in (*NAMES, PARQUET))
    raise FileNotFoundError(f"{folder} holds no text called {part}: put one of {names} there")


def of_text(path: Path) -> Iterator[str]:
    """Yield the lines of a file. Raises ``ValueError`` if it is empty or not UTF-8."""
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty")
    with path.open(encoding="utf-8", newline="\n") as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from error


def of_parquet(path: Path) -> Iterator[str]:
    """Yield the rows of the column "text". Raises ``ValueError`` if it or pyarrow is missing, or it is no parquet."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path} needs pyarrow: pip install pyarrow, or put plain text there")
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path, columns=["text"])["text"].to_pylist()
    except (ArrowException, KeyError) as error:
        raise ValueError(f"{path} is no parquet file with a column 'text': {error}") from error
    for row in rows:
        yield row if row.endswith("\n") else row + "\n"


def columns(text: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ``text`` as ``count`` pieces that begin where the last one ends, and what comes next: [count, length].

    Both share the text's memory. Up to ``count`` numbers at its end are left out. Raises ``ValueError`` if there are
    fewer than ``count`` and one.
    """
    length = (len(text) - 1) // count
    if length < 1:
        raise ValueError(f"the text has {len(text)} words, too few for {count} columns: take a smaller --batch-size")
    return text[: count * length].view(count, length), text[1 : count * length + 1].view(count, length)


def rows(text: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return all of ``text`` in rows, and what comes next at each place: int64 [n, length].

    The last row is filled up, and what comes next there is ``IGNORED``; every number but the first comes next once.
    """
    fill = -(len(text) - 1) % length
    before = F.pad(text[:-1].long(), (0, fill))
    after = F.pad(text[1:].long(), (0, fill), value=IGNORED)
    return before.view(-1, length), after.view(-1, length)
