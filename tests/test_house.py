# SPDX-License-Identifier: Apache-2.0
"""The house rules, read off the sources; and proof that each rule can be broken."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.syntax import dotted, nodes, parsed

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agmerge", "sparsifiers", "merging")
STDLIB = sys.stdlib_module_names
KNOWS = {  # besides the standard library and itself
    "agmerge": {"sparsifiers", "merging", "torch", "numpy"},
    "sparsifiers": {"torch", "numpy", "triton"},  # triton in sparsifiers.gpu.kernels alone
    "merging": {"numpy"},
}
GROUND = ("errors", "ops", "siblings", "version")  # files of agmerge/ that every room may import
ROOMS = {  # of agmerge/, from below to above: which of the rooms below it each may import
    "tensors": "",
    "metrics": "",
    "backends": "",
    "exchanges": "backends tensors",
    "runtime": "backends tensors metrics",
    "step": "backends tensors exchanges metrics",
    "options": "backends tensors runtime exchanges step",
    "planning": "backends tensors exchanges metrics step",
    "script": "backends tensors runtime exchanges step",
    "updates": "backends tensors exchanges step script",
    "engine": "backends tensors runtime exchanges metrics options step planning script updates",
    "checkpoint": "backends tensors runtime exchanges step updates engine",
    "testing": "backends runtime",
    "optimizer": "tensors runtime options updates engine checkpoint",
    "integrations": "tensors runtime step options script engine checkpoint optimizer",
    "agmerge": "runtime options checkpoint testing optimizer integrations",
    "horovod_door": "backends runtime checkpoint agmerge",
    "cli": "backends options step agmerge metrics runtime testing",
    "__main__": "cli horovod_door",
}
MOST_BOXES, MOST_LEVELS, MOST_ARROWS, MOST_SMALL = 23, 13, 109, 12  # of agmerge/; small: files below 40 lines
MOST_MODULES = {"engine": 12, "step": 12}  # of a room, which a stranger can still survey; folders below it count
COMMUNICATION = ("horovod", "torch.distributed", "mpi4py")
BACKENDS = "agmerge.backends."
INTEGRATIONS = "agmerge.integrations."
FRAMEWORKS = {  # by what a file of integrations/ begins with, which frameworks it may import
    "transformers": {"transformers"},
    "accelerate": {"accelerate"},
    "lightning": {"lightning", "pytorch_lightning"},
}
LONGEST = 600  # lines of a file


@dataclass(frozen=True)
class Import:
    """``target`` is a dotted name: of a module, or of something in one."""

    target: str
    line: int
    in_function: bool


@functools.cache
def imports(name: str, source: str, is_package: bool) -> tuple[Import, ...]:
    """Everything that module ``name`` imports, wherever the statement stands."""

    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*up, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
            known = node.args and isinstance(node.args[0], ast.Constant)
            yield Import(ast.literal_eval(node.args[0]) if known else "anything", node.lineno, inside)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed" and dotted(node) == "torch.distributed":
            yield Import("torch.distributed", node.lineno, inside)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return tuple(walk(parsed(source), False))


def within(target: str, module: str) -> bool:
    return target == module or target.startswith(module + ".")


def module_of(target: str, modules: Mapping[str, str]) -> str | None:
    """The module among ``modules`` that an import loads; None if it is another library's."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def problems(modules: Mapping[str, str], packages: frozenset[str] = frozenset(PACKAGES)) -> list[str]:
    """Every rule that is broken. ``modules``: source by dotted name; ``packages``: those that are packages."""
    found, edges = [], {}
    for name, source in modules.items():
        top, here = name.partition(".")[0], imports(name, source, name in packages)
        for one in here:
            where, root = f"{name}:{one.line}", one.target.partition(".")[0]
            if name.startswith(INTEGRATIONS) and root in FRAMEWORKS.get(
                name.removeprefix(INTEGRATIONS).partition("_")[0], ()
            ):
                continue
            if any(within(one.target, library) for library in COMMUNICATION):
                if name.startswith(INTEGRATIONS) and within(one.target, "torch.distributed"):
                    continue  # nothing imports these files but a script that has a framework
                if not name.startswith(BACKENDS):
                    found.append(f"{where} imports {one.target}, which only a backend may")
                elif not one.in_function:
                    found.append(f"{where} imports {one.target} before a backend is opened")
            elif root not in STDLIB and root not in KNOWS[top] | {top}:
                found.append(f"{where} imports {one.target}, which {top} may not know")
        edges[name] = {module_of(one.target, modules) for one in here} - {None}
        found += [f"{name}:{line} {what}" for line, what in style(source)]
    found += misplaced(modules, packages)
    circle = find_circle(edges)
    return found + ([f"import circle: {' -> '.join(circle)}"] if circle else [])


