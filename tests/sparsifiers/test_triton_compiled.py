# SPDX-License-Identifier: Apache-2.0
"""Every kernel, compiled for GPUs that are not here: registers, spills, ballots, fences, how numbers round."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from typing import Any

import compiled_kernels
import pytest

MOST_SHARED = 16384  # bytes of a program
KERNELS = {
    "add",
    "compensate",
    "count_digits",
    "count_marks",
    "count_ties",
    "decode",
    "eden_decode",
    "eden_encode",
    "eden_encode_sum",
    "edge",
    "encode",
    "gather",
    "heads",
    "mark",
    "read_plain",
    "rows",
    "scan",
    "settle",
    "whole",
}
pytestmark = pytest.mark.timeout(600)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: make test-all installs it"
)


def check(rows: list[dict[str, Any]], arch: str) -> None:
    """Print the table, and look at it."""
    print(f"\n{arch}  registers  shared  popc  form")
    for row in rows:
        print(f"{row['kernel']:>12} {row['registers']:4} {row['shared']:6} {row['popc']:4}  {row['form']}")
    assert {row["kernel"] for row in rows} == KERNELS
    assert [(row, over) for row in rows if (over := compiled_kernels.excesses(row))] == []
    assert [row for row in rows if row["shared"] > MOST_SHARED] == []
    # A product and a sum round twice, and subnormal numbers stay: the bits of the host.
    assert [row for row in rows if row["fused"] or row["flushing"]] == []


@needs_triton
@pytest.mark.slow
def test_kernels_compile_without_spills() -> None:
    check(compiled_kernels.compiled("sm_90", "once"), "sm_90")


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("arch", compiled_kernels.ARCHITECTURES)
def test_every_form_compiles_without_spills(arch: str) -> None:
    rows = compiled_kernels.compiled(arch)
    check(rows, arch)
    for row in rows:
        if row["kernel"] in ("compensate", "count_digits", "mark") and row["form"] != "one":
            # Of what a program takes whole; of a tensor's end each element is loaded by itself.
            assert bool(row["wide"]) is ("unaligned" not in row["form"]), row
        if row["kernel"] == "gather":  # to the nearest, which the interpreter does not do
            assert bool(row["to_bf16"]) is row["form"].startswith("bfloat16"), row


@pytest.mark.long
def test_both_tritons_keep_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        folders = [compiled_kernels.folder_of(one) for one in (compiled_kernels.pinned(), compiled_kernels.NEWEST)]
    except subprocess.CalledProcessError:
        pytest.skip("pip has no way to both versions of Triton")
    assert compiled_kernels.main(["--arch", "sm_90", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["kernel"] for row in rows} == KERNELS and len(rows) == len(folders) * len(KERNELS)
    assert all(tuple(row) == compiled_kernels.FIELDS for row in rows)


def test_a_kernel_that_exceeds_a_limit_is_named() -> None:
    row = dict.fromkeys(compiled_kernels.LIMITS, 0)
    assert compiled_kernels.excesses(row) == []
    assert compiled_kernels.excesses({**row, "popc": 67, "spills": 20}) == ["spills", "popc"]
    one_bit = {**row, "kernel": "eden_encode_sum", "form": "float32, 1 bits, blocks of 256", "spills": 24}
    assert compiled_kernels.excesses(one_bit) == []
    assert compiled_kernels.excesses({**one_bit, "kernel": "eden_decode"}) == ["spills"]
    assert compiled_kernels.excesses({**one_bit, "spills": 25}) == ["spills"]


def test_what_is_compiled_is_what_the_pinned_torch_brings() -> None:
    """Of its CUDA build's metadata: `Requires-Dist: triton==3.7.1`."""
    requirements = (compiled_kernels.ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert ("torch==2.13.0" in requirements) and compiled_kernels.pinned() == "3.7.1"
