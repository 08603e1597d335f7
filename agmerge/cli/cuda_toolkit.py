# SPDX-License-Identifier: Apache-2.0
"""Find CUDA's compiler for a build of Horovod with NCCL, and name what such a build lacks here.

torch takes the folder above the first ``nvcc`` on PATH for CUDA's. Where that is a script, such as
``/usr/local/bin/nvcc``, the headers lie elsewhere, and a build would go on without CUDA.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from agmerge.cli import nccl

USUAL = Path("/usr/local/cuda")  # where NVIDIA's own installer puts the newest one
HEADERS = ("include/cuda_runtime.h", "targets/*/include/cuda_runtime.h")
HOMES = ("CUDA_HOME", "CUDA_PATH")  # variables by which the user names the folder


def home(given: Mapping[str, str]) -> Path | None:
    """Return the folder of CUDA's toolkit, with nvcc and the headers of its runtime; None where there is none.

    ``given``: the user's variables. Where they name a folder, no other one is taken.
    """
    return next((folder for folder in _candidates(given) if is_whole(folder)), None)


def is_whole(folder: Path) -> bool:
    """Return whether ``folder`` has what compiles for GPUs: nvcc, and the headers of CUDA's runtime."""
    return (folder / "bin" / "nvcc").is_file() and any(any(folder.glob(header)) for header in HEADERS)


def settings(toolkit: Path | None, path: str) -> dict[str, str]:
    """Return the variables by which torch and CMake find ``toolkit``; None: they look for one by themselves.

    ``path``: folders of programs. CMake goes by the nvcc that it finds there, even where it was told another.
    """
    if toolkit is None:
        return {}
    compiler = toolkit / "bin" / "nvcc"
    return {
        "CUDA_HOME": str(toolkit),
        "CUDAToolkit_ROOT": str(toolkit),
        "CUDACXX": str(compiler),
        "PATH": os.pathsep.join([str(compiler.parent), path]),
    }


def _candidates(given: Mapping[str, str]) -> Iterator[Path]:
    """Yield the folders in which CUDA's toolkit may be, the likeliest first."""
    named = next((given[name] for name in HOMES if given.get(name)), None)
    if named is not None:
        yield Path(named)
        return
    compiler = shutil.which("nvcc", path=given.get("PATH", os.defpath))
    if compiler is not None:
        yield Path(compiler).parent.parent
        yield Path(compiler).resolve().parent.parent
    yield USUAL


def lacking(given: Mapping[str, str], cuda: str | None, toolkit: Path | None, there: nccl.Nccl | None) -> list[str]:
    """Return what a build of Horovod with NCCL lacks, a line each with where to get it; empty: nothing.

    Args:

        given: the user's variables.
        cuda: the version of CUDA that torch was built for; None: it was built for the CPU.
        toolkit: what :func:`home` has found.
        there: the NCCL of this environment's wheels, or None.
    """
    found = []
    if cuda is None:
        found.append(
            "This torch is built for CPUs. Install torch for CUDA. On Linux, use `pip install --force-reinstall torch` "
            "from PyPI: a version that ends with +cpu is from another index."
        )
    version = cuda or "13.0"
    if toolkit is None:
        place = next((f"{name}={given[name]}" for name in HOMES if given.get(name)), f"PATH or {USUAL}")
        packages = f"cuda-nvcc-{version.replace('.', '-')} and cuda-cudart-dev-{version.replace('.', '-')}"
        found.append(
            f"Found no nvcc with the CUDA headers in {place}. Install CUDA {version} (NVIDIA's packages {packages} are "
            "enough), and set CUDA_HOME to its folder."
        )
    if there is None and not set(nccl.PLACES) & set(given):
        package = f"nvidia-nccl-cu{version.partition('.')[0]}"
        found.append(
            f"Found no NCCL with its header. Run `pip install {package}`, or set HOROVOD_NCCL_HOME to its folder."
        )
    if not nccl.chosen(given, there or nccl.ELSEWHERE):
        other = next(name for name in sorted(given) if name.startswith("HOROVOD_GPU"))
        found.append(f"{other}={given[other]!r} is set, which is not NCCL. Unset it, or remove --nccl.")
    return found
