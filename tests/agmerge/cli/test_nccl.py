# SPDX-License-Identifier: Apache-2.0
"""Which NCCL Horovod is built with; and its CUDA sources, as we correct them, compiled against NCCL of today."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from agmerge.cli import build_horovod, nccl
from agmerge.cli.build_horovod import BuildError
from agmerge.cli.nccl import Nccl

HEADER = '/* NCCL */\n#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n#define NCCL_SUFFIX ""\n'


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A folder as the wheel's ``nvidia/nccl``."""
    folder = tmp_path / "site" / "nvidia" / "nccl"
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "nccl.h").write_text(HEADER)
    (folder / "lib").mkdir()
    (folder / "lib" / "libnccl.so.2").write_bytes(b"")
    return folder


# -- where it lies ------------------------------------------------------------------------------------------


def test_the_wheel_beside_torch_is_found(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(wheel.parent.parent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    found = nccl.installed()
    assert found == Nccl(wheel / "include", wheel / "lib" / "libnccl.so.2", "2.27.3")


@pytest.mark.parametrize("part", ["include/nccl.h", "lib/libnccl.so.2"])
def test_half_an_nccl_is_none(part: str, wheel: Path) -> None:
    assert nccl.lying_in(wheel) is not None
    (wheel / part).unlink()
    assert nccl.lying_in(wheel) is None


# -- whether it is taken ------------------------------------------------------------------------------------

HERE = Nccl(Path("/site/nvidia/nccl/include"), Path("/site/nvidia/nccl/lib/libnccl.so.2"), "2.27.3")


@pytest.mark.parametrize(
    "given, there, taken",
    [
        ({}, HERE, True),
        ({}, None, False),
        ({"HOROVOD_GPU_OPERATIONS": "NCCL"}, None, True),  # from elsewhere, which Horovod's build looks for
        ({"HOROVOD_GPU_OPERATIONS": ""}, HERE, False),
        ({"HOROVOD_GPU_OPERATIONS": "MPI"}, HERE, False),
        ({"HOROVOD_GPU_ALLREDUCE": "MPI"}, HERE, False),
        ({"HOROVOD_GPU": "ROCM"}, HERE, False),
        ({"HOROVOD_WITHOUT_MPI": "1"}, HERE, True),
    ],
)
def test_the_users_word_goes(given: Mapping[str, str], there: Nccl | None, taken: bool) -> None:
    assert nccl.chosen(given, there) is taken


def test_the_build_is_told_where_it_lies_and_finds_a_name_to_link(wheel: Path, tmp_path: Path) -> None:
    there = nccl.lying_in(wheel)
    told = nccl.settings({}, there, tmp_path)
    assert told["HOROVOD_GPU_OPERATIONS"] == "NCCL" and told["HOROVOD_NCCL_LINK"] == "SHARED"
    assert Path(told["HOROVOD_NCCL_INCLUDE"], "nccl.h").is_file()
    assert Path(told["HOROVOD_NCCL_LIB"], "libnccl.so").resolve() == wheel / "lib" / "libnccl.so.2"


def test_the_users_own_nccl_stays_the_users(tmp_path: Path) -> None:
    assert nccl.settings({"HOROVOD_NCCL_HOME": "/opt/nccl"}, HERE, tmp_path) == {"HOROVOD_GPU_OPERATIONS": "NCCL"}
    assert list(tmp_path.iterdir()) == []


def test_the_key_of_a_wheel_knows_its_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    keys = set()
    for cuda, version in ((False, "2.27.3"), (True, "2.27.3"), (True, "2.28.1")):
        monkeypatch.setattr(build_horovod, "has_cuda", lambda cuda=cuda: cuda)
        there = Nccl(HERE.include, HERE.library, version)
        monkeypatch.setattr(nccl, "installed", lambda there=there: there)
        assert build_horovod.with_nccl() is cuda
        keys.add(build_horovod.key(None))
    assert len(keys) == 3


# -- whether it compiles ------------------------------------------------------------------------------------

WHEELS = ("nvidia-nccl-cu13>=2.27,<3", *(f"nvidia-cuda-{part}>=13,<14" for part in ("runtime", "crt", "cccl")))
COMMON = ("nccl_operations.cc", "gpu_operations.cc", "cuda_operations.cc")
OF_TORCH = ("ready_event.cc", "adapter_v2.cc", "mpi_ops_v2.cc")
COLLECTIVES = ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")
# As Horovod's CMakeLists.txt defines them for HOROVOD_GPU_OPERATIONS=NCCL; ord("N") names NCCL there.
DEFINED = (
    *(
        "HAVE_CUDA=1",
        "HAVE_GPU=1",
        "HAVE_NCCL=1",
        "HAVE_GLOO=1",
        "EIGEN_MPL2_ONLY=1",
        "TORCH_API_INCLUDE_EXTENSION_H=1",
    ),
    *(f"HOROVOD_GPU_{name}={ord('N')}" for name in COLLECTIVES),
)
BUNDLED = ("HTTPRequest/include", "lbfgs/include", "eigen", "flatbuffers/include", "gloo")
MACROS = "c10/cuda/impl/cuda_cmake_macros.h"  # the one header of torch's that only its builds for CUDA have


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Horovod's source with our corrections, and the flags that compile it; skipped where a package cannot be had."""
    folder = tmp_path_factory.mktemp("horovod")
    try:
        build_horovod.check_tools()
        build_horovod.pip("install", "--target", str(folder / "tools"), *build_horovod.TOOLS)
        env = build_horovod.environment(os.environ, folder / "tools", None)
        root = build_horovod.fetch_source(folder, env)
        build_horovod.pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder / "wheels"), *WHEELS)
    except BuildError as error:
        pytest.skip(f"Horovod's CUDA sources were not compiled: {str(error).splitlines()[-1]}")
    for packed in (folder / "wheels").iterdir():
        with zipfile.ZipFile(packed) as whole:
            whole.extractall(folder / "cuda", [name for name in whole.namelist() if "/include/" in name])
        packed.unlink()  # 300 MB
    macros = folder / "macros" / MACROS
    macros.parent.mkdir(parents=True)
    macros.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    import torch
    from torch.utils.cpp_extension import include_paths

    ours = [root, *(root / "third_party" / name for name in BUNDLED), *root.glob("third_party/boost/*/include")]
    cuda = [*(folder / "cuda").glob("nvidia/*/include"), *(folder / "cuda").glob("nvidia/*/include/cccl")]
    theirs = [*cuda, *include_paths(), sysconfig.get_path("include")]
    if not any((Path(place) / MACROS).exists() for place in include_paths()):
        theirs.append(folder / "macros")
    numbers = [int(number) for number in torch.__version__.partition("+")[0].split(".")[:3]]
    version = numbers[0] * 10**9 + numbers[1] * 10**6 + numbers[2] * 10**3  # as its CMakeLists.txt counts
    places = [*(f"-I{place}" for place in ours), *(flag for place in theirs for flag in ("-isystem", str(place)))]
    return root, [*(f"-D{name}" for name in (*DEFINED, f"PYTORCH_VERSION={version}")), *places]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*(f"common/ops/{name}" for name in COMMON), *(f"torch/{name}" for name in OF_TORCH)])
def test_horovods_cuda_sources_compile(name: str, sources: tuple[Path, list[str]]) -> None:
    root, flags = sources
    compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-pthread", "-w", "-O0", "-c", "-o", os.devnull]
    done = subprocess.run(
        [*compiler, *flags, str(root / "horovod" / name)], capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_horovods_cuda_kernels_compile(sources: tuple[Path, list[str]], tmp_path: Path) -> None:
    root = sources[0]
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    file = root / "horovod" / "common" / "ops" / "cuda" / "cuda_kernels.cu"
    command = ["nvcc", "-std=c++11", "-O3", "-Xcompiler", "-fPIC", f"-I{root}", "-c", str(file)]  # as CMake calls it
    done = subprocess.run([*command, "-o", str(tmp_path / "kernels.o")], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
