# SPDX-License-Identifier: Apache-2.0
"""What the package promises by name, and what it may import."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import merging

HERE = Path(merging.__file__).parent


def test_public_names_and_signatures() -> None:
    promised = {"Profile", "Costs", "Plan", "Timeline", "Planner", "names", "get", "register", "predict"}
    assert promised | {"Curve", "Measurements", "best"} <= set(merging.__all__)
    assert all(hasattr(merging, name) for name in merging.__all__)

    def arguments(function: object) -> str:
        signature = inspect.signature(function)  # type: ignore[arg-type]
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        return str(signature.replace(parameters=bare, return_annotation=signature.empty))

    keywords = "forward=None, work=None, load=None, noise=None"
    assert arguments(merging.Profile) == f"(names, numel, backward, *, {keywords})"
    assert arguments(merging.Costs) == "(sparsify, exchange, dense=None, *, message=None)"
    assert arguments(merging.predict) == "(plan, profile, costs, mode)"
    assert arguments(merging.Planner.plan) == "(self, profile, costs, mode='dense')"
    assert arguments(merging.Curve) == "(elements, seconds)"
    assert arguments(merging.Curve.fit) == "(samples, *, zero=False)"
    assert arguments(merging.best) == "(planner, measurements)"
    assert arguments(merging.get) == "(name, /, **options)"
    assert arguments(merging.register) == "(name, planner)"
    assert merging.Span._fields == ("ready", "start", "end")


def test_imports_the_standard_library_and_numpy_only() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "merging"}
    files = sorted(HERE.glob("**/*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, file
                roots = {(node.module or "").partition(".")[0]}
            else:
                continue
            assert roots <= allowed, f"{file.name} imports {roots - allowed}"


def test_import_pulls_in_no_torch() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); import merging;"
        "print(*sorted({'torch', 'agmerge', 'sparsifiers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
