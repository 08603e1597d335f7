# SPDX-License-Identifier: Apache-2.0
"""What is said of limits on open files, of this process and of invented ones."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from agmerge.backends import open_files


def invented(monkeypatch: pytest.MonkeyPatch, count: int, soft: int) -> None:
    """A process with ``count`` files, of the ``soft`` that it may have."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    monkeypatch.setattr(os, "listdir", lambda folder: ["0"] * (count + 1))


def test_files_of_this_process_are_counted() -> None:
    before = open_files.counted()
    with open(os.devnull):
        after = open_files.counted()
    assert before is not None and after == (before[0] + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


@pytest.mark.parametrize(("left", "short"), [(open_files.SPARE + 2, False), (open_files.SPARE + 1, True), (0, True)])
def test_what_a_group_takes_has_to_be_left(left: int, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 100 - left, 100)
    assert bool(open_files.shortage(2)) is bool(open_files.advice(2)) is short
    if short:
        assert open_files.shortage(2) == f"has {100 - left} open files, and the limit is 100 (ulimit -n)"
        assert open_files.advice(2).startswith("This process has ") and "ulimit -n 65536" in open_files.advice(2)


def test_where_there_is_no_limit_there_is_no_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 10**6, resource.RLIM_INFINITY)
    assert open_files.counted() is None and open_files.advice(1000) == ""


@pytest.mark.parametrize(("code", "known"), [(errno.EMFILE, (24, 24)), (errno.ENFILE, (24, 24)), (errno.ENOENT, None)])
def test_who_cannot_count_for_want_of_a_file_has_none_left(
    code: int, known: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: str) -> list[str]:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(resource, "getrlimit", lambda which: (24, 24))
    monkeypatch.setattr(os, "listdir", full)
    assert open_files.counted() == known
