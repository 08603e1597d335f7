# SPDX-License-Identifier: Apache-2.0
"""Write scikit-learn's digits as CIFAR, MNIST and ImageNet come, in colours: the same bytes in every run."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Bytes = NDArray[np.uint8]
TINTS = np.array(  # of the strokes, red, green and blue, of 255: the tens of CIFAR-100's classes
    [
        *((255, 255, 255), (255, 64, 64), (64, 255, 64), (96, 96, 255), (255, 255, 64)),
        *((255, 64, 255), (64, 255, 255), (255, 160, 64), (160, 255, 160), (160, 96, 64)),
    ]
)
CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Part(NamedTuple):
    """Hold the digits of one part."""

    strokes: NDArray[np.float64]  # [n, 8, 8], of 0 to 1
    digits: Bytes  # [n]
    tints: Bytes  # [n], places in TINTS, which have nothing to do with the digit


def write(folder: Path) -> None:
    """Write ``cifar10``, ``cifar100``, ``mnist`` and ``imagenet`` in ``folder``, each of 1437 and 360 pictures.

    They are split as :func:`digits.load` splits. A class of CIFAR-10 and of MNIST is a digit. One of CIFAR-100 is ten
    times the digit, and the number of its tint, so that a network must see both; its 20 coarse classes hold five each.
    """
    train, test = parts()
    cifar10(folder / "cifar10/cifar-10-batches-bin", train, test)
    cifar100(folder / "cifar100/cifar-100-python", train, test)
    mnist(folder / "mnist", train, test)
    for name, part in (("train", train), ("val", test)):
        imagenet(folder / "imagenet" / name, part)


def parts() -> tuple[Part, Part]:
    """Return the digits for training and for testing."""
    images, digits = load_digits(return_X_y=True)
    tints = np.arange(len(digits)) * 7 // 3 % len(TINTS)
    strokes = images.reshape(-1, 8, 8) / 16
    split = train_test_split(range(len(digits)), test_size=0.2, stratify=digits, random_state=0)
    train, test = (Part(strokes[p], digits[p].astype(np.uint8), tints[p].astype(np.uint8)) for p in split)
    return train, test


def coloured(part: Part, side: int) -> Bytes:
    """Return pictures [n, 3, side, side]; ``side`` is a multiple of 8."""
    large = part.strokes.repeat(side // 8, axis=1).repeat(side // 8, axis=2)
    return np.rint(large[:, None] * TINTS[part.tints][:, :, None, None]).astype(np.uint8)


def cifar10(folder: Path, train: Part, test: Part) -> None:
    """Write the binary layout: a byte for the class, 1024 for each colour."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [np.hstack([part.digits[:, None], coloured(part, 32).reshape(-1, 3072)]) for part in (train, test)]
    for number, batch in enumerate(np.array_split(records[0], 5), 1):
        (folder / f"data_batch_{number}.bin").write_bytes(batch.tobytes())
    (folder / "test_batch.bin").write_bytes(records[1].tobytes())


def cifar100(folder: Path, train: Part, test: Part) -> None:
    """Write the pickled layout."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("test", test)):
        fine = (10 * part.digits.astype(int) + part.tints).tolist()
        content = {
            b"data": coloured(part, 32).reshape(-1, 3072),
            b"fine_labels": fine,
            b"coarse_labels": [label // 5 for label in fine],
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))


def mnist(folder: Path, train: Part, test: Part) -> None:
    """Write four idx files, gzipped, of pictures of 28 x 28: 24 x 24 with a margin, as MNIST's have."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("t10k", test)):
        large = part.strokes.repeat(3, axis=1).repeat(3, axis=2)
        pictures = np.rint(255 * np.pad(large, ((0, 0), (2, 2), (2, 2)))).astype(np.uint8)
        for kind, values in (("images", pictures), ("labels", part.digits)):
            head = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, dtype=">u4").tobytes()
            content = gzip.compress(head + values.tobytes(), mtime=0)
            (folder / f"{name}-{kind}-idx{values.ndim}-ubyte.gz").write_bytes(content)


def imagenet(folder: Path, part: Part) -> None:
    """Write JPEGs of 64 x 64 pixels in a folder for each digit."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, (pixels, digit) in enumerate(zip(coloured(part, 64), part.digits, strict=True)):
        Image.fromarray(pixels.transpose(1, 2, 0)).save(folder / CLASSES[digit] / f"{number:04}.JPEG", quality=90)
