# SPDX-License-Identifier: Apache-2.0
"""Every code block of README.md and docs/ runs, but for a few that say why not; pages made of the code are its."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import doc_blocks, reference_pages
from support.doc_blocks import ROOT, SETUPS, Block
from torch import nn

import agmerge
from agmerge import testing

BLOCKS = doc_blocks.blocks()
RUN = [block for block in BLOCKS if not block.why_not]
SCRIPTS = [block for block in RUN if not any(map(block.is_in, RUN))]  # of a page that is continued the whole one
DOCS = ROOT / "docs"


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("block", SCRIPTS, ids=[f"{block.page}:{block.line}" for block in SCRIPTS])
def test_a_block_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block.script(), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AGMERGE_TIMEOUT": "60"}
    command = [sys.executable, *SETUPS[block.setup][1], str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


def test_nearly_every_block_is_run() -> None:
    """At least nine of ten; of the others the reason is given."""
    assert len(RUN) >= 0.9 * len(BLOCKS), [(block.page, block.line, block.why_not) for block in BLOCKS if block.why_not]
    assert {block.setup for block in RUN} == set(SETUPS)
    assert all(len(block.why_not) > 5 for block in BLOCKS if block.why_not)


@pytest.mark.parametrize("page", reference_pages.PAGES)
def test_pages_that_are_made_of_the_code_are_as_the_code_is(page: str) -> None:
    made = reference_pages.PAGES[page]()
    assert (DOCS / page).read_text(encoding="utf-8") == made, "run python tests/support/reference_pages.py"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_table_of_results_has_the_figures_that_were_measured(page: str) -> None:
    """Each row comes from docs/_data/figures.json, whose figures stand in a table of the page that it names."""
    known = json.loads((DOCS / "_data" / "figures.json").read_text(encoding="utf-8"))
    measured = (ROOT / known["page"]).read_text(encoding="utf-8")
    text = (ROOT / page).read_text(encoding="utf-8").replace("**", "")
    for name, row in known["rows"].items():
        label, step, loss, late = row["label"].replace("**", ""), row["step"], row["loss"], row.get("to the loss")
        figures = {str(value) for value in (step, loss, late) if value is not None}
        tables = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", measured, re.MULTILINE)
        assert any(figures <= set(cells.split()) for cells in tables), name
        until = f"{late / 60:.2g} min" if late else f"not in {row['steps']} steps"
        assert f"| {label} | {step:.2f} s | {loss:.2f} | {until} |" in text


def test_every_variable_of_the_environment_has_a_line() -> None:
    packages = [path for name in ("agmerge", "sparsifiers", "merging") for path in (ROOT / name).rglob("*.py")]
    sources = [path.read_text(encoding="utf-8") for path in (*packages, ROOT / "setup.py")]
    used = {name for source in sources for name in re.findall(r"\bAGMERGE_[A-Z_]+\b", source)}
    told = set(re.findall(r"^\| `(\w+)`", (DOCS / "environment.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(used) > 5 and used == told


def test_every_key_of_the_statistics_is_told() -> None:
    def body(rank: int) -> set[str]:
        model = nn.Linear(4, 4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return set(agmerge.DistributedOptimizer(inner, model.named_parameters()).stats())

    text = agmerge.DistributedOptimizer.stats.__doc__ or ""
    keys = testing.run(1, body)[0]
    assert len(keys) > 15 and {key for key in keys if f"``{key}``" not in text} == set()


def test_every_page_is_in_the_navigation() -> None:
    """Six sections in the header, and below each its pages, each of them once."""
    sections = entries("index")
    assert sections == ["get_started", "use_with", "guides", "concepts", "reference", "benchmarks"]
    below = [page for section in sections for page in entries(section)]
    assert sorted(["index", *sections, *below]) == sorted(path.stem for path in DOCS.glob("*.md"))


@pytest.mark.parametrize("section", ["get_started", "use_with", "guides", "concepts", "reference"])
def test_a_section_says_what_each_of_its_pages_is_for(section: str) -> None:
    text = (DOCS / f"{section}.md").read_text(encoding="utf-8")
    assert re.findall(r"^\* \[[^\]]+\]\((\w+)\.md\): \S", text, re.MULTILINE) == entries(section)


def entries(page: str) -> list[str]:
    """Return the pages of a page's toctree."""
    return re.findall(r"^[^\n<]+ <(\w+)>$", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_links_of_the_site_have_words_as_their_text() -> None:
    """A reader of the site knows titles, not files."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    named = {name: re.findall(r"\[`?([a-z_./]+\.md)`?\]\(", text) for name, text in texts.items()}
    assert {name: files for name, files in named.items() if files} == {}
