# SPDX-License-Identifier: Apache-2.0
"""CUDA's toolkit for a build of Horovod with NCCL: where it is found, and what is said where it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agmerge import __main__ as command
from agmerge.cli import build_horovod, cuda_toolkit, nccl
from agmerge.cli.nccl import Nccl

THERE = Nccl(Path("/site/include"), Path("/site/libnccl.so.2"), "2.27.3")


def toolkit(folder: Path, headers: str = "include") -> Path:
    """A folder as CUDA's installer leaves it."""
    for place, name in (("bin", "nvcc"), (headers, "cuda_runtime.h")):
        (folder / place).mkdir(parents=True)
        (folder / place / name).touch(mode=0o755)
    return folder


@pytest.fixture(autouse=True)
def no_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_toolkit, "USUAL", tmp_path / "usual")


@pytest.mark.parametrize("headers", ["include", "targets/x86_64-linux/include"])
@pytest.mark.parametrize("how", ["CUDA_HOME", "CUDA_PATH", "PATH", "link", "usual"])
def test_it_is_found(how: str, headers: str, tmp_path: Path) -> None:
    folder = toolkit(tmp_path / ("usual" if how == "usual" else "cuda"), headers)
    given = {"PATH": str(tmp_path / "bin")}
    if how == "link":  # another folder's bin has a link to it
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").symlink_to(folder / "bin" / "nvcc")
    elif how == "PATH":
        given["PATH"] = str(folder / "bin")
    elif how != "usual":
        given[how] = str(folder)
    assert cuda_toolkit.home(given) == folder


def test_a_script_beside_no_headers_is_passed_over_and_a_named_folder_is_not(tmp_path: Path) -> None:
    """A wrapper on PATH: the folder above it is not CUDA's."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    given = {"PATH": str(tmp_path / "bin")}
    assert cuda_toolkit.home(given) is None
    usual = toolkit(tmp_path / "usual")
    assert cuda_toolkit.home(given) == usual
    assert cuda_toolkit.home({**given, "CUDA_HOME": str(tmp_path)}) is None


def test_torch_and_cmake_are_told_of_it(tmp_path: Path) -> None:
    told = cuda_toolkit.settings(tmp_path, "/usr/bin")
    assert told["CUDA_HOME"] == told["CUDAToolkit_ROOT"] == str(tmp_path)
    assert told["CUDACXX"] == str(tmp_path / "bin" / "nvcc")
    assert told["PATH"] == f"{tmp_path / 'bin'}{os.pathsep}/usr/bin"
    assert cuda_toolkit.settings(None, "/usr/bin") == {}


@pytest.mark.parametrize(
    ("given", "cuda", "has_toolkit", "there", "words"),
    [
        ({}, "13.0", True, THERE, []),
        ({}, None, True, THERE, ["built for CPUs"]),
        ({}, "12.8", False, THERE, ["cuda-nvcc-12-8"]),
        ({"CUDA_HOME": "/opt/none"}, "12.8", False, THERE, ["CUDA_HOME=/opt/none"]),
        ({}, "12.8", True, None, ["pip install nvidia-nccl-cu12"]),
        ({"HOROVOD_NCCL_HOME": "/opt/nccl"}, "12.8", True, None, []),
        ({"HOROVOD_GPU_OPERATIONS": ""}, "13.0", True, THERE, ["HOROVOD_GPU_OPERATIONS='' is set, which is not NCCL"]),
        ({}, None, False, None, ["built for CPUs", "cuda-nvcc-13-0", "nvidia-nccl-cu13"]),
    ],
)
def test_what_is_missing_is_named_with_where_to_get_it(
    given: dict[str, str], cuda: str | None, has_toolkit: bool, there: Nccl | None, words: list[str]
) -> None:
    found = cuda_toolkit.lacking(given, cuda, Path("/cuda") if has_toolkit else None, there)
    assert len(found) == len(words) and all(word in line for word, line in zip(words, found, strict=True)), found


def test_with_nccl_asked_for_nothing_is_built_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[bool] = []
    monkeypatch.setattr(build_horovod, "build", built.append)
    monkeypatch.setattr(nccl, "installed", lambda: None)
    monkeypatch.setattr(cuda_toolkit, "home", lambda given: None)
    assert command.main(["build-horovod", "--nccl"]) == 1
    said = capsys.readouterr().err
    assert not built and "Horovod was not built" in said and "no nvcc" in said and "no NCCL" in said
    assert command.main(["build-horovod"]) == 0 and built == [False]
