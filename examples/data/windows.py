# SPDX-License-Identifier: Apache-2.0
"""Cut questions and paragraphs into windows of word pieces for BERT, and keep them in a file beside the data."""

from __future__ import annotations

import hashlib
import importlib.util
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.squad import Question, read

PIECES = "vocab.txt"  # the word pieces of BERT, one a line
VERSION = 1  # of what is kept; count it up where the same questions make other windows
LONGEST_QUESTION = 64  # word pieces, as published; half of a window if that is less
TOGETHER = 1000  # questions that are cut at a time


@dataclass(frozen=True)
class Windows:
    """Hold windows: [CLS] question [SEP] paragraph or a part of it [SEP], in the order of the questions."""

    tokens: np.ndarray  # int32 [windows, length]; zeros behind the last
    used: np.ndarray  # int32 [windows]: tokens up to the last
    first: np.ndarray  # int32 [windows]: where the paragraph begins in the window
    begin: np.ndarray  # int32 [windows]: which token of the paragraph that is
    question: np.ndarray  # int32 [windows]: which question the window belongs to
    start: np.ndarray  # int32 [windows]: where the answer begins; 0, [CLS], if it is not whole in the window
    end: np.ndarray  # int32 [windows]: its last token, or 0


def tokenizer(path: Path) -> Any:
    """Return what cuts into the word pieces of a file, mostly called vocab.txt, in lower case.

    Raises ``FileNotFoundError`` if that is missing, ``ValueError`` if it lacks special pieces or nothing can read it.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: put the word pieces of BERT there, one a line, or say --vocab_file FILE; "
            "nothing is downloaded"
        )
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError("squad needs tokenizers: pip install -r requirements-examples.txt")
    from tokenizers import BertWordPieceTokenizer

    pieces = set(path.read_text(encoding="utf-8").splitlines())
    missing = [piece for piece in ("[UNK]", "[CLS]", "[SEP]") if piece not in pieces]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: this is no vocabulary of BERT")
    return BertWordPieceTokenizer(str(path), lowercase=True)


def load(file: Path, vocabulary: Path, length: int, stride: int) -> tuple[list[Question], Windows]:
    """Return the questions of ``file``, and their windows of the word pieces in ``vocabulary``.

    Windows that were made before are read from a file beside the questions, whose name has a hash of all that makes
    them. It is complete or not there; a folder that cannot be written is no error. For the rest see :func:`cut` and
    :func:`data.squad.read`.
    """
    pieces, questions = tokenizer(vocabulary), read(file)
    made_of = hashlib.sha256(repr((VERSION, length, stride)).encode())
    for path in (file, vocabulary):
        made_of.update(hashlib.sha256(path.read_bytes()).digest())
    kept = file.parent / f"windows-{made_of.hexdigest()[:16]}.npz"
    try:
        with np.load(kept) as arrays:
            return questions, Windows(**arrays)
    except (OSError, ValueError, TypeError, zipfile.BadZipFile):  # not there, or not what keep() wrote
        made = cut(questions, pieces, length, stride)
        keep(made, kept)
        return questions, made


def keep(made: Windows, path: Path) -> None:
    """Write windows to a file that is complete or not there; nothing happens where it cannot be written."""
    part = path.with_suffix(f".{uuid.uuid4().hex}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **vars(made))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)


def cut(questions: Sequence[Question], pieces: Any, length: int, stride: int) -> Windows:
    """Return the windows of all questions, at least one each.

    pieces: what :func:`tokenizer` returned. length: tokens a window. stride: tokens of the paragraph from a window's
    begin to the next one's. Every token of a paragraph is in a window.

    Raises ``ValueError`` if a window has no room for ``stride`` tokens beside the longest question.
    """
    longest = min(LONGEST_QUESTION, length // 2)
    if not 0 < stride <= length - longest - 3:
        raise ValueError(f"windows of {length} tokens have no room for a question and steps of {stride} tokens")
    cls, sep = pieces.token_to_id("[CLS]"), pieces.token_to_id("[SEP]")
    found = []
    for number, question, asked, told, offsets in encoded(questions, pieces):
        asked = asked[:longest]
        first, room = len(asked) + 2, length - len(asked) - 3
        low, high = place(question, offsets)
        for begin in range(0, max(1, len(told) - room + stride), stride):
            window = [cls, *asked, sep, *told[begin : begin + room], sep]
            whole = begin <= low and high < begin + room
            start, end = (first + low - begin, first + high - begin) if whole else (0, 0)
            tokens = np.array(window + [0] * (length - len(window)), np.int32)
            found.append((tokens, len(window), first, begin, number, start, end))
    return Windows(*(np.array(column, np.int32) for column in zip(*found, strict=True)))


def encoded(questions: Sequence[Question], pieces: Any) -> Iterator[tuple[int, Question, list[int], list[int], Any]]:
    """Yield each question's number, itself, its tokens, its paragraph's tokens, and the characters of the latter."""
    for begin in range(0, len(questions), TOGETHER):
        some = questions[begin : begin + TOGETHER]
        asked = pieces.encode_batch([question.text for question in some], add_special_tokens=False)
        told = pieces.encode_batch([question.context for question in some], add_special_tokens=False)
        for number, (question, ask, tell) in enumerate(zip(some, asked, told, strict=True), begin):
            yield number, question, ask.ids, tell.ids, tell.offsets


def place(question: Question, offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the first and the last token of the paragraph that have a character of the first answer; or -1, -1."""
    stop = question.start + len(question.answers[0])
    inside = [number for number, (a, b) in enumerate(offsets) if a < stop and b > question.start]
    return (inside[0], inside[-1]) if inside else (-1, -1)


def words(question: Question, pieces: Any, low: int, high: int) -> str:
    """Return what the paragraph says from token ``low`` to token ``high``, the last one included."""
    offsets = pieces.encode(question.context, add_special_tokens=False).offsets
    return question.context[offsets[low][0] : offsets[high][1]]
