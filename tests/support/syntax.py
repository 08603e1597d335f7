# SPDX-License-Identifier: Apache-2.0
"""Syntax trees of the sources, for the tests that read rules off them: each is walked once in a process."""

from __future__ import annotations

import ast
import functools


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source."""
    return ast.parse(source)


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return a tree's nodes, in the order of `ast.walk`."""
    return tuple(ast.walk(tree))


def dotted(node: ast.AST) -> str:
    """Return a name with its dots, such as "warnings.warn", a tenth as long as `ast.unparse` takes.

    Of what has a name behind a dot alone it is that name, with the dot; of anything else "".
    """
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
