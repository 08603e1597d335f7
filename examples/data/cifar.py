# SPDX-License-Identifier: Apache-2.0
"""Read CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) as they are published, binary or pickled, into one array a part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data import pickles

SIDE = 32  # pixels
PIXELS = 3 * SIDE * SIDE  # bytes of a picture: its red, green and blue plane, row by row

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """Say in which files pictures lie."""

    folder: str  # what the published archive unpacks to
    train: tuple[str, ...]  # files
    test: str  # file
    labels: int = 0  # bytes before a picture, the last of which is its class; 0: the files are pickles
    key: bytes = b""  # of the classes in a pickle


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS = {  # by number of classes
    10: (
        Layout("cifar-10-batches-bin", tuple(f"{name}.bin" for name in BATCHES), "test_batch.bin", labels=1),
        Layout("cifar-10-batches-py", BATCHES, "test_batch", key=b"labels"),
    ),
    100: (
        Layout("cifar-100-binary", ("train.bin",), "test.bin", labels=2),
        Layout("cifar-100-python", ("train",), "test", key=b"fine_labels"),
    ),
}


def load(folder: Path, classes: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Return training pictures [n, 3, 32, 32] and classes [n], and those for testing, of the data set in ``folder``.

    classes: 10 or 100, of which CIFAR it is. Its files lie in ``folder``, or in the folder that the archive has.

    Raises ``FileNotFoundError`` with the files that were looked for, and ``ValueError`` with the name of one that is
    broken and what is wrong with it.
    """
    layout, place = _found(folder, classes)
    parts: list[Bytes] = []
    for names in (layout.train, (layout.test,)):
        read = [_read(place / name, layout, classes) for name in names]
        parts += [np.concatenate(arrays) for arrays in zip(*read, strict=True)]
    train_x, train_y, test_x, test_y = parts
    return train_x, train_y, test_x, test_y


def _found(folder: Path, classes: int) -> tuple[Layout, Path]:
    """Return how the data set lies in ``folder``, and where. Raises ``FileNotFoundError``."""
    for layout in LAYOUTS[classes]:
        for place in (folder / layout.folder, folder):
            missing = [name for name in (*layout.train, layout.test) if not (place / name).is_file()]
            if not missing:
                return layout, place
            if place.name == layout.folder and place.is_dir():
                raise FileNotFoundError(f"{place} has no {', '.join(missing)}: unpack the archive of CIFAR again")
    names = " nor ".join(f"{layout.folder}/ with {layout.train[0]}" for layout in LAYOUTS[classes])
    raise FileNotFoundError(f"{folder} has neither {names}: unpack the archive of CIFAR-{classes} there")


def _read(path: Path, layout: Layout, classes: int) -> tuple[Bytes, Bytes]:
    """Return pictures and classes of one file. Raises ``ValueError`` if it is broken."""
    pictures, labels = _records(path, layout.labels) if layout.labels else _pickled(path, layout.key)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        worst = int(np.flatnonzero((labels < 0) | (labels >= classes))[0])
        raise ValueError(f"{path}: picture {worst} has class {labels[worst]}, of {classes}: it is broken")
    return pictures.reshape(-1, 3, SIDE, SIDE), labels.astype(np.uint8)


def _records(path: Path, labels: int) -> tuple[Bytes, Bytes]:
    """Return pictures and classes of a file of records: ``labels`` bytes, then a picture's."""
    content = np.frombuffer(path.read_bytes(), np.uint8)
    record = labels + PIXELS
    if not len(content) or len(content) % record:
        raise ValueError(f"{path}: {len(content)} bytes are no whole number of records of {record}: it is cut short")
    records = content.reshape(-1, record)
    return records[:, labels:], records[:, labels - 1]


def _pickled(path: Path, key: bytes) -> tuple[Bytes, NDArray[Any]]:
    """Return pictures and classes of a pickled dict, whose keys are bytes where Python 2 has written it."""
    content = pickles.load(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, and CIFAR's files hold a dict")
    values = {name.encode() if isinstance(name, str) else name: value for name, value in content.items()}
    for name in (b"data", key):
        if name not in values:
            raise ValueError(f"{path}: its dict has no {name.decode()!r}, which CIFAR's files have")
    pictures = values[b"data"]
    if not isinstance(pictures, np.ndarray) or pictures.dtype != np.uint8 or pictures.shape[1:] != (PIXELS,):
        raise ValueError(f"{path}: its pictures are no array of bytes, [pictures, {PIXELS}]")
    if not isinstance(values[key], list) or not all(isinstance(label, int) for label in values[key]):
        raise ValueError(f"{path}: its {key.decode()} are no list of numbers")
    if len(values[key]) != len(pictures):
        raise ValueError(f"{path}: {len(pictures)} pictures, but {len(values[key])} classes")
    return pictures, np.array(values[key], dtype=np.int64)
