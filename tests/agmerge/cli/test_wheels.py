# SPDX-License-Identifier: Apache-2.0
"""Which wheel of the cache may be installed: one that this user has put there, and nobody can have changed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agmerge.__main__ import main
from agmerge.cli import build_horovod
from agmerge.cli.build_horovod import keep, refusal
from agmerge.errors import AGMergeError


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A wheel in a cache."""
    wheel = tmp_path / "horovod-0.28.1-x.whl"
    wheel.write_bytes(b"whole")
    return keep(wheel, tmp_path / "cache" / "key")


def test_a_wheel_that_was_kept_may_be_installed(kept: Path) -> None:
    assert kept.read_bytes() == b"whole" and refusal(kept) == ""


def changed(path: Path) -> None:
    path.write_bytes(b"what another has put there")


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another wheel": (changed, "its hash differs"),
    "no hash": (lambda wheel: build_horovod._hash_file(wheel.parent).unlink(), "its hash is missing"),
    "another hash": (lambda wheel: changed(build_horovod._hash_file(wheel.parent)), "its hash differs"),
    "a wheel for all": (lambda wheel: wheel.chmod(0o666), "other users can write to .*x.whl"),
    "a folder for a group": (lambda wheel: wheel.parent.chmod(0o770), "other users can write to .*key"),
    "a cache for all": (lambda wheel: wheel.parent.parent.chmod(0o777), "other users can write to .*cache"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_wheel_that_others_may_have_changed_is_refused(harm: str, kept: Path) -> None:
    change, why = HARMS[harm]
    change(kept)
    assert re.search(why, refusal(kept))


def of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_horovod, "_is_own", lambda each: each != path)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_wheel_of_another_user_is_refused(level: int, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [kept, *kept.parents][level]
    of_another_user(theirs, monkeypatch)
    assert refusal(kept) == f"{theirs} belongs to another user"


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_is_put_into_a_folder_of_another_user(level: int, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_another_user([kept, *kept.parents][level], monkeypatch)
    with pytest.raises(AGMergeError, match="belongs to another user. Set XDG_CACHE_HOME"):
        keep(kept, kept.parent)


def test_whose_a_file_is_follows_from_who_runs(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_horovod._is_own(kept)
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert not build_horovod._is_own(kept)
    monkeypatch.delattr(os, "geteuid")
    assert build_horovod._is_own(kept)


def test_what_is_kept_can_be_written_by_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        wheel = tmp_path / "horovod-0.28.1-x.whl"
        wheel.write_bytes(b"whole")
        copy = keep(wheel, tmp_path / "cache" / "key")
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o022 == 0 for path in (copy, copy.parent, copy.parent.parent))
    assert refusal(copy) == ""


def test_a_wheel_that_is_refused_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lies in the cache and was changed there is never installed."""
    installed: list[bytes] = []

    def pip(*said: str, env: object = None) -> None:
        if "--force-reinstall" in said:
            installed.append(Path(said[-1]).read_bytes())

    def built(folder: Path, mpi: str | None) -> Path:
        wheel = folder / "horovod-0.28.1-x.whl"
        wheel.write_bytes(b"built here")
        return wheel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, fake in (("pip", pip), ("run", lambda *said: None), ("check_tools", lambda: None)):
        monkeypatch.setattr(build_horovod, name, fake)
    monkeypatch.setattr(build_horovod, "compile_in", built)
    monkeypatch.setattr("shutil.which", lambda program, path=None: "/opt/mpi/bin/mpicxx")
    assert main(["build-horovod"]) == 0
    (wheel,) = build_horovod.cache().glob("*/*.whl")
    changed(wheel)
    capsys.readouterr()
    assert main(["build-horovod"]) == main(["build-horovod"]) == 0
    assert installed == [b"built here"] * 3
    said = capsys.readouterr().out
    assert said.count(f"Not using {wheel}: its hash differs from the cached one") == 1
