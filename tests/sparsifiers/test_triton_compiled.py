"""Every kernel, compiled for GPUs that are not here: registers, spills, how wide loads are, where numbers round."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
MOST_REGISTERS = 128  # of a thread, where a program has 256 of them
MOST_SHARED = 16384  # bytes of a program
KERNELS = {
    "add",
    "compensate",
    "count_digits",
    "count_marks",
    "count_ties",
    "decode",
    "edge",
    "encode",
    "gather",
    "mark",
    "read_plain",
    "rows",
    "scan",
    "settle",
    "whole",
}
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed: make test-all installs it",
    ),
    pytest.mark.timeout(600),
]


def compiled(folder: Path, target: int, *options: str) -> list[dict[str, Any]]:
    """What `triton_compiling.py` prints, which runs in a process that has not been told to interpret."""
    root = HERE.parents[1]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "triton_compiling.py"), str(target), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict[str, Any]], target: int) -> None:
    """Print the table, and look at it."""
    print(f"\nsm_{target}  registers  shared  form")
    for row in rows:
        print(f"{row['kernel']:>12} {row['registers']:4} {row['shared']:6}  {row['form']}")
    assert {row["kernel"] for row in rows} == KERNELS
    assert [row for row in rows if row["spilled"] or row["stack"]] == []
    assert [row for row in rows if row["registers"] > MOST_REGISTERS or row["shared"] > MOST_SHARED] == []
    # A product and a sum round twice, and subnormal numbers stay: the bits of the host.
    assert [row for row in rows if row["fused"] or row["flushing"]] == []


@pytest.mark.slow
def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    check(compiled(tmp_path, 90, "once"), 90)


@pytest.mark.long
@pytest.mark.parametrize("target", [80, 90, 100])
def test_every_form_compiles_without_spills(tmp_path: Path, target: int) -> None:
    rows = compiled(tmp_path, target)
    check(rows, target)
    for row in rows:
        if row["kernel"] in ("compensate", "count_digits", "mark") and row["form"] != "one":
            # Of what a program takes whole; of a tensor's end each element is loaded by itself.
            assert bool(row["wide"]) is ("unaligned" not in row["form"]), row
        if row["kernel"] == "gather":  # to the nearest, which the interpreter does not do
            assert bool(row["to_bf16"]) is row["form"].startswith("bfloat16"), row