def room_of(module: str) -> str:
    """The room of a module of agmerge: a package or a file beside the packages; "agmerge" is what scripts import."""
    return ([*module.split("."), "agmerge"])[1]


def arrows(modules: Mapping[str, str], packages: frozenset[str] = frozenset(PACKAGES)) -> dict[tuple[str, str], str]:
    """Which room of agmerge imports which, with one place for each."""
    found: dict[tuple[str, str], str] = {}
    for name, source in modules.items():
        if within(name, "agmerge"):
            for one in imports(name, source, name in packages):
                target = module_of(one.target, modules)
                if target is not None and within(target, "agmerge") and room_of(target) != room_of(name):
                    found.setdefault((room_of(name), room_of(target)), f"{name}:{one.line}")
    return found


def misplaced(modules: Mapping[str, str], packages: frozenset[str] = frozenset(PACKAGES)) -> list[str]:
    """Imports between rooms that the table does not know."""
    found = [
        f"{name} is in no room"
        for name in modules
        if within(name, "agmerge") and room_of(name) not in (*GROUND, *ROOMS)
    ]
    for (above, below), where in arrows(modules, packages).items():
        if below not in (*GROUND, *ROOMS.get(above, "").split()):
            found.append(f"{where}: {above} may not import {below}")
    return found


def levels(modules: Mapping[str, str], packages: frozenset[str] = frozenset(PACKAGES)) -> int:
    """How many rooms of agmerge stand on each other at most."""
    below: dict[str, set[str]] = {}
    for above, under in arrows(modules, packages):
        below.setdefault(above, set()).add(under)

    def height(room: str) -> int:
        return 1 + max(map(height, below.get(room, ())), default=0)

    return max(map(height, below), default=1)


