# SPDX-License-Identifier: Apache-2.0
"""Which tests are quick by what they are: those that make no optimizer of workers and start no process.

It is read off the sources: what a test names, and what is named there in turn, in its own file and in the helpers.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
OPTIMIZERS = frozenset({"DistributedOptimizer"})
PROCESSES = frozenset({"subprocess", "multiprocessing", "Popen", "fork"})


@dataclass
class Names:
    """What a file says of the names that it has at its top level."""

    defined: dict[str, set[str]] = field(default_factory=dict)  # the names in each definition
    imported: dict[str, tuple[Path, str]] = field(default_factory=dict)  # from which helper, under which name


@functools.cache
def kind_of(path: Path, test: str) -> str | None:
    """``"training"``, ``"unit"``, or None for what starts processes and trains nothing itself.

    ``test``: the name of a function or class of the file at ``path``.
    """
    names = _reachable(path, test)
    if names & OPTIMIZERS:
        return "training"
    return None if names & PROCESSES else "unit"


def _reachable(path: Path, start: str) -> set[str]:
    """All names that ``start`` names, and those that are named where these are defined, and so on."""
    seen: set[tuple[Path, str]] = set()
    new = [(path, start)]
    while new:
        place = file, name = new.pop()
        if place not in seen:
            seen.add(place)
            known = _names_of(file)
            new += [(file, other) for other in known.defined.get(name, ())]
            new += [known.imported[name]] if name in known.imported else []
    return {name for _, name in seen}


@functools.cache
def _names_of(path: Path) -> Names:
    names = Names()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        module = node.module.removeprefix("tests.") if isinstance(node, ast.ImportFrom) and node.module else ""
        if isinstance(node, ast.ImportFrom) and module in _helpers():
            for alias in node.names:
                names.imported[alias.asname or alias.name] = (_helpers()[module], alias.name)
        for target in _targets(node):
            names.defined.setdefault(target, set()).update(_mentioned(node))
    return names


@functools.cache
def _helpers() -> dict[str, Path]:
    """Files that are no tests, by the name of the module."""
    files = {path.stem: path for path in TESTS.rglob("*.py") if not path.name.startswith("test_")}
    shared = {f"support.{path.stem}": path for path in (TESTS / "support").glob("*.py")}
    return {**files, **shared, "support": TESTS / "support" / "__init__.py"}


def _targets(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _mentioned(tree: ast.AST) -> set[str]:
    """The names, and the arguments, which may be fixtures; of attributes only those that are looked for."""
    mentioned = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            mentioned.add(node.id)
        elif isinstance(node, ast.arg):
            mentioned.add(node.arg)
        elif isinstance(node, ast.Attribute) and node.attr in OPTIMIZERS | PROCESSES:
            mentioned.add(node.attr)
    return mentioned
