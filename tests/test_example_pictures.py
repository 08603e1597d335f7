# SPDX-License-Identifier: Apache-2.0
"""Pictures: what their readers read and refuse, and how they are changed at random."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from data import augment, cifar, folders, pickles
from PIL import Image
from torch import Generator

# -- CIFAR -----------------------------------------------------------------------------------------------------


def records(labels: int, *classes: int) -> bytes:
    """Return a file of CIFAR's: pictures whose bytes are all their class, which the last label byte holds."""
    return b"".join(bytes(labels - 1) + bytes([of]) + bytes([of]) * 3072 for of in classes)


def binary_10(folder: Path) -> None:
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(records(1, number))
    (folder / "test_batch.bin").write_bytes(records(1, 9, 8))


def pickled_100(folder: Path, **changed: object) -> None:
    for name in ("train", "test"):
        content = {"data": np.zeros((3, 3072), np.uint8), "fine_labels": [0, 99, 5], **changed}
        (folder / name).write_bytes(pickle.dumps({key: of for key, of in content.items() if of is not None}))


def test_binary_cifar_is_read_from_its_folder_or_the_one_around_it(tmp_path: Path) -> None:
    inner = tmp_path / "cifar-10-batches-bin"
    inner.mkdir()
    binary_10(inner)
    for place in (inner, tmp_path):
        train_x, train_y, test_x, test_y = cifar.load(place, 10)
        assert train_y.tolist() == [1, 2, 3, 4, 5] and test_y.tolist() == [9, 8]
        assert train_x.shape == (5, 3, 32, 32) and (test_x[1] == 8).all() and train_x.dtype == np.uint8


def test_a_pickle_of_python_2_and_numpy_1_is_read(tmp_path: Path) -> None:
    def text(value: bytes) -> bytes:
        return b"T" + len(value).to_bytes(4, "little") + value  # a string of Python 2

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
    state = b"(K\x01(K\x01M\x00\x0ct" + dtype + b"K\x00tb" + b"\x89" + text(bytes(range(256)) * 12) + b"tb"
    content = b"\x80\x02}(" + text(b"data") + array + state + text(b"fine_labels") + b"]K\x2aau."
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(content)
    train_x, train_y, _, _ = cifar.load(tmp_path, 100)
    assert train_y.tolist() == [42] and train_x.ravel()[300] == 300 % 256


BROKEN = {  # how a folder is made, what is broken in it, and the words of the error
    "cut short": (10, binary_10, ("data_batch_3.bin", records(1, 3)[:-1]), "data_batch_3.bin: 3072 bytes .* cut short"),
    "empty": (10, binary_10, ("test_batch.bin", b""), "test_batch.bin: 0 bytes"),
    "a class out of range": (10, binary_10, ("data_batch_2.bin", records(1, 4, 10)), "picture 1 has class 10, of 10"),
    "no pickle": (100, pickled_100, ("train", b"<html>"), "train: this pickle cannot be read"),
    "half a pickle": (100, pickled_100, ("test", pickle.dumps(list(range(99)))[:-9]), "test: this pickle cannot"),
    "a list": (100, pickled_100, ("train", pickle.dumps([1])), "holds a list"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_of_cifar_is_named_with_what_is_wrong(case: str, tmp_path: Path) -> None:
    classes, write, (name, content), words = BROKEN[case]
    write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        cifar.load(tmp_path, classes)
    assert str(tmp_path / name) in str(error.value)


class Run:
    """Create a file when unpickled, if it is allowed to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def test_a_pickle_that_names_anything_but_arrays_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    path, proof = tmp_path / "train", tmp_path / "proof"
    path.write_bytes(pickle.dumps({b"data": Run(proof)}))
    with pytest.raises(ValueError, match=f"{path}: .*asks for .*which a file of arrays has no use for"):
        pickles.load(path)
    assert not proof.exists()
    for name in (b"builtins\neval", b"numpy\nload", b"os\nsystem", b"numpy.core.multiarray\nfromfile"):
        path.write_bytes(b"\x80\x02c" + name + b"\n.")
        with pytest.raises(ValueError, match="asks for"):
            pickles.load(path)


# -- folders ---------------------------------------------------------------------------------------------------


def drawn(path: Path, *, size: tuple[int, int] = (40, 30), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size).save(path)


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Return a folder with two classes in each part."""
    for name in ("train/b/2.JPEG", "train/b/1.jpg", "train/a/3.png", "val/a/4.JPEG", "val/b/5.JPEG"):
        drawn(tmp_path / name)
    (tmp_path / "train/a/notes.txt").touch()
    return tmp_path


def test_pictures_are_listed_by_class_and_name(classes: Path) -> None:
    train, held_out = folders.splits(classes)
    assert train.classes == held_out.classes == ("a", "b")
    assert train.names == ("a/3.png", "b/1.jpg", "b/2.JPEG") and train.labels.tolist() == [0, 1, 1]


def test_folders_that_are_missing_empty_or_different_are_told(classes: Path) -> None:
    (classes / "val/c").mkdir()
    with pytest.raises(ValueError, match="val/c holds no pictures"):
        folders.splits(classes)
    drawn(classes / "val/c/1.JPEG")
    with pytest.raises(ValueError, match="must have the same classes, and only one has c"):
        folders.splits(classes)
    with pytest.raises(FileNotFoundError, match="b: there is no such folder"):
        folders.listing(classes / "b")
    with pytest.raises(FileNotFoundError, match="a holds no folders"):
        folders.listing(classes / "train/a")


def test_any_part_is_inside_and_of_the_areas_and_ratios_that_were_published() -> None:
    areas, source = [], Generator().manual_seed(0)
    for _ in range(200):
        left, top, right, bottom = folders.anywhere(source)(300, 200)
        assert 0 <= left < right <= 300 and 0 <= top < bottom <= 200
        assert 3 / 4 - 1e-9 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-9
        areas.append((right - left) * (bottom - top) / 60_000)
    assert 0.08 <= min(areas) < 0.15 and 0.7 < max(areas) <= 1
    assert folders.anywhere(source)(1000, 10) == (495, 0, 505, 10)  # no draw fits


# -- what is drawn ---------------------------------------------------------------------------------------------


def seeded() -> Generator:
    return Generator().manual_seed(1)


def test_a_crop_is_a_part_in_the_same_size_with_a_margin_of_zeros() -> None:
    pictures = torch.arange(1, 1 + 40 * 2 * 5 * 5, dtype=torch.int32).view(40, 2, 5, 5)
    padded = torch.nn.functional.pad(pictures, (2, 2, 2, 2))
    places = set()
    for found, whole in zip(augment.crop(pictures, 2, seeded()), padded, strict=True):
        match = [(i, j) for i in range(5) for j in range(5) if torch.equal(found, whole[:, i : i + 5, j : j + 5])]
        assert len(match) == 1
        places.update(match)
    assert len(places) > 12 and max(places)[0] == 4 and min(places)[0] == 0


def test_moments_are_those_of_each_channel() -> None:
    pictures = torch.randint(256, (50, 3, 4, 4), generator=seeded(), dtype=torch.uint8)
    mean, deviation = augment.moments(pictures)
    floats = pictures.double().transpose(0, 1).flatten(1)
    assert torch.allclose(mean.flatten().double(), floats.mean(1))
    assert torch.allclose(deviation.flatten().double(), floats.std(1, correction=0))
