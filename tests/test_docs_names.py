# SPDX-License-Identifier: Apache-2.0
"""What Markdown pages name is there, files and attributes of classes, and pages have the words that people look for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("agmerge", "sparsifiers", "merging", "examples", "benchmarks", "tests", "docs")
PLACES = ("*.md", "docs/*.md", "docs/dev/*.md", "benchmarks/*.md", "benchmarks/notebook/*.md", "examples/*.md")
PAGES = sorted(str(path.relative_to(ROOT)) for place in PLACES for path in ROOT.glob(place))

CODE = re.compile(r"^```[^\n]*\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?<![\w./<>*-])(?:\./)?[\w./*-]*[\w*]\.(?:py|c|h|sh|md|conf|toml)\b(?![\w(*])")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)\s]*)?\)")
ATTRIBUTE = re.compile(r"(?<![\w.])([A-Z]\w*[a-z]\w*)\.([a-z_]\w*)\b(?!\.\w)")

# Files of others, by page, and those that the reader writes; a pattern stands for all that it matches.
NOT_OURS = {
    "README.md": {"mine.py"},
    "docs/command_line.md": {"powers.py"},
    "docs/compare_a_compressor.md": {"powers.py"},
    "docs/dev/beside_others.md": {
        "_fsdp_*.py",
        "collectives.py",
        "compression/*.py",
        "local_sgd.py",
        "manager.py",
        "powersgd/powersgd.py",
        "quantization.py",
    },
    "docs/elastic.md": {"./hosts.sh"},
    "examples/README.md": {
        "*run*.sh",
        "./horovod_mpi.sh",
        "horovod_trainer.py",
        "batch.sh",
        "convergence_eval/*.py",
        "dawn.py",
        "envs.conf",
        "exp_configs/resnet20.conf",
        "job.sh",
        "mnist.sh",
        "perf.sh",
        "pytorch_*.py",
        "run_imagenet_no_trainer_hvd.py",
        "settings.py",
        "vgg16_*.sh",
        "wiki2_*.py",
        "wiki2_*.sh",
    },
    "docs/launching.md": {"job.sh"},
    "docs/dev/low_rank.md": {"batch.sh", "envs.conf", "mnist.sh", "perf.sh"},
    "docs/dev/horovod_tests.md": {"test/parallel/test_torch.py"},
    "docs/tutorial.md": {"quickstart.py"},
}


@cache
def files() -> tuple[str, ...]:
    """Return every file of the tree that pages may name, as paths from the root."""
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return tuple(str(path.relative_to(ROOT)) for path in [*ROOT.iterdir(), *below] if path.is_file())


def is_there(name: str) -> bool:
    """Return whether a file has that path, or ends with it: pages leave `agmerge/` out, patterns match one at least."""
    name = name.removeprefix("./")
    return any(fnmatch(path, name) or fnmatch(path, f"*/{name}") for path in files())


def code_of(text: str) -> Iterator[str]:
    """Yield what stands in code blocks and between backticks."""
    for match in CODE.finditer(text):
        yield match[1] or match[2] or ""


def named_files(text: str) -> set[str]:
    """Return the names of files in the code of a page."""
    return {name for code in code_of(text) for name in FILE.findall(code)}


def dead_files(text: str, page: str) -> list[str]:
    """Return the files that a page names and that are neither in the tree nor others'."""
    others = NOT_OURS.get(page, set())
    return sorted(
        name for name in named_files(text) if not is_there(name) and not any(fnmatch(name, other) for other in others)
    )


@cache
def classes() -> dict[str, list[tuple[tuple[str, ...], frozenset[str]]]]:
    """Return, by name of a class, the bases and the attributes of each class of the tree that has this name."""
    found: dict[str, list[tuple[tuple[str, ...], frozenset[str]]]] = {}
    for path in (path for path in files() if path.endswith(".py") and not path.startswith("tests/")):
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = tuple(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
                found.setdefault(node.name, []).append((bases, frozenset(attributes(node))))
    return found


def attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield the methods of a class, its fields, and what its methods store in ``self``."""
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield inner.name
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr


def has(name: str, attribute: str) -> bool:
    """Return whether one of the classes of that name, or of their bases in the tree, has the attribute."""
    return any(
        attribute in own or any(has(base, attribute) for base in bases if base != name)
        for bases, own in classes().get(name, [])
    )


def dead_attributes(text: str) -> list[str]:
    """Return each `Class.attribute` in the code of a page of which the tree has no such class, or it has no such."""
    named = {pair for code in code_of(text) for pair in ATTRIBUTE.findall(code)}
    return sorted(f"{name}.{what}" for name, what in named if not has(name, what))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert dead_files(text, page) == []


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_attributes_that_a_page_names_are_there(page: str) -> None:
    assert dead_attributes((ROOT / page).read_text(encoding="utf-8")) == []


def test_no_exemption_is_idle() -> None:
    """A name of another's file that no page has, or that has become ours, hides the next dead reference."""
    idle = []
    for page, others in NOT_OURS.items():
        dead = {name for name in named_files((ROOT / page).read_text(encoding="utf-8")) if not is_there(name)}
        idle += [f"{page}: {other}" for other in others if not any(fnmatch(name, other) for name in dead)]
    assert idle == []


def test_dead_names_are_found() -> None:
    page = "`engine/divergence.py`, `Round.add`, `Round.nothing`, `Nobody.knows`, `optimizer.py`, `engine/reducer.py`"
    assert dead_files(page, "") == ["engine/divergence.py", "optimizer.py"]
    assert dead_files("```\nf(x)      step/nowhere.py\n```\nwords.py, examples/*.py", "") == ["step/nowhere.py"]
    assert dead_attributes(page) == ["Nobody.knows", "Round.nothing"]
    assert dead_attributes("```\nTwoLevelRound.receive(...)\n```") == []  # of a base class


# What people type, and the page that has to have it, in these words.
LOOKED_FOR = {
    "README.md": ("inter-worker", "intra-worker", "adaptive merging", "merge buffer"),
    "docs/installation.md": ("Horovod 0.28.1 does not build with torch 2.1 and newer", "agmerge[horovod]"),
    "docs/how_it_works.md": ("inter-worker", "intra-worker", "adaptive merging", "merge buffer", "AGM-Inter"),
}


@pytest.mark.parametrize("page", LOOKED_FOR)
def test_words_that_people_look_for_are_on_a_page(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split()).lower()
    assert [words for words in LOOKED_FOR[page] if words.lower() not in text] == []
