# SPDX-License-Identifier: Apache-2.0
"""How Open MPI is told to wait: tests/distributed has Horovod over the real one."""

from __future__ import annotations

import pytest

from agmerge.backends import horovod


@pytest.mark.parametrize(
    ("workers", "threads", "cores", "sleeps"),
    [(2, 1, 2, True), (2, 1, 3, True), (2, 1, 4, False), (2, 4, 8, True), (1, 1, 1, True), (8, 7, 64, False)],
)
def test_threads_that_wait_sleep_where_they_would_take_a_trainers_core(
    workers: int, threads: int, cores: int, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horovod, "cores", lambda: cores)
    told = horovod.waiting({"OMPI_COMM_WORLD_LOCAL_SIZE": str(workers)}, threads)
    assert told == (horovod.SLEEPING if sleeps else {})


def test_what_open_mpi_has_not_started_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "cores", lambda: 1)
    assert horovod.waiting({"HOROVOD_RANK": "0", "HOROVOD_LOCAL_SIZE": "8"}, 8) == {}
