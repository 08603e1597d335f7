# SPDX-License-Identifier: Apache-2.0
"""Which backend a worker talks through, and that it is never silently the wrong one."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import agmerge
from agmerge import testing
from agmerge.backends import horovod, local, mpi, slurm
from agmerge.backends import torch as torch_backend
from agmerge.errors import AGMergeError
from agmerge.runtime import workers

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
MPI_LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
SRUN = {  # the sixth task of `srun` on three nodes of a larger job
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "node[01-03]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}
VARIABLES = (*TORCHRUN, *MPI_LAUNCHERS, "HOROVOD_RANK", *SIZES, *SRUN)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher around, no process group, no Horovod, nothing initialised."""
    for name in (*VARIABLES, "AGMERGE_BACKEND", "HOROVOD_ELASTIC", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch_backend, "initialised", lambda: False)
    monkeypatch.setattr(horovod, "initialised", lambda: False)
    monkeypatch.setattr(horovod, "has_mpi", lambda: False)
    monkeypatch.setattr(workers, "_process", None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``init`` opens in place of real backends: each is alone."""
    names: list[str] = []

    def opener(name: str) -> Callable[..., object]:
        def open_(env: object, timeout: float, listen: object = None) -> object:
            names.append(name)
            return local.alone()

        return open_

    for name, module in {"torch": torch_backend, "horovod": horovod, "mpi": mpi}.items():
        monkeypatch.setattr(module, "open", opener(name))
    return names


# -- detection ----------------------------------------------------------------------------------------------


def test_alone_means_local() -> None:
    assert workers.detect({}) == "local"
    assert workers.detect({"PATH": "/bin", "OMP_NUM_THREADS": "1"}) == "local"


def test_an_initialised_process_group_comes_before_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "initialised", lambda: True)
    for env in ({}, {"AGMERGE_BACKEND": "local"}, {"OMPI_COMM_WORLD_RANK": "0"}):
        assert workers.detect(env) == "torch"


def test_the_variable_comes_before_the_launchers() -> None:
    assert workers.detect({**TORCHRUN, "AGMERGE_BACKEND": "local"}) == "local"
    assert workers.detect({"OMPI_COMM_WORLD_RANK": "1", "AGMERGE_BACKEND": "torch"}) == "torch"
    assert workers.detect({"AGMERGE_BACKEND": ""}) == "local"  # set to nothing is not set


def test_torchrun_or_the_same_variables_by_hand() -> None:
    assert workers.detect(TORCHRUN) == "torch"
    assert workers.detect({**TORCHRUN, "WORLD_SIZE": "1"}) == "torch"


@pytest.mark.parametrize("variable", MPI_LAUNCHERS)
def test_an_mpi_launcher_means_horovod_if_it_has_mpi_and_else_mpi(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workers.detect({variable: "1"}) == "mpi"
    monkeypatch.setattr(horovod, "has_mpi", lambda: True)
    assert workers.detect({variable: "1"}) == "horovod"
    assert workers.detect({variable: "1", **TORCHRUN}) == "torch"


def test_horovodrun_means_horovod_whatever_else_is_set() -> None:
    assert workers.detect({"HOROVOD_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", **TORCHRUN}) == "horovod"


def test_an_initialised_horovod_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "initialised", lambda: True)
    monkeypatch.setattr(torch_backend, "initialised", lambda: True)
    assert workers.detect({"AGMERGE_BACKEND": "local"}) == "horovod"


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_variables_set_by_hand_but_not_all_are_an_error_and_not_local(missing: str) -> None:
    env = {key: value for key, value in TORCHRUN.items() if key != missing}
    with pytest.raises(AGMergeError, match=f"WORLD_SIZE=2, but {missing} not set"):
        workers.detect(env)
    assert workers.detect({**env, "WORLD_SIZE": "1"}) == "local"


def test_a_pod_for_torchrun_in_which_the_script_is_started_without_it_is_an_error_and_not_local() -> None:
    for nodes in ("2", "1:4"):
        with pytest.raises(AGMergeError, match=f"PET_NNODES={nodes} is set for torchrun, .* `torchrun train.py`"):
            workers.detect({"PET_NNODES": nodes, "PET_NODE_RANK": "0"})
    assert workers.detect({"PET_NNODES": "1"}) == "local"
    assert workers.detect({"PET_NNODES": "2", **TORCHRUN}) == "torch"


@pytest.mark.parametrize("variable", SIZES)
def test_how_many_workers_there_are_is_not_enough_to_be_one_and_not_local(variable: str) -> None:
    with pytest.raises(AGMergeError, match=f"{variable}=2, but no variable sets the rank"):
        workers.detect({variable: "2"})
    assert workers.detect({variable: "1"}) == workers.detect({variable: "2", "AGMERGE_BACKEND": "local"}) == "local"
    assert workers.detect({variable: "2", "MV2_COMM_WORLD_RANK": "1"}) == "mpi"


# -- srun ---------------------------------------------------------------------------------------------------


def test_several_tasks_of_srun_are_workers_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "installed", lambda: True)
    assert workers.detect(SRUN) == "torch"
    assert workers.detect({**SRUN, "AGMERGE_BACKEND": "local"}) == "local"  # who asks for it
    assert workers.detect({**SRUN, **TORCHRUN}) == "torch"
    assert workers.detect({**SRUN, "OMPI_COMM_WORLD_RANK": "1"}) == "mpi"


def test_srun_speaks_pmi_also_where_there_is_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {**SRUN, "PMI_RANK": "5"}
    monkeypatch.setattr(mpi, "installed", lambda: True)
    assert workers.detect(env) == "mpi"
    monkeypatch.setattr(mpi, "installed", lambda: False)
    assert workers.detect(env) == "torch"
    assert workers.detect({"PMI_RANK": "5"}) == "mpi"  # which says what is missing


def test_a_plain_process_in_a_job_is_alone() -> None:
    """In the shell of salloc or sbatch, and in a step of one task, whatever the job has."""
    job = {key: value for key, value in SRUN.items() if "STEP" not in key}
    assert workers.detect(job) == "local"
    assert workers.detect({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) == "local"


def test_what_srun_says_in_the_words_of_torchrun() -> None:
    found = slurm.variables(SRUN)
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node01",
    }
    assert port == slurm.variables({**SRUN, "SLURM_PROCID": "0"})["MASTER_PORT"]  # on every task the same
    assert port != slurm.variables({**SRUN, "SLURM_STEP_ID": "3"})["MASTER_PORT"]
    assert 20_000 <= int(port) < 32_000
    chosen = slurm.variables({**SRUN, "MASTER_PORT": "5", "MASTER_ADDR": "a"})
    assert (chosen["MASTER_ADDR"], chosen["MASTER_PORT"]) == ("a", "5")


@pytest.mark.parametrize("variable", sorted(set(SRUN) - {"SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_ID"}))
@pytest.mark.parametrize("value", [None, "node[1", ""])
def test_what_srun_does_not_say_is_refused_with_what_to_do(variable: str, value: str | None) -> None:
    env = {key: text for key, text in SRUN.items() if key != variable}
    env |= {} if value is None else {variable: value}
    if variable == "SLURM_STEP_NUM_TASKS":
        assert not slurm.launched(env)
        return
    with pytest.raises(AGMergeError, match="srun started 6 tasks .*srun --ntasks-per-node=1 torchrun"):
        slurm.variables(env)


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("a", "a"),
        ("node[01-03,07]", "node01 node02 node03 node07"),
        ("a[3-5,9],b,c-[10]", "a3 a4 a5 a9 b c-10"),
        ("rack[1-2]n[08-09]x", "rack1n08x rack1n09x rack2n08x rack2n09x"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101].site", "n098.site n099.site n100.site n101.site"),
    ],
)
def test_a_list_of_hosts(listed: str, names: str) -> None:
    assert slurm.hosts(listed) == names.split()


@pytest.mark.parametrize("listed", ["", "a,,b", "a[", "a]1", "a[[1]]", "a[]", "a[x-y]", ","])
def test_what_is_no_list_of_hosts(listed: str) -> None:
    with pytest.raises(ValueError):
        slurm.hosts(listed)


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
    first = workers.world()
    agmerge.init()
    agmerge.init("local")
    assert workers.world() is first
    with pytest.raises(ValueError, match="'torch'.*already initialized with 'local'. Call shutdown"):
        agmerge.init("torch")
    assert workers.world() is first


@pytest.mark.parametrize("name", ["horovod", "mpi", "torch"])
def test_a_backend_that_is_named_is_opened(name: str, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    agmerge.init(name)
    agmerge.shutdown()
    monkeypatch.setenv("AGMERGE_BACKEND", name)
    agmerge.init()
    assert opened == [name, name]


@pytest.mark.parametrize("variable", [*SIZES, "SLURM_STEP_NUM_TASKS"])
def test_a_backend_that_sees_one_of_several_workers_is_refused(
    variable: str, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(AGMergeError, match=f"started 2 workers \\({variable}\\), but the mpi backend sees one"):
        agmerge.init("mpi")
    assert not agmerge.is_initialized()
    agmerge.init("local")  # who asks for it, gets it
    assert agmerge.size() == 1


@pytest.mark.parametrize("name", ["horovod", "mpi"])
def test_a_backend_whose_library_is_missing_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("horovod", "horovod.torch", "mpi4py"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(AGMergeError, match=f"backend='{name}' requires .*agmerge doctor"):
        agmerge.init(name)
    assert not agmerge.is_initialized()


def test_an_unknown_backend_is_refused_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="backend='gloo' is unknown. Choose from: horovod, torch, mpi, local"):
        agmerge.init("gloo")
    monkeypatch.setenv("AGMERGE_BACKEND", "Torch")
    with pytest.raises(ValueError, match="backend='Torch' is unknown"):
        agmerge.init()
    assert not agmerge.is_initialized()


def test_elastic_is_refused(monkeypatch: pytest.MonkeyPatch, opened: list[str]) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    for backend in (None, "local", "torch"):
        with pytest.raises(AGMergeError, match="AGM010"):
            agmerge.init(backend)
    assert not agmerge.is_initialized() and opened == []
    monkeypatch.setenv("HOROVOD_ELASTIC", "0")
    agmerge.init()


def test_init_takes_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch, opened: list[str]) -> None:
    for name, value in {**TORCHRUN, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    agmerge.init()
    assert opened == ["torch"]


def test_the_torch_backend_without_a_launcher_names_what_is_missing() -> None:
    with pytest.raises(AGMergeError, match="RANK, WORLD_SIZE, MASTER_ADDR. Launch the script with torchrun"):
        agmerge.init("torch")
    assert "MASTER_PORT" not in os.environ
    assert not agmerge.is_initialized()


# -- too early ----------------------------------------------------------------------------------------------


def wrapped() -> agmerge.DistributedOptimizer:
    model = torch.nn.Linear(2, 2)
    return agmerge.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


@pytest.mark.parametrize("name, module", [("torch", torch_backend), ("horovod", horovod)])
def test_workers_that_are_initialised_after_init_are_no_silent_local_training(
    name: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where init() stands at the top of a script of which torch.multiprocessing.spawn starts the workers."""
    agmerge.init()
    assert agmerge.size() == 1
    wrapped()  # nobody else is there yet
    monkeypatch.setattr(module, "initialised", lambda: True)
    monkeypatch.setattr(module, "workers", lambda: 2)
    call = "hvd.init()" if name == "horovod" else "init_process_group()"
    with pytest.raises(AGMergeError, match=rf"initialized {name}, which has 2.* after {re.escape(call)}, or remove"):
        wrapped()
    monkeypatch.setattr(module, "workers", lambda: 1)
    wrapped()


@pytest.mark.parametrize("said", ["argument", "variable"])
def test_who_says_that_workers_are_alone_has_them_alone(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if said == "variable":
        monkeypatch.setenv("AGMERGE_BACKEND", "local")
    agmerge.init("local" if said == "argument" else None)
    monkeypatch.setattr(torch_backend, "initialised", lambda: True)
    monkeypatch.setattr(torch_backend, "workers", lambda: 2)
    wrapped()


@pytest.mark.usefixtures("opened")
def test_of_workers_that_the_script_has_initialised_rank_0_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is seen before anything connects, too, though nobody has called ``agmerge.init()``."""
    monkeypatch.setattr(torch_backend, "initialised", lambda: True)
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="AGM707"):
        agmerge.DistributedOptimizer(inner, model.named_parameters(), compression="dgc")


# -- threads ------------------------------------------------------------------------------------------------


def test_a_thread_of_a_group_has_its_own_and_leaves_the_process_alone() -> None:
    agmerge.init()
    outer = workers.world()

    def body(rank: int) -> int:
        assert workers.world() is not outer
        agmerge.init()  # a script calls it; here it is done
        with pytest.raises(ValueError, match="already initialized with 'local'"):
            agmerge.init("torch")
        size = agmerge.size()
        agmerge.shutdown()
        return size

    assert testing.run(2, body) == [2, 2]
    assert workers.world() is outer


def test_other_threads_share_the_backend_of_the_process() -> None:
    agmerge.init()
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(workers.world()))
    thread.start()
    thread.join()
    assert seen == [workers.world()]
