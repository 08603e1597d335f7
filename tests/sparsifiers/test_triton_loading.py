# SPDX-License-Identifier: Apache-2.0
"""Triton is imported when a kernel runs, by modules that hold kernels alone; without it torch's operations run."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_only_kernels_import_triton() -> None:
    importing = set()
    for path in (ROOT / "sparsifiers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.partition(".")[0] == "triton" for name in names):
                importing.add(path.parent.name)
    assert importing == {"kernels"}


def test_nothing_imports_triton_for_a_tensor_of_the_host() -> None:
    code = (
        "import sys, torch\nfrom sparsifiers import gpu\n"
        "slots, work = gpu.Slots.of(3, torch.device('cpu')), torch.arange(9.0)\n"
        "gpu.select_largest(work, 3, gpu.Scratch(9, work.device), slots, exact=True, commit=True)\n"
        "assert slots.indices.tolist() == [6, 7, 8]\n"
        "sys.exit('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
