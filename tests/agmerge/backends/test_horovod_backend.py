"""The backend of Horovod, with a stand-in for Horovod: tests/distributed has the real one."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from agmerge.backends import horovod
from agmerge.backends.horovod import SETTINGS, HorovodHandle


@pytest.mark.slow
def test_a_call_may_set_the_shape_of_its_output_while_its_handle_is_made() -> None:
    # As the gather of several dimensions does on Horovod's thread. Reading the shape then found half of it, once in
    # forty thousand calls, and the job ended with torch's error about strides.
    output, stop = torch.empty(0, dtype=torch.uint8), threading.Event()
    hvd = SimpleNamespace(mpi_ops=SimpleNamespace(_handle_map={7: (torch.empty(3), output)}))

    def resize() -> None:
        while not stop.is_set():
            output.resize_(2, 3, 5)
            output.resize_(0)

    thread = threading.Thread(target=resize)
    thread.start()
    try:
        for _ in range(200_000):
            HorovodHandle(hvd, 7, "gather", (0, 1), lambda result: None)
    finally:
        stop.set()
        thread.join()


def test_a_handle_refers_to_the_tensors_of_its_call_in_c_until_it_has_been_waited_for() -> None:
    given, output = torch.empty(3), torch.empty(0)
    hvd = SimpleNamespace(
        mpi_ops=SimpleNamespace(_handle_map={7: (given, (output, None))}),
        poll=lambda handle: True,
        synchronize=lambda handle: output,
    )
    alone = [tensor._use_count() for tensor in (given, output)]
    handle = HorovodHandle(hvd, 7, "gather", (0, 1), lambda result: None)
    assert [tensor._use_count() for tensor in (given, output)] == [count + 1 for count in alone]
    handle.wait(1)
    assert [tensor._use_count() for tensor in (given, output)] == alone


def test_init_sets_what_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str | None] = {}

    def init() -> None:
        seen.update({name: os.environ.get(name) for name in SETTINGS})

    hvd = SimpleNamespace(is_initialized=lambda: False, init=init)
    for name in ("rank", "size", "local_rank", "local_size"):
        setattr(hvd, name, lambda name=name: int("size" in name))
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=hvd))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    monkeypatch.setattr(os, "environ", {"HOROVOD_CYCLE_TIME": "20"})
    horovod.open({}, timeout=10, listen=lambda rank, gather, env: None)
    assert seen == {**SETTINGS, "HOROVOD_CYCLE_TIME": "20"}
