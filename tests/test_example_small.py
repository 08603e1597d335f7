# SPDX-License-Identifier: Apache-2.0
"""Small data: the same bytes in every run, in the published formats, so that readers read what users have."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
from data import cifar, small_pictures


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


def test_cifar_10_is_read_with_the_digits_as_classes(written: Path) -> None:
    train_x, train_y, test_x, test_y = cifar.load(written / "cifar10", 10)
    train, test = small_pictures.parts()
    assert train_x.shape == (1437, 3, 32, 32) and test_x.shape == (360, 3, 32, 32)
    assert np.array_equal(train_y, train.digits) and np.array_equal(test_y, test.digits)
    assert np.array_equal(train_x, small_pictures.coloured(train, 32))


@pytest.mark.long
def test_one_command_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("data.small_text")
    from data import small

    monkeypatch.setattr(sys, "argv", ["small.py", str(tmp_path)])
    small.main()
    names = {"cifar10", "cifar100", "mnist", "imagenet", "wikitext2", "wikitext103", "ptb", "squad"}
    assert {path.name for path in tmp_path.iterdir()} == names
