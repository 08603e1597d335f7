# SPDX-License-Identifier: Apache-2.0
"""Small data: the same bytes in every run, in the published formats, so that readers read what users have."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
from data import cifar, folders, idx, small_pictures
from digits import load


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with small pictures of every kind."""
    folder = tmp_path_factory.mktemp("small")
    small_pictures.write(folder)
    return folder


def digest(folder: Path) -> dict[str, str]:
    """Return the hashes of all files by their names, but for the listings that readers keep."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_second_run_writes_the_same_bytes(written: Path, tmp_path: Path) -> None:
    train, test = small_pictures.parts()
    few = small_pictures.Part(*(column[:50] for column in train)), small_pictures.Part(*(column[:5] for column in test))
    for name in ("a", "b"):
        small_pictures.cifar10(tmp_path / name / "cifar10", *few)
        small_pictures.cifar100(tmp_path / name / "cifar100", *few)
        small_pictures.mnist(tmp_path / name / "mnist", *few)
        small_pictures.imagenet(tmp_path / name / "imagenet", few[0])
    assert digest(tmp_path / "a") == digest(tmp_path / "b") and len(digest(tmp_path / "a")) == 6 + 2 + 4 + 50
    whole = digest(written)
    assert len(whole) == 6 + 2 + 4 + 1797


def test_the_parts_are_those_of_the_digits() -> None:
    _, train_y, _, test_y = load()
    train, test = small_pictures.parts()
    assert train.digits.tolist() == train_y.tolist() and test.digits.tolist() == test_y.tolist()


def test_cifar_10_is_read_with_the_digits_as_classes(written: Path) -> None:
    train_x, train_y, test_x, test_y = cifar.load(written / "cifar10", 10)
    train, test = small_pictures.parts()
    assert train_x.shape == (1437, 3, 32, 32) and test_x.shape == (360, 3, 32, 32)
    assert np.array_equal(train_y, train.digits) and np.array_equal(test_y, test.digits)
    assert np.array_equal(train_x, small_pictures.coloured(train, 32))


def test_a_class_of_cifar_100_is_a_digit_and_a_tint_which_the_picture_shows(written: Path) -> None:
    pictures, classes, _, _ = cifar.load(written / "cifar100", 100)
    assert len(set(classes.tolist())) == 100
    for picture, label in zip(pictures[:50], classes[:50], strict=True):
        brightest = picture.reshape(3, -1).max(1).astype(float)
        tint = small_pictures.TINTS[label % 10]
        assert np.abs(brightest / brightest.max() - tint / tint.max()).max() < 0.02
    assert np.array_equal(classes // 10, small_pictures.parts()[0].digits)


def test_the_tints_of_a_digit_are_about_equally_many() -> None:
    train, _ = small_pictures.parts()
    for digit in range(10):
        assert np.bincount(train.tints[train.digits == digit], minlength=10).min() >= 5


def test_mnist_has_a_margin_around_each_digit(written: Path) -> None:
    train_x, train_y, test_x, test_y = idx.load(written / "mnist")
    assert train_x.shape == (1437, 28, 28) and len(test_y) == len(test_x) == 360
    assert train_x[:, 2:26, 2:26].max() == 255 and np.array_equal(train_y, small_pictures.parts()[0].digits)
    train_x = train_x.copy()
    train_x[:, 2:26, 2:26] = 0
    assert not train_x.any()


def test_imagenet_has_a_folder_for_each_digit(written: Path) -> None:
    train, held_out = folders.splits(written / "imagenet")
    assert train.classes == tuple(sorted(small_pictures.CLASSES))
    assert (len(train.names), len(held_out.names)) == (1437, 360)
    name = train.names[0]
    assert name.startswith("eight/") and train.labels[0] == 0
    number = int(Path(name).stem)
    pixels = folders.picture(train.folder / name, 64, lambda width, height: (0, 0, width, height)).numpy()
    expected = small_pictures.coloured(small_pictures.parts()[0], 64)[number]
    assert np.abs(pixels.astype(int) - expected).mean() < 12  # of 255: a JPEG is not exact


def test_one_command_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("data.small_text")
    from data import small

    monkeypatch.setattr(sys, "argv", ["small.py", str(tmp_path)])
    small.main()
    names = {"cifar10", "cifar100", "mnist", "imagenet", "wikitext2", "wikitext103", "ptb", "squad"}
    assert {path.name for path in tmp_path.iterdir()} == names
