# SPDX-License-Identifier: Apache-2.0
"""docs/api.md has every public name, and the arguments that a public docstring describes are those of the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference_pages import described

import agmerge
import merging
import sparsifiers
from agmerge import testing
from agmerge.checkpoint import elastic
from agmerge.integrations import ddp

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
OLD = {name for name in sparsifiers.__all__ if "quantis" in name.lower()}  # spelling
NOT_THERE = {"__version__", "elastic", "merging", "sparsifiers", "testing"}
PUBLIC: list[tuple[str, Any]] = [
    (f"{package.__name__}.{name}", getattr(package, name))
    for package in (agmerge, sparsifiers, merging)
    for name in package.__all__
    if name not in OLD | NOT_THERE
]
OTHERS = "other arguments are those of"  # in a docstring, instead of the rest


def members() -> Iterator[str]:
    """Yield what a wrapped optimizer has that a plain one has not."""
    for kind in agmerge.DistributedOptimizer.__mro__:
        if kind.__module__.startswith("agmerge."):
            yield from (name for name in vars(kind) if not name.startswith("_") and not name.startswith("register_"))


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield public functions, classes and methods with a section ``Args:``, by name."""
    more = [("ddp.compress", ddp.compress), ("elastic.State", elastic.State), ("elastic.Sampler", elastic.Sampler)]
    more += [(f"testing.{name}", getattr(testing, name)) for name in testing.__all__]
    for name, given in [*PUBLIC, *more]:
        methods = vars(given).items() if inspect.isclass(given) else ()
        pairs = [(name, given), *((f"{name}.{key}", value) for key, value in methods if not key.startswith("_"))]
        mixed = [] if given is not agmerge.DistributedOptimizer else list(dict.fromkeys(members()))
        pairs += [(f"{name}.{key}", getattr(given, key)) for key in mixed]
        for each, function in pairs:
            plain = getattr(function, "__func__", function)
            if callable(plain) and described(plain):
                yield each, plain


@pytest.mark.parametrize("name", [name for name, _ in PUBLIC])
def test_a_public_name_is_in_the_api(name: str) -> None:
    short = name.rpartition(".")[2]
    assert f" {name}\n" in PAGE or f"`{name}`" in PAGE or f"`{short}`" in PAGE or f" {name}(" in PAGE


def test_every_method_of_the_optimizer_is_in_the_api() -> None:
    plain = {"param_groups", "state", "defaults"}
    missing = {name for name in members() if f"agmerge.DistributedOptimizer.{name}\n" not in PAGE} - plain
    assert missing == set()


@pytest.mark.parametrize(("name", "function"), [pytest.param(*pair, id=pair[0]) for pair in functions()])
def test_described_arguments_are_those_of_the_signature(name: str, function: Callable[..., Any]) -> None:
    told = set(described(function))
    there = [one for one in inspect.signature(function).parameters.values() if one.name not in ("self", "cls")]
    named = {one.name for one in there if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    assert told <= named, "these are no arguments of it"
    assert OTHERS in (inspect.getdoc(function) or "") or named <= told, "these are not described"


def test_most_public_functions_describe_their_arguments() -> None:
    assert len(list(functions())) > 70


def test_an_optimizer_has_no_more_arguments_than_described() -> None:
    assert torch.optim.Optimizer in agmerge.DistributedOptimizer.__mro__
    assert len(described()) == len(inspect.signature(agmerge.DistributedOptimizer).parameters) - 1  # **unknown
