# SPDX-License-Identifier: Apache-2.0
"""Training text that needs no download: the Python sources of what is installed, by a recipe with a digest.

A file belongs to the held-out part by a hash of its name. Leading comments (licenses) are removed, then all but one of
equal files. The digest is of all names and contents, whatever their order. Tokens are bytes, or byte pairs that are
learned from the training part.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

RECIPE = (
    "Files *.py of the standard library and of installed packages, without this library. Leading lines that are "
    "comments or blank are removed, then equal files, then files below 64 bytes. A file is held out if the first 4 "
    "bytes of the SHA-256 of its name are a multiple of 24. A zero byte ends each file; files are ordered by name."
)
OTHER = "Files of {path}, in pieces of 64 KiB. The rest as for Python sources, but comments stay."
OURS = ("agmerge", "sparsifiers", "merging")
ONE_IN, LEAST_HELD_OUT, LEAST_FILE = 24, 2_000_000, 64  # files; bytes; bytes
PIECE = 1 << 16  # bytes of a file of --data that are split as one
BYTES = 256  # tokens, if these are bytes
PAIRS, LEARNED_FROM = 8192, 32_000_000  # tokens, if these are byte pairs; bytes of text that these are learned from
END = b"\0"


class NoText(ValueError):
    """Text that is missing or too short."""


@dataclass(frozen=True)
class Corpus:
    """Two files of tokens, and facts about them."""

    folder: str  # with train.bin and held_out.bin
    vocabulary: int  # BYTES or PAIRS
    digest: str  # of names and contents
    recipe: str
    files: int
    train: int  # tokens
    held_out: int  # tokens
    bytes_per_token: float  # of the held-out part

    def part(self, name: str) -> torch.Tensor:
        """Return "train" or "held_out", mapped into memory: uint8 or int16."""
        length = {"train": self.train, "held_out": self.held_out}[name]
        kind = torch.uint8 if self.vocabulary == BYTES else torch.int16
        return torch.from_file(str(Path(self.folder) / f"{name}.bin"), shared=False, size=length, dtype=kind)

    def facts(self) -> dict[str, Any]:
        """Return all but the place."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def cleaned(content: bytes) -> bytes:
    """Return Python source without its leading lines of comments and blanks, where licenses are."""
    rest = content
    while rest:
        line, _, after = rest.partition(b"\n")
        if line.strip() and not line.lstrip().startswith(b"#"):
            return rest
        rest = after
    return b""


def is_held_out(name: str) -> bool:
    """Return whether a file of this name belongs to the held-out part."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % ONE_IN == 0


def python_sources() -> Iterator[tuple[str, bytes]]:
    """Yield name and cleaned content of each source file of the standard library and of the installed packages."""
    roots = (("lib", Path(sysconfig.get_path("stdlib"))), ("packages", Path(sysconfig.get_path("purelib"))))
    for label, root in roots:
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).parts
            if label == "lib" and {"site-packages", "dist-packages"} & set(parts) or parts[0] in OURS:
                continue
            yield "/".join((label, *parts)), cleaned(path.read_bytes())


def text_files(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each piece of a file, or of all files below a folder. Raises NoText for neither."""
    if not source.exists():
        raise NoText(f"--data {source}: there is no such file or folder")
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    for path in files:
        content, name = path.read_bytes(), path.relative_to(source.parent).as_posix()
        for start in range(0, len(content), PIECE):
            yield f"{name}#{start // PIECE}", content[start : start + PIECE]


def chosen(files: Iterable[tuple[str, bytes]]) -> tuple[dict[str, bytes], str]:
    """Return contents by name, ordered by it, and their digest. Of equal files the first name stays."""
    by_name = {name: content for name, content in files if len(content) >= LEAST_FILE}
    seen: set[bytes] = set()
    kept: dict[str, bytes] = {}
    total = hashlib.sha256()
    for name in sorted(by_name):
        own = hashlib.sha256(by_name[name]).digest()
        if own not in seen:
            seen.add(own)
            kept[name] = by_name[name]
            total.update(name.encode() + b"\0" + own)
    return kept, total.hexdigest()[:16]


