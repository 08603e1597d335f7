# SPDX-License-Identifier: Apache-2.0
"""Texts of errors and warnings, read off the sources: of every call of a subclass of AGMergeError, and of ``warn``."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.syntax import dotted, nodes, parsed

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("agmerge", "sparsifiers", "merging")
BASE = "AGMergeError"
WARN = ("warnings.warn", "warn")
UNKNOWN = "\u2026"  # in place of what is known only when it runs


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Return the tree of every module, by its dotted name."""
    files = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return {module_name(path): parsed(path.read_text(encoding="utf-8")) for path in files}


def module_name(path: Path) -> str:
    """Return the name of a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def kinds(trees: dict[str, ast.Module]) -> set[str]:
    """Return the names of AGMergeError and of all classes below it."""
    known, before = {BASE}, 0
    while len(known) > before:
        before = len(known)
        for tree in trees.values():
            for node in nodes(tree):
                if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & known:
                    known.add(node.name)
    return known


def raised(trees: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield the place of each error and warning, and its text."""
    names = kinds(trees)
    for module, tree in trees.items():
        for node in nodes(tree):
            if isinstance(node, ast.Call) and node.args:
                called = dotted(node.func)
                if called in WARN or called.rpartition(".")[2] in names:
                    words = ast.unparse(node.args[0]).replace('"', "'")  # Python 3.12 takes others than 3.11
                    yield f"{module}: {words}", text(node.args[0], module, trees)


def text(node: ast.expr, module: str, trees: dict[str, ast.Module]) -> str:
    """Return what is known of a text without running anything."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part, module, trees) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text(node.value, module, trees)
    if isinstance(node, ast.BinOp):
        return text(node.left, module, trees) + text(node.right, module, trees)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return text(node.func.value, module, trees)
    if isinstance(node, (ast.Name, ast.Attribute)) and not ast.unparse(node).startswith("self."):
        name = ast.unparse(node).rpartition(".")[2]
        owner = ast.unparse(node).rpartition(".")[0]
        return constant(name, module, trees, owner)
    return UNKNOWN


def constant(name: str, module: str, trees: dict[str, ast.Module], owner: str = "") -> str:
    """Return what ``module`` assigns to a name, in functions too, or what a module that it imports does.

    ``owner``: the module before the dot.
    """
    said = []
    for node in nodes(trees[module]):
        if isinstance(node, ast.Assign) and not owner and list(map(dotted, node.targets)) == [name]:
            if name in {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}:
                continue  # made longer
            said.append(text(node.value, module, trees))
        if isinstance(node, ast.ImportFrom) and node.module:
            given = {alias.asname or alias.name: alias.name for alias in node.names}
            if owner in given and f"{node.module}.{given[owner]}" in trees:
                return constant(name, f"{node.module}.{given[owner]}", trees)
            if not owner and name in given and node.module in trees:
                return constant(given[name], node.module, trees)
    return "\n".join(said) or UNKNOWN


def begins_with_code(words: str) -> bool:
    """Return whether a text begins with its code."""
    return re.match(r"AGM\d{3}: ", words) is not None


def examples(trees: dict[str, ast.Module]) -> dict[str, str]:
    """Return one text for each code: the shortest one that is written out, with an ellipsis for names and numbers."""
    found: dict[str, str] = {}
    for tree in trees.values():
        inner = {id(part) for node in nodes(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in inner:
                words = _written(node)
                code = words[:6]
                if begins_with_code(words) and (
                    code not in found or (len(words), words) < (len(found[code]), found[code])
                ):
                    found[code] = words
    return found


def _written(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else UNKNOWN for part in node.values]
        return "".join(map(str, parts)).replace("{{", "{").replace("}}", "}")
    return re.sub(r"{[^{}]*}", UNKNOWN, node.value) if isinstance(node.value, str) else ""
