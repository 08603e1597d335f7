# SPDX-License-Identifier: Apache-2.0
"""Two rules of CONTRIBUTING.md, read off the sources: no `isinstance` for a feature, no write from outside a class."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from support.syntax import dotted, nodes, parsed

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agmerge", "sparsifiers", "merging")
Sources = Mapping[str, str]  # by path from the root

MOST_FEATURES = 4  # questions for a class that decide what is done; lower it with each that goes
# What else may be asked: pattern of the path, pattern of the class, why.
ALLOWED = (
    ("agmerge/options/*", "*", "checks what a script has given"),
    ("agmerge/runtime/process_sets.py", "ProcessSet", "checks what a script has given"),
    ("agmerge/runtime/collectives/*", "ReduceOp", "checks what a script has given"),
    ("agmerge/runtime/collectives/operation.py", "Pending", "checks what a script has given"),
    ("agmerge/*", "OptimizerWrapper", "a script's optimizer may be wrapped already, and is refused or looked into"),
    ("merging/*", "Planner", "checks what a script has given"),
    ("merging/*", "Cost", "checks what a script has given"),
    ("merging/costs.py", "Profile", "equality with any object"),
    ("sparsifiers/conformance*", "*", "the contract of a class that somebody else has written"),
    ("*", "*Error", "errors"),
    ("*", "NoAnswer", "errors"),
    ("*", "PeerLost", "errors"),
    ("*", "PeerUnreachable", "a peer's answer: a plain message"),
)
# Plain records, whose fields are there to be written by those that have one in hand.
RECORDS = {
    "InFlight": "a message under way, which phases complete",
    "State": "what an exchange notes beside its message",
    "_State": "what an exchange notes beside its message",
    "Matrix": "a tensor of a low-rank message, which two rounds fill in",
    "_Message": "a message within a node, under way",
    "_Op": "a collective of the in-memory group, which the last rank completes",
    "_Line": "operations under way on one communicator",
    "CarriedState": "what waits for the next agreement, from checkpoints and from merge buffers that are gone",
    "Restored": "a checkpoint while it is read",
    "Report": "what is known of silent ranks while it is found out",
    "Notes": "mirror of a struct in C",
}
# Attributes of others' objects: torch's, Python's, a framework's, Horovod's.
OTHERS = {
    "grad", "data", "grad_scale", "found_inf", "_step_supports_amp_scaling", "param_groups", "state", "defaults",
    "require_backward_grad_sync", "unscale_", "operation", "excepthook", "argv", "atexit", "extraction_filter",
    "restype", "argtypes", "process_set_id", "load_state", "save_state", "end_training", "log", "optimizer",
    "DistributedOptimizer",
    "no_sync", "_get_train_sampler", "ignore_data_skip", "process_index", "local_process_index", "epoch",
    "is_world_process_zero", "is_local_process_zero", "should_training_stop", "should_save", "should_evaluate",
    "should_log", "eval_on_start", "best_model_checkpoint", "_save_checkpoint", "_maybe_log_save_evaluate",
    "get_state_dict", "clip_grad_norm_", "clip_grad_by_norm",
}  # fmt: skip
THREADS = ("_of_thread", "_thread")  # threading.local


@cache
def sources() -> dict[str, str]:
    """Return the source of each file of the packages."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def classes(of: Sources) -> dict[str, list[ast.ClassDef]]:
    """Return the classes that these files define, by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for source in of.values():
        for node in nodes(parsed(source)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def features(of: Sources) -> Iterator[str]:
    """Yield each question whether an object is of a class of ours that decides what is done.

    An `assert` decides nothing: it tells mypy what is known.
    """
    ours = classes(of)
    for path, source in of.items():
        tree = parsed(source)
        told = {id(node) for one in nodes(tree) if isinstance(one, ast.Assert) for node in ast.walk(one)}
        for node in nodes(tree):
            if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass"):
                asked = {ast.unparse(name).split(".")[-1] for name in parts(node.args[1])} & set(ours)
                if id(node) not in told and not all(is_allowed(path, name) for name in asked):
                    yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def parts(node: ast.expr) -> list[ast.expr]:
    """Return what a tuple, a list or a union has; else the one that it is."""
    if isinstance(node, ast.Tuple | ast.List):
        return node.elts
    return [*parts(node.left), *parts(node.right)] if isinstance(node, ast.BinOp) else [node]


def is_allowed(path: str, name: str) -> bool:
    """Return whether a file may ask for a class."""
    return any(fnmatch(path, where) and fnmatch(name, which) for where, which, _ in ALLOWED)


def fields(of: Sources) -> set[str]:
    """Return the fields of all plain records, dataclasses and mirrors of structs."""
    found = set()
    for node in [node for name, named in classes(of).items() if name in RECORDS for node in named]:
        for one in node.body:
            if isinstance(one, ast.AnnAssign):
                found.add(ast.unparse(one.target))
            elif isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "_fields_":
                found |= {
                    name for name, _ in (ast.unparse(pair).strip("('").split("'", 1) for pair in parts(one.value))
                }
    return found


def writes(of: Sources) -> Iterator[tuple[str, str, int, str]]:
    """Yield path, attribute, line and text of each attribute that is written from outside of its class."""
    free = fields(of) | OTHERS
    for path, source in of.items():
        for node in nodes(parsed(source)):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                owner = ast.unparse(node.value)
                if owner not in ("self", "cls", *THREADS) and node.attr not in free:
                    yield path, node.attr, node.lineno, ast.unparse(node)


def test_the_core_asks_for_no_class_where_it_means_a_feature() -> None:
    found = list(features(sources()))
    assert len(found) <= MOST_FEATURES, "\n".join(found)


def test_no_attribute_is_written_from_outside_its_class() -> None:
    found = list(writes(sources()))
    assert found == []


def test_no_exception_is_idle() -> None:
    """One that nothing needs would hide the next that does."""
    there = classes(sources())
    assert [name for name in RECORDS if name not in there] == []
    asked = [
        (path, ast.unparse(name).split(".")[-1])
        for path, source in sources().items()
        for node in nodes(parsed(source))
        if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass")
        for name in parts(node.args[1])
    ]
    used = {
        (where, which)
        for where, which, _ in ALLOWED
        for one in asked
        if fnmatch(one[0], where) and fnmatch(one[1], which)
    }
    assert [rule for rule in ALLOWED if rule[:2] not in used] == []


CLASSES = "class Sparse: ...\nclass BadError(Exception): ...\nclass State:\n    size: int = 0\n"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("isinstance(x, Sparse)", 1),
        ("isinstance(x, int | kinds.Sparse)", 1),
        ("issubclass(type(x), (int, Sparse))", 1),
        ("isinstance(x, int)", 0),
        ("isinstance(x, BadError)", 0),
        ("assert isinstance(x, Sparse)", 0),
    ],
)
def test_questions_for_a_class_are_found(source: str, count: int) -> None:
    assert len(list(features({"agmerge/kinds.py": CLASSES, "agmerge/step/a.py": source}))) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x.count = 1", 1),
        ("self.x.count += 1", 1),
        ("for x.count in y: pass", 1),
        ("del x.count", 1),
        ("x.count: int = 1", 1),
        ("self.count = x.count", 0),
        ("x.size, p.grad = 1, 2", 0),
        ("_thread.count = 1", 0),
        ("x['count'] = 1", 0),
    ],
)
def test_writes_from_outside_are_found(source: str, count: int) -> None:
    assert len(list(writes({"agmerge/kinds.py": CLASSES, "agmerge/step/a.py": source}))) == count
