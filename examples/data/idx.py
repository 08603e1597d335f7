# SPDX-License-Identifier: Apache-2.0
"""Files as MNIST comes in, idx, gzipped or not: read with numpy, nothing is downloaded."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

IMAGES, LABELS = 3, 1  # dimensions
KINDS = {IMAGES: "images", LABELS: "labels"}
PARTS = ("train", "t10k")
CLASSES = 10
BYTES = 8  # idx's code for unsigned bytes, which MNIST consists of

Bytes = NDArray[np.uint8]


def load(folder: Path) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Training images [n, height, width] and labels [n], and those for testing, from the four files in ``folder``.

    Raises ``FileNotFoundError`` with the names that were looked for, and ``ValueError`` with the file's name for one
    that is broken, and for images and labels that are not equally many, or images not of one size.
    """
    found = []
    for part in PARTS:
        images, labels = (read(find(folder, part, dimensions), dimensions) for dimensions in (IMAGES, LABELS))
        if len(images) != len(labels):
            raise ValueError(f"{folder}: {len(images)} images in the {part} set, but {len(labels)} labels")
        if labels.max(initial=0) >= CLASSES:
            raise ValueError(f"{folder}: a label of the {part} set is {labels.max()}, and MNIST's are below {CLASSES}")
        found += [images, labels]
    train_x, train_y, test_x, test_y = found
    if train_x.shape[1:] != test_x.shape[1:]:
        sizes = " and ".join("{} x {}".format(*x.shape[1:]) for x in (train_x, test_x))
        raise ValueError(f"{folder}: images for training and for testing differ in size: {sizes}")
    return train_x, train_y, test_x, test_y


def find(folder: Path, part: str, dimensions: int) -> Path:
    """Return the file of ``part`` ("train", "t10k"), under the names in use: with a dash or a dot, gzipped or not."""
    stem = f"{part}-{KINDS[dimensions]}"
    names = [f"{stem}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder} has none of {', '.join(names)}")


def read(path: Path, dimensions: int) -> Bytes:
    """The array in an idx file, [count, ...]; gzipped is what begins as gzip does. ``ValueError`` if it is broken."""
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: the gzip file is broken or cut off ({error})") from None
    magic, head = bytes((0, 0, BYTES, dimensions)), 4 + 4 * dimensions
    if content[:4] != magic:
        raise ValueError(
            f"{path}: begins with {content[:4].hex(' ') or 'nothing'}, and an idx file of {KINDS[dimensions]} with "
            f"{magic.hex(' ')}: it is another file, or broken"
        )
    if len(content) < head:
        raise ValueError(f"{path}: ends inside its header, after {len(content)} of {head} bytes")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    wanted = math.prod(shape)
    if len(content) - head != wanted:
        what = "is cut off" if len(content) - head < wanted else "is too long"
        raise ValueError(f"{path}: {what}: its header says {shape}, {wanted} bytes, and {len(content) - head} follow")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
