# SPDX-License-Identifier: Apache-2.0
"""The compiled loops give the same bits on arm64 as here, and touch no memory but their own.

`kernel_results.c` runs them on hard inputs and prints hashes. For arm64 it is cross-compiled and run by an emulator,
whose times would say nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("kernel_results.c")
SOURCES = [path for path in sorted((ROOT / "sparsifiers" / "csrc").glob("*.c")) if path.stem != "kernel_module"]
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
TIMEOUT = 300  # seconds

Results = dict[str, list[str]]

pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * TIMEOUT)]


def needed(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")


def flags() -> list[str]:
    """With those the package is built with."""
    found = re.search(r'^FLAGS = "([^"]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1].split()


def results(folder: Path, compiler: Sequence[str], runner: Sequence[str] = ()) -> Results:
    """By the number of the level: for each loop, kind of input and length a hash of what was written."""
    program = folder / "results"
    built = subprocess.run(
        [*compiler, "-Wall", "-Wextra", "-o", str(program), str(DRIVER), *map(str, SOURCES), "-lm"],
        capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert built.returncode == 0 and not built.stderr, built.stderr
    ran = subprocess.run([*runner, str(program)], capture_output=True, text=True, timeout=TIMEOUT)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    found: Results = {}
    for line in ran.stdout.splitlines():
        level, said = line.split(maxsplit=1)
        found.setdefault(level, []).append(said)
    return found


def test_every_level_gives_the_same_bits_on_arm64_as_here(tmp_path: Path) -> None:
    needed("gcc", CROSS, EMULATOR)
    here = results(tmp_path, ["gcc", *flags()])
    arm = results(tmp_path, [CROSS, "-static", *flags()], [EMULATOR])
    reference = here["0"]
    assert list(arm) == ["0", "1"] and len(set(reference)) > 5000
    for level in (*here.values(), *arm.values()):
        assert [pair for pair in zip(level, reference, strict=True) if pair[0] != pair[1]][:3] == []


def test_clang_makes_loops_of_the_same_bits(tmp_path: Path) -> None:
    needed("gcc", "clang")
    here, others = (results(tmp_path, [compiler, *flags()]) for compiler in ("gcc", "clang"))
    assert here == others


def test_the_loops_touch_no_memory_but_their_own(tmp_path: Path) -> None:
    needed("gcc")
    checks = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n", encoding="utf-8")
    trial = ["gcc", *checks, "-o", str(tmp_path / "empty"), str(empty)]
    if subprocess.run(trial, capture_output=True, timeout=TIMEOUT).returncode:
        pytest.skip("this gcc has no address sanitizer")
    found = results(tmp_path, ["gcc", *flags(), *checks])
    assert found and all(level == found["0"] for level in found.values())
