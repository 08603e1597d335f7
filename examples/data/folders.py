# SPDX-License-Identifier: Apache-2.0
"""Read pictures from folders of classes, as ImageNet comes: train/CLASS/*.JPEG and val/CLASS/*.JPEG."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

ENDS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")  # of pictures' names, in any case
AREA = (0.08, 1.0)  # of a picture that is trained with, drawn
RATIO = (3 / 4, 4 / 3)  # of its width to its height, drawn
CENTRE = 224 / 256  # of the shorter side, that is evaluated

Box = tuple[float, float, float, float]  # left, top, right, bottom
Choice = Callable[[int, int], Box]  # box(width, height), of pixels


@dataclass(frozen=True)
class Listing:
    """Name the pictures below a folder, in a fixed order."""

    folder: Path
    classes: tuple[str, ...]  # names of folders, sorted
    names: tuple[str, ...]  # CLASS/FILE, sorted by class and name
    labels: Tensor  # int64 [pictures], places in ``classes``


def splits(folder: Path) -> tuple[Listing, Listing]:
    """Return what is in ``folder/train`` and in ``folder/val``, which have the same classes.

    Raises ``FileNotFoundError`` if one is missing, and ``ValueError`` for classes that only one has, or without Pillow.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ValueError(f"{folder}: pictures in files need Pillow: pip install -r requirements-examples.txt")
    train, held_out = listing(folder / "train"), listing(folder / "val")
    odd = sorted(set(train.classes) ^ set(held_out.classes))
    if odd:
        raise ValueError(f"{folder}: train/ and val/ must have the same classes, and only one has {', '.join(odd[:5])}")
    return train, held_out


def listing(folder: Path) -> Listing:
    """Return the pictures in the folders in ``folder``, each of which is a class.

    They are kept in a file beside ``folder``, if it can be written, and listed again when a class's folder has changed.

    Raises ``FileNotFoundError`` if there is no such folder, or no folder in it, and ``ValueError`` for an empty class.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder; it holds a folder of pictures for each class")
    with os.scandir(folder) as entries:
        changed = {entry.name: entry.stat().st_mtime_ns for entry in entries if entry.is_dir()}
    if not changed:
        raise FileNotFoundError(f"{folder} holds no folders; it needs one of pictures for each class")
    kept = folder.with_name(f".{folder.name}.listing.json")
    files = _recall(kept, changed)
    if files is None:
        files = {name: _pictures(folder / name) for name in sorted(changed)}
        _keep(kept, {"changed": changed, "files": files})
    counts = torch.tensor([len(names) for names in files.values()])
    names = tuple(f"{name}/{file}" for name, inside in files.items() for file in inside)
    return Listing(folder, tuple(files), names, torch.arange(len(files)).repeat_interleave(counts))


def _pictures(folder: Path) -> list[str]:
    names = sorted(name for name in os.listdir(folder) if name.lower().endswith(ENDS))
    if not names:
        raise ValueError(f"{folder} holds no pictures ({', '.join(ENDS)}): fill it, or remove it")
    return names


def _recall(path: Path, changed: dict[str, int]) -> dict[str, list[str]] | None:
    """Return the files of each class that were kept, unless a folder has changed since then."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return dict(kept["files"]) if kept["changed"] == changed else None
    except (OSError, ValueError, KeyError, TypeError):  # a listing that is not there, or broken, is made again
        return None


def _keep(path: Path, content: dict[str, object]) -> None:
    """Write a file as a whole or not at all; where nothing can be written the next run lists the folders again."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # other workers may write at the same time
    with contextlib.suppress(OSError):
        part.write_text(json.dumps(content), encoding="utf-8")
        os.replace(part, path)


def picture(path: Path, side: int, choice: Choice) -> Tensor:
    """Return a part of a picture, chosen by its size, as bytes [3, side, side]; ``ValueError`` if it does not decode.

    A JPEG is decoded at the smallest scale that has enough pixels, which saves most of the time.
    """
    from PIL import Image  # here, so that jobs without such pictures need no Pillow

    try:
        with Image.open(path) as image:
            width, height = image.size
            box = choice(width, height)
            scale = side / min(box[2] - box[0], box[3] - box[1])
            image.draft("RGB", (math.ceil(width * scale), math.ceil(height * scale)))
            across, down = image.width / width, image.height / height
            part = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
            pixels = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR, box=part)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: this picture does not decode: {error}") from None
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


def centre(width: int, height: int) -> Box:
    """Return the middle square: 224 pixels of it, if the shorter side had 256."""
    side = CENTRE * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def anywhere(source: Generator) -> Choice:
    """Return a choice of 8 to 100 % of the area, anywhere, of a ratio of 3:4 to 4:3 (Szegedy et al., CVPR 2015).

    Ten draws are made; if none is inside of the picture, it is the largest square in the middle.
    """
    draws = torch.rand(10, 4, generator=source, dtype=torch.float64).tolist()

    def choose(width: int, height: int) -> Box:
        for of_area, of_ratio, of_left, of_top in draws:
            area = width * height * (AREA[0] + (AREA[1] - AREA[0]) * of_area)
            ratio = RATIO[0] * (RATIO[1] / RATIO[0]) ** of_ratio
            wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
            if wide <= width and high <= height:
                left, top = of_left * (width - wide), of_top * (height - high)
                return left, top, left + wide, top + high
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side

    return choose
