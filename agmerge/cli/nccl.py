# SPDX-License-Identifier: Apache-2.0
"""Find NCCL for a build of Horovod where pip has put it: beside torch, in the wheel ``nvidia-nccl-cu12`` or ``-cu13``.

Every build of torch for CUDA on Linux brings that wheel: its header, and a library that has no name a linker looks for.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = "HOROVOD_GPU_OPERATIONS"
PLACES = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")  # where Horovod's build looks for NCCL


@dataclass(frozen=True)
class Nccl:
    """NCCL in a folder of this environment."""

    include: Path  # the folder of nccl.h
    library: Path  # libnccl.so.2
    version: str  # of the header, such as "2.27.3"


ELSEWHERE = Nccl(Path(), Path(), "")  # one that Horovod's build looks for by itself


def installed() -> Nccl | None:
    """Return the NCCL of this environment's wheels; None where there is none, or no whole one."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # there is no `nvidia` at all
        return None
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        nccl = lying_in(Path(place))
        if nccl is not None:
            return nccl
    return None


def lying_in(folder: Path) -> Nccl | None:
    """Return the NCCL of ``folder``, laid out as the wheel's ``nvidia/nccl`` is; None where a part is missing."""
    header, library = folder / "include" / "nccl.h", folder / "lib" / "libnccl.so.2"
    if not header.is_file() or not library.is_file():
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = [re.search(rf"^#define NCCL_{part}\s+(\d+)", text, re.M) for part in ("MAJOR", "MINOR", "PATCH")]
    return Nccl(header.parent, library, ".".join(number[1] for number in numbers if number))


def chosen(given: Mapping[str, str], nccl: Nccl | None) -> bool:
    """Return whether Horovod is to be built with NCCL. ``given``: the user's variables, which decide.

    ``nccl``: the one that is here; None: there is none, or nothing here compiles for GPUs. A choice for single
    collectives (``HOROVOD_GPU_ALLREDUCE``, say) decides, too.
    """
    if OPERATIONS in given:
        return given[OPERATIONS] == "NCCL"
    return nccl is not None and not any(name.startswith("HOROVOD_GPU") for name in given)


def settings(given: Mapping[str, str], nccl: Nccl | None, folder: Path) -> dict[str, str]:
    """Return the variables of a build with NCCL: the user's places where they are given, else those of ``nccl``.

    ``folder``: exists; a link to the library by the name that linkers look for is put there.
    """
    wanted = {OPERATIONS: "NCCL"}
    if nccl is None or set(PLACES) & set(given):
        return wanted
    (folder / "libnccl.so").symlink_to(nccl.library)
    places = {"HOROVOD_NCCL_INCLUDE": str(nccl.include), "HOROVOD_NCCL_LIB": str(folder)}
    return {**wanted, **places, "HOROVOD_NCCL_LINK": "SHARED"}
