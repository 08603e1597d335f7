# SPDX-License-Identifier: Apache-2.0
"""Add a backend by a module and a line in the table: detection, init() and the doctor go by it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import agmerge
from agmerge.backends import local, registry
from agmerge.backends.base import Listen
from agmerge.backends.registry import BACKENDS, detect, size_variable
from agmerge.backends.status import ProbeResult, Row, built_in
from agmerge.cli import doctor
from agmerge.errors import AGMergeError
from agmerge.runtime import workers

LAUNCHER = {"CARRIER_RANK": "0", "CARRIER_SIZE": "3"}
PROBE = "print('{}')"


def diagnose(probe: ProbeResult, python: str, mpirun: str) -> Row:
    return Row("backend", "pigeon", not probe.error, probe.error or "coos", f"{python} -m pip install pigeon")


def opened(env: Mapping[str, str], timeout: float, listen: Listen) -> local.LocalBackend:
    assert callable(listen) and timeout > 0
    return local.alone()


@pytest.fixture
def pigeon(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put a new backend in the last line of the table."""
    module = SimpleNamespace(
        SIZES=("CARRIER_SIZE",),
        READS_SLURM=False,
        PROBE=PROBE,
        initialised=lambda: False,
        workers=lambda: 1,
        launched=lambda env: "CARRIER_RANK" in env,
        can_join=lambda env: "FLOCK" in env,
        open=opened,
        diagnose=diagnose,
    )
    monkeypatch.setitem(BACKENDS, "pigeon", module)
    monkeypatch.setattr(BACKENDS["torch"], "initialised", lambda: False)
    monkeypatch.setattr(BACKENDS["horovod"], "initialised", lambda: False)
    monkeypatch.setattr(workers, "_process", None)
    for name in [
        *LAUNCHER,
        "AGMERGE_BACKEND",
        "HOROVOD_ELASTIC",
        *(size for one in BACKENDS.values() for size in one.SIZES),
    ]:
        monkeypatch.delenv(name, raising=False)
    return module


def test_every_backend_of_the_table_has_the_protocol() -> None:
    for name, module in BACKENDS.items():
        functions = ("initialised", "workers", "launched", "can_join", "open")
        for attribute in (*registry.BackendModule.__annotations__, *functions):
            assert hasattr(module, attribute), (name, attribute)
        row = module.diagnose(ProbeResult(error="broken"), "python", "")
        assert (row.kind, row.name) == ("backend", name)
        assert row.works is (name == registry.ALONE) and bool(row.fix) != row.works


@pytest.mark.usefixtures("pigeon")
def test_a_new_backend_is_detected_by_its_launcher_or_where_nobody_else_is_meant() -> None:
    assert detect(LAUNCHER) == detect({"FLOCK": "1"}) == "pigeon"
    assert detect({**LAUNCHER, "AGMERGE_BACKEND": "local"}) == "local"
    assert detect({"FLOCK": "1", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}) == "torch"
    assert detect({}) == "local"


def test_a_library_that_the_script_has_initialised_comes_first(
    pigeon: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry.initialised() is None
    monkeypatch.setattr(pigeon, "initialised", lambda: True)
    assert registry.initialised() == detect({"AGMERGE_BACKEND": "local"}) == "pigeon"


@pytest.mark.usefixtures("pigeon")
def test_a_new_backend_is_opened_and_its_launcher_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    agmerge.init("pigeon")
    assert agmerge.size() == 1
    agmerge.shutdown()
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    assert size_variable(LAUNCHER, "pigeon") == "CARRIER_SIZE"
    with pytest.raises(AGMergeError, match=r"started 3 workers \(CARRIER_SIZE\), but the pigeon backend sees one"):
        agmerge.init()


@pytest.mark.usefixtures("pigeon")
def test_a_new_backend_has_its_row_in_the_doctors_table() -> None:
    def probe(program: str) -> ProbeResult:
        return ProbeResult() if program == PROBE else ProbeResult(error="none")

    rows: dict[str, Any] = {row.name: row for row in doctor.examine(probe, lambda launcher: "", None)}
    assert list(rows)[:5] == ["torch", "horovod", "mpi", "local", "pigeon"]
    assert rows["pigeon"].works and rows["pigeon"].detail == "coos" and not rows["mpi"].works


def test_what_is_built_in() -> None:
    assert built_in({"mpi": True, "gloo": True, "nccl": False}) == "MPI, Gloo (no NCCL)"
    assert built_in({"gloo": False}) == "nothing (no Gloo)"
    assert built_in({"gloo": True, "nccl": True, "version": "1"}) == "Gloo, NCCL"
