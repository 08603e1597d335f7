# SPDX-License-Identifier: Apache-2.0
"""The backend of Horovod, with a stand-in for Horovod: tests/distributed has the real one."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from pretend.device import Device
from pretend.registration import install
from pretend.tensors import put

from agmerge.backends import horovod
from agmerge.backends.horovod import SETTINGS, HorovodBackend, HorovodHandle
from agmerge.errors import AGMergeError


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


@pytest.mark.parametrize("size", [1, 3])
def test_a_devices_gather_writes_into_our_output_under_the_callers_stream(size: int) -> None:
    install()
    device, handed = Device(), []
    device.use()
    tensor, out = put(torch.tensor([1.5, 2.5]), device), put(torch.zeros(2 * size), device)

    def gather(sent: torch.Tensor, received: torch.Tensor, name: str, process_set: object) -> int:
        handed.append((threading.get_ident(), name, process_set))
        assert received.host.data_ptr() == out.host.data_ptr() and not received._is_view()
        received.host.copy_(sent.host.repeat(size))
        return 7

    hvd = SimpleNamespace(mpi_ops=SimpleNamespace(_allgather_async=gather), global_process_set="all")
    hvd.rank, hvd.size, hvd.local_rank, hvd.local_size = lambda: 0, lambda: size, lambda: 0, lambda: 1
    hvd.poll, hvd.synchronize = lambda handle: True, lambda handle: None
    HorovodBackend(hvd, None, "own").all_gather(out, tensor, "buffer 3 (step 4)").wait(1)
    assert out.host.tolist() == [1.5, 2.5] * size
    assert handed == [(threading.get_ident(), "own/buffer 3", "all")]


@pytest.mark.parametrize("nccl", [0, 22703])
def test_without_nccl_tensors_go_through_the_host(nccl: int) -> None:
    hvd = SimpleNamespace(nccl_built=lambda: nccl)
    hvd.rank, hvd.size, hvd.local_rank, hvd.local_size = lambda: 0, lambda: 1, lambda: 0, lambda: 1
    assert HorovodBackend(hvd, None, "own").through_host is (nccl == 0)


def _pretend(monkeypatch: pytest.MonkeyPatch, **more: object) -> SimpleNamespace:
    """Return a Horovod that notes in ``seen`` the variables that it is initialised with; ``more``: of it."""
    seen: dict[str, str] = {}
    hvd = SimpleNamespace(is_initialized=lambda: False, init=lambda: seen.update(os.environ), seen=seen)
    for name in ("rank", "size", "local_rank", "local_size"):
        setattr(hvd, name, lambda name=name: int("size" in name))
    vars(hvd).update(more)
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=hvd))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    return hvd


def _open(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """Open the backend in a process that has these variables."""
    monkeypatch.setattr(os, "environ", dict(given))
    horovod.open({}, timeout=10, listen=lambda rank, gather, env: None)


@pytest.mark.parametrize("gpus", [False, True])
def test_init_sets_what_the_user_has_not(gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    for given in ({"HOROVOD_CYCLE_TIME": "20"}, {}):
        hvd = _pretend(monkeypatch)
        _open(monkeypatch, given)
        assert hvd.seen == {**SETTINGS, "HOROVOD_CYCLE_TIME": "1" if gpus else "5", **given}


@pytest.mark.parametrize("given", [{}, {"OMPI_MCA_mpi_yield_when_idle": "0"}])
def test_init_says_how_open_mpi_is_to_wait_where_cores_are_few(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(horovod, "cores", lambda: 2 * torch.get_num_threads() + 1)
    for workers, told in (("1", {}), ("2", horovod.SLEEPING)):
        started, hvd = {"OMPI_COMM_WORLD_LOCAL_SIZE": workers, **given}, _pretend(monkeypatch)
        _open(monkeypatch, started)
        assert hvd.seen == {**SETTINGS, **told, **started}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_that_initialises_horovod_hears_once_how_open_mpi_should_wait(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horovod, "cores", lambda: 2)
    initialised = {"is_initialized": lambda: True, "rank": lambda: rank, "size": lambda: 2}
    started, said = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {"OMPI_MCA_mpi_yield_when_idle": "0"}
    for given, missing in ((started, 3), ({**started, **said}, 2), ({**started, **horovod.SLEEPING}, 0), (said, 0)):
        hvd = _pretend(monkeypatch, **initialised)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            _open(monkeypatch, given)
        assert [str(one.message).count("=") for one in heard] == ([missing] if missing and rank == 0 else [])
        assert hvd.seen == {} and os.environ == given


class Refusing:
    """A finder with which importing horovod raises an error."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "horovod":
            raise self.error


@pytest.mark.parametrize(
    ("error", "command"),
    [
        (ModuleNotFoundError("No module named 'horovod'"), "build-horovod`"),
        (ImportError("undefined symbol: _ZN3c10"), "build-horovod --force`"),
    ],
)
def test_without_horovod_the_error_says_what_to_run(
    error: ImportError, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra agmerge[horovod] installs none, and pip cannot: `explain` and the page of installation say why."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refusing(error), *sys.meta_path])
    with pytest.raises(AGMergeError, match="requires Horovod with its torch part") as caught:
        horovod.open({}, 5.0, lambda *_: None)  # type: ignore[arg-type, return-value]
    assert f"python -m agmerge {command}" in str(caught.value)