def find_circle(edges: Mapping[str, set[str | None]]) -> list[str]:
    """A path that ends where it began; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for target in sorted(filter(None, edges.get(name, ()))):
                circle = visit(target, [*path, name])
                if circle:
                    return circle
            done.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in sorted(edges))), [])


def style(source: str) -> Iterator[tuple[int, str]]:
    """Prints, missing annotations and length, with their lines."""
    tree = parsed(source)
    length = len(source.splitlines())
    if length > LONGEST:
        yield length, f"has {length} lines"
    methods = {
        child: not any(ast.unparse(one) == "staticmethod" for one in child.decorator_list)
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        for child in node.body
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    for node in nodes(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("print", "pprint", "pprint.pprint"):
            yield node.lineno, "prints"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = [*node.args.posonlyargs, *node.args.args]
            if methods.get(node):
                given = given[1:]  # self or cls
            given += [*node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))]
            for argument in given:
                if argument.annotation is None:
                    yield node.lineno, f"does not annotate argument {argument.arg!r} of {node.name}()"
            if node.returns is None:
                yield node.lineno, f"does not annotate what {node.name}() returns"


def read() -> tuple[dict[str, str], frozenset[str]]:
    """All modules of the three packages, and which of them are packages."""
    modules, packages = {}, set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = path.read_text(encoding="utf-8")
            if parts[-1] == "__init__":
                packages.add(name)
    return modules, frozenset(packages)


# -- the rules hold -----------------------------------------------------------------------------------------


def test_the_house_is_in_order() -> None:
    modules, packages = read()
    assert {
        "agmerge",
        "agmerge.backends.torch",
        "agmerge.exchanges.message.format",
        "sparsifiers.largest",
        "merging.plan",
    } <= set(modules)
    assert problems(modules, packages) == []


def test_rooms_are_few_and_stand_on_each_other() -> None:
    modules, packages = read()
    rooms = {room_of(name) for name in modules if within(name, "agmerge")}
    assert len(rooms) <= MOST_BOXES, f"put the new room into one of {', '.join(sorted(rooms))}"
    assert levels(modules, packages) <= MOST_LEVELS
    ways = [f"{one} -> {other}" for one, other in sorted(arrows(modules, packages))]
    assert len(ways) <= MOST_ARROWS, f"import from a room that yours imports already; there are {', '.join(ways)}"


def test_the_table_of_rooms_has_no_way_up_and_no_dead_door() -> None:
    """A room stands in the table below those that may import it, and what may be imported somewhere is."""
    order = list(ROOMS)
    for room, below in ROOMS.items():
        assert all(order.index(one) < order.index(room) for one in below.split()), room
    modules, packages = read()
    used = set(arrows(modules, packages))
    idle = {(room, one) for room, below in ROOMS.items() for one in below.split()} - used
    assert idle == set()


@pytest.mark.parametrize("room", MOST_MODULES)
def test_a_core_room_has_few_modules(room: str) -> None:
    modules = sorted(path.stem for path in (ROOT / "agmerge" / room).rglob("*.py") if path.name != "__init__.py")
    assert 0 < len(modules) <= MOST_MODULES[room], f"put the idea of one into a room below: {', '.join(modules)}"


def test_few_files_are_smaller_than_an_idea() -> None:
    small = [
        path
        for path in (ROOT / "agmerge").rglob("*.py")
        if path.name != "__init__.py" and len(path.read_text(encoding="utf-8").splitlines()) < 40
    ]
    assert len(small) <= MOST_SMALL, f"put the idea of one of these into a file beside it: {[*map(str, small)]}"


def test_no_python_file_is_too_long() -> None:
    folders = [*PACKAGES, "examples", "benchmarks", "tests"]
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(lengths) > 50
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_importing_the_library_imports_no_launcher_and_nothing_of_the_examples() -> None:
    code = (
        "import agmerge, sparsifiers, merging, sys\n"
        "unwanted = {'horovod', 'mpi4py', 'tensorboardX', 'sklearn', 'pytest', 'agmerge.integrations'}\n"
        "unwanted |= {'transformers', 'accelerate', 'lightning', 'pytorch_lightning', 'datasets', 'ray'}\n"
        "sys.exit(', '.join(sorted(unwanted & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("package, foreign", [("sparsifiers", ("agmerge", "merging")), ("merging", ("torch",))])
def test_a_lower_package_loads_nothing_above_it(package: str, foreign: tuple[str, ...]) -> None:
    code = f"import {package}, sys; sys.exit([m for m in {foreign!r} if m in sys.modules] or 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- and each of them can be broken -------------------------------------------------------------------------

PACKAGES_OF_EXAMPLES = frozenset({*PACKAGES, "agmerge.backends", "agmerge.engine"})
GOOD = {
    "agmerge": "from agmerge.optimizer import run\n__version__ = '1'",
    "agmerge.optimizer": "from agmerge.engine.reducer import run",
    "agmerge.engine.reducer": "import torch\nimport sparsifiers\nfrom agmerge.backends import torch as gloo",
    "agmerge.engine": "from agmerge.engine.reducer import run",
    "agmerge.backends": "",
    "agmerge.backends.torch": "def open(env: object) -> None:\n    import torch.distributed as dist",
    "sparsifiers": "from sparsifiers.largest import TopK",
    "sparsifiers.largest": "import numpy as np\nfrom torch import Tensor",
    "merging": "import json\nfrom collections.abc import Sequence\nimport numpy.linalg",
}
BAD: dict[str, tuple[str, str, str]] = {
    "up": ("merging", "import agmerge", "merging may not know"),
    "sideways": ("sparsifiers", "from merging import Plan", "sparsifiers may not know"),
    "up in a function": ("merging", "def f() -> None:\n    import agmerge", "merging may not know"),
    "torch in merging": ("merging", "import torch", "merging may not know"),
    "an application": ("agmerge.engine.reducer", "from examples import train", "agmerge may not know"),
    "a library": ("agmerge.engine.reducer", "import tensorboardX", "agmerge may not know"),
    "by name": ("sparsifiers", "import importlib\nimportlib.import_module('merging')", "sparsifiers may not know"),
    "by any name": ("merging", "def f(n: str) -> None:\n    __import__(n)", "merging may not know"),
    "horovod": ("agmerge.engine.reducer", "def f() -> None:\n    import horovod.torch", "only a backend may"),
    "distributed": ("agmerge.engine.reducer", "from torch import distributed", "only a backend may"),
    "attribute": ("agmerge.engine.reducer", "import torch\nx = torch.distributed.is_initialized", "only a backend may"),
    "below distributed": ("sparsifiers.largest", "from torch.distributed.nn import x", "only a backend may"),
    "too early": ("agmerge.backends.torch", "import torch.distributed as dist", "before a backend is opened"),
    "in a class": ("agmerge.backends.mpi", "class A:\n    from mpi4py import MPI", "before a backend is opened"),
    "self": (
        "agmerge.engine.reducer",
        "from agmerge.engine import reducer",
        "circle: agmerge.engine.reducer -> agmerge.engine.reducer",
    ),
    "circle": (
        "sparsifiers.largest",
        "from sparsifiers import names",
        "circle: sparsifiers -> sparsifiers.largest -> sparsifiers",
    ),
    "late circle": (
        "agmerge.engine.reducer",
        "def f() -> object:\n    from agmerge.engine import run\n    return run",
        "circle: agmerge.engine.reducer -> agmerge.engine -> agmerge.engine.reducer",
    ),
    "relative circle": (
        "agmerge.engine.reducer",
        "from . import run",
        "circle: agmerge.engine.reducer -> agmerge.engine -> ",
    ),
    "up the house": ("agmerge.backends", "from agmerge.engine import run", "backends may not import engine"),
    "past a room": ("agmerge.engine", "from agmerge import optimizer", "engine may not import optimizer"),
    "no room": ("agmerge.attic.boxes", "", "agmerge.attic.boxes is in no room"),
    "into the frameworks": ("agmerge.engine", "from agmerge.integrations import ddp", "engine may not import"),
    "another launcher": ("agmerge.integrations.ddp", "import horovod.torch", "only a backend may"),
    "another framework": ("agmerge.integrations.ddp", "import transformers", "agmerge may not know"),
    "print": ("merging", "def f() -> None:\n    print('x')", "merging:2 prints"),
    "argument": ("merging", "def f(a: int, b) -> None: ...", "argument 'b' of f()"),
    "keyword": ("merging", "class A:\n    def f(self, *, b) -> None: ...", "argument 'b' of f()"),
    "rest": ("merging", "async def f(*args, **more: int) -> None: ...", "argument 'args' of f()"),
    "static": ("merging", "class A:\n    @staticmethod\n    def f(a) -> None: ...", "argument 'a' of f()"),
    "inner": ("merging", "def f() -> None:\n    def g(self) -> None: ...", "argument 'self' of g()"),
    "return": ("merging", "def f(): ...", "what f() returns"),
    "length": ("merging", "\n" * (LONGEST + 1), f"has {LONGEST + 1} lines"),
}


def test_good_sources_pass() -> None:
    fine = {
        "merging.a": "class A:\n    def f(self, b: int) -> int: ...\n    @classmethod\n    def g(cls) -> None: ...",
        "agmerge.checkpoint": "from __future__ import annotations\nfrom .engine import run\nimport sparsifiers",
        "agmerge.errors": "def f() -> None:\n    import numpy\nprinted = sorted([], key=lambda a: a)",
        "merging.d": "\n" * LONGEST,
        "agmerge.integrations.ddp": "import torch.distributed as dist\nfrom agmerge.engine import run",
    }
    assert problems({**GOOD, **fine}, PACKAGES_OF_EXAMPLES) == []


@pytest.mark.parametrize("rule", BAD)
def test_a_broken_rule_is_found(rule: str) -> None:
    name, source, complaint = BAD[rule]
    found = problems({**GOOD, name: source}, PACKAGES_OF_EXAMPLES)
    assert len(found) == 1 and complaint in found[0]


def test_rooms_levels_and_arrows_are_counted() -> None:
    """Of a tower of three rooms, and of one more that stands beside it."""
    tower = {
        "agmerge.errors": "",
        "agmerge.tensors.arena": "from agmerge.errors import E\nfrom agmerge.tensors import layout",
        "agmerge.tensors.layout": "",
        "agmerge.step.round": "def f() -> None:\n    from agmerge.tensors.arena import A\nimport agmerge.errors",
        "agmerge.metrics.totals": "import merging",
        "merging": "",
    }
    found = arrows(tower)
    assert set(found) == {("tensors", "errors"), ("step", "tensors"), ("step", "errors")}
    assert found["step", "tensors"] == "agmerge.step.round:2" and levels(tower) == 3
    assert levels({"agmerge.errors": ""}) == 1 and misplaced(tower) == []