def prepared(source: Path | None, vocabulary: int, folder: Path, known: str | None = None) -> Corpus:
    """Return the text as tokens in files below ``folder``, which are made unless they are there.

    Args:
        source: a file or folder of text; None: the Python sources of what is installed.
        vocabulary: ``BYTES`` or ``PAIRS``.
        folder: where texts are kept, each in a folder by its digest.
        known: digest of a text that is taken from there, whatever is installed now, if it is still there.

    Raises:
        NoText: For a missing source, or one that leaves too little text.
    """
    earlier = folder / f"{known}-{vocabulary}"
    if (earlier / "corpus.json").exists():
        return Corpus(str(earlier), **json.loads((earlier / "corpus.json").read_text(encoding="utf-8")))
    recipe = RECIPE if source is None else OTHER.format(path=source.name)
    kept, digest = chosen(python_sources() if source is None else text_files(source))
    place = folder / f"{digest}-{vocabulary}"
    facts = place / "corpus.json"
    if not facts.exists():
        parts = {
            "train": [content for name, content in kept.items() if not is_held_out(name)],
            "held_out": [content for name, content in kept.items() if is_held_out(name)],
        }
        sizes = {name: sum(map(len, part)) for name, part in parts.items()}
        if sizes["held_out"] < LEAST_HELD_OUT or sizes["train"] < LEAST_HELD_OUT:
            raise NoText(
                f"{source or 'the installed Python sources'}: {sizes['train'] / 1e6:.1f} MB for training and "
                f"{sizes['held_out'] / 1e6:.1f} MB held out, expected at least 2 MB of each. Pass more text as --data."
            )
        place.mkdir(parents=True, exist_ok=True)
        lengths = tokenized(parts, vocabulary, place)
        share = sizes["held_out"] / lengths["held_out"]
        about = (vocabulary, digest, recipe, len(kept), lengths["train"], lengths["held_out"], share)
        written(facts, json.dumps(Corpus(str(place), *about).facts()).encode())
    return Corpus(str(place), **json.loads(facts.read_text(encoding="utf-8")))


def tokenized(parts: dict[str, list[bytes]], vocabulary: int, place: Path) -> dict[str, int]:
    """Write a file of tokens for each part; return their lengths."""
    if vocabulary == BYTES:
        arrays = {name: np.frombuffer(END.join([*part, b""]), dtype=np.uint8) for name, part in parts.items()}
    else:
        arrays = byte_pairs(parts, vocabulary)
    for name, array in arrays.items():
        written(place / f"{name}.bin", array.tobytes())
    return {name: len(array) for name, array in arrays.items()}


def byte_pairs(parts: dict[str, list[bytes]], vocabulary: int) -> dict[str, Any]:
    """Return the parts as int16 tokens: byte pairs that are learned from the first bytes of the training part."""
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError as error:
        raise NoText("a model of this size needs tokenizers: pip install -r requirements-prove.txt") from error
    texts = {name: [one.decode("utf-8", "replace") + "\0" for one in part] for name, part in parts.items()}
    sample, size = [], 0
    for text in sorted(texts["train"], key=lambda text: hashlib.sha256(text.encode("utf-8", "replace")).digest()):
        sample.append(text)
        size += len(text)
        if size > LEARNED_FROM:
            break
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(sample, vocab_size=vocabulary, show_progress=False)
    found = {}
    for name, part in texts.items():
        each = [
            np.array(encoded.ids, dtype=np.int16)
            for start in range(0, len(part), 256)
            for encoded in tokenizer.encode_batch(part[start : start + 256])
        ]
        found[name] = np.concatenate(each)
    return found


def written(path: Path, content: bytes) -> None:
    """Write a file that is either complete or not there."""
    beside = path.with_suffix(f"{path.suffix}.{os.getpid()}.part")
    beside.write_bytes(content)
    os.replace(beside, path)


def windows(tokens: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Return rows of ``length`` tokens that begin at ``starts``: int64, of shape (rows, length)."""
    return torch.stack([tokens[start : start + length] for start in starts.tolist()]).long()
