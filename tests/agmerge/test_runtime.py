"""Which backend a worker talks through, and that it is never silently the wrong one."""

from __future__ import annotations

import os
import threading

import pytest

import agmerge
from agmerge import runtime, testing
from agmerge.backends import torch as torch_backend
from agmerge.errors import AGMergeError

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
LAUNCHERS = {
    "HOROVOD_RANK": "horovodrun",
    "OMPI_COMM_WORLD_RANK": "Open MPI's mpirun",
    "PMI_RANK": "an MPI launcher",
    "PMIX_RANK": "an MPI launcher",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher around, no process group, nothing initialised; opening the torch backend is an error."""
    for name in (*TORCHRUN, *LAUNCHERS, "AGMERGE_BACKEND", "HOROVOD_ELASTIC", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch_backend, "initialised", lambda: False)
    monkeypatch.setattr(runtime, "_process", None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``init`` opens in place of a process group."""
    names: list[str] = []

    def open_torch(env: object, timeout: float) -> object:
        names.append("torch")
        return runtime.local.open()

    monkeypatch.setattr(torch_backend, "open", open_torch)
    return names


# -- detection ----------------------------------------------------------------------------------------------


def test_alone_means_local() -> None:
    assert runtime.detect({}) == "local"
    assert runtime.detect({"PATH": "/bin", "OMP_NUM_THREADS": "1"}) == "local"


def test_an_initialised_process_group_comes_before_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "initialised", lambda: True)
    for env in ({}, {"AGMERGE_BACKEND": "local"}, {"OMPI_COMM_WORLD_RANK": "0"}):
        assert runtime.detect(env) == "torch"


def test_the_variable_comes_before_the_launchers() -> None:
    assert runtime.detect({**TORCHRUN, "AGMERGE_BACKEND": "local"}) == "local"
    assert runtime.detect({"OMPI_COMM_WORLD_RANK": "1", "AGMERGE_BACKEND": "torch"}) == "torch"
    assert runtime.detect({"AGMERGE_BACKEND": ""}) == "local"  # set to nothing is not set


def test_torchrun_or_the_same_variables_by_hand() -> None:
    assert runtime.detect(TORCHRUN) == "torch"
    assert runtime.detect({**TORCHRUN, "WORLD_SIZE": "1"}) == "torch"


@pytest.mark.parametrize("variable", LAUNCHERS)
def test_a_launcher_without_a_backend_is_an_error_and_not_local(variable: str) -> None:
    with pytest.raises(AGMergeError) as caught:
        runtime.detect({variable: "1"})
    text = str(caught.value)
    assert LAUNCHERS[variable] in text and f"{variable}=1" in text
    assert "torchrun" in text and "MASTER_ADDR" in text  # what to do
    assert runtime.detect({variable: "1", **TORCHRUN}) == "torch"  # and that helps


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_variables_set_by_hand_but_not_all_are_an_error_and_not_local(missing: str) -> None:
    env = {key: value for key, value in TORCHRUN.items() if key != missing}
    with pytest.raises(AGMergeError, match=f"WORLD_SIZE=2, but {missing} not set"):
        runtime.detect(env)
    assert runtime.detect({**env, "WORLD_SIZE": "1"}) == "local"


# -- init and shutdown --------------------------------------------------------------------------------------


def test_local_from_init_to_shutdown() -> None:
    assert not agmerge.is_initialized()
    agmerge.init()
    try:
        assert agmerge.is_initialized()
        assert (agmerge.rank(), agmerge.size(), agmerge.local_rank(), agmerge.local_size()) == (0, 1, 0, 1)
        assert agmerge.backend_name() == "local"
        agmerge.barrier()
    finally:
        agmerge.shutdown()
    assert not agmerge.is_initialized()
    agmerge.shutdown()  # twice is once
    with pytest.raises(AGMergeError, match="has not been initialized"):
        agmerge.rank()
    agmerge.init("local")  # and again
    assert agmerge.is_initialized()


def test_a_second_init_does_nothing_unless_it_names_another_backend() -> None:
    agmerge.init()
    first = runtime.world()
    agmerge.init()
    agmerge.init("local")
    assert runtime.world() is first
    with pytest.raises(ValueError, match="'torch'.*already initialised with 'local'; call shutdown"):
        agmerge.init("torch")
    assert runtime.world() is first


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_backends_that_are_not_built_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is not built yet; backends: torch, local"):
        agmerge.init(name)
    monkeypatch.setenv("AGMERGE_BACKEND", name)
    with pytest.raises(ValueError, match=f"'{name}' is not built yet"):
        agmerge.init()
    assert not agmerge.is_initialized()


def test_an_unknown_backend_is_refused_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown backend 'gloo'; backends: torch, local"):
        agmerge.init("gloo")
    monkeypatch.setenv("AGMERGE_BACKEND", "Torch")
    with pytest.raises(ValueError, match="unknown backend 'Torch'"):
        agmerge.init()
    assert not agmerge.is_initialized()


def test_elastic_is_refused(monkeypatch: pytest.MonkeyPatch, opened: list[str]) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    for backend in (None, "local", "torch"):
        with pytest.raises(AGMergeError, match="elastic training is not built yet"):
            agmerge.init(backend)
    assert not agmerge.is_initialized() and opened == []
    monkeypatch.setenv("HOROVOD_ELASTIC", "0")
    agmerge.init()


@pytest.mark.parametrize("variable", LAUNCHERS)
def test_init_under_a_launcher_without_a_backend(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(AGMergeError, match="launch with torchrun"):
        agmerge.init()
    assert not agmerge.is_initialized()


def test_init_takes_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch, opened: list[str]) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    agmerge.init()
    assert opened == ["torch"]


def test_the_torch_backend_without_a_launcher_names_what_is_missing() -> None:
    with pytest.raises(AGMergeError, match="RANK, WORLD_SIZE, MASTER_ADDR: launch the script with torchrun"):
        agmerge.init("torch")
    assert "MASTER_PORT" not in os.environ
    assert not agmerge.is_initialized()


# -- threads ------------------------------------------------------------------------------------------------


def test_a_thread_of_a_group_has_its_own_and_leaves_the_process_alone() -> None:
    agmerge.init()
    outer = runtime.world()

    def body(rank: int) -> int:
        assert runtime.world() is not outer
        agmerge.init()  # a script calls it; here it is done
        with pytest.raises(ValueError, match="already initialised with 'local'"):
            agmerge.init("torch")
        size = agmerge.size()
        agmerge.shutdown()
        return size

    assert testing.run(2, body) == [2, 2]
    assert runtime.world() is outer


def test_other_threads_share_the_backend_of_the_process() -> None:
    agmerge.init()
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(runtime.world()))
    thread.start()
    thread.join()
    assert seen == [runtime.world()]
