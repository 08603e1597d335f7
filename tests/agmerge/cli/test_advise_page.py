# SPDX-License-Identifier: Apache-2.0
"""The page about advise has the figures and words of the code."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from evidence import page

from agmerge.cli import advisor
from agmerge.cli.advice import DDP, NOT_HERE, filled
from agmerge.cli.advisor import COST_OF_UPDATES, OTHERS, STEPS, USES, told_cost_of_updates
from agmerge.options.defaults import FOUR, told_cost
from agmerge.step.config import UPDATES

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "will_it_help.md").read_text(encoding="utf-8")
ADAMW = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def test_the_table_of_the_page_has_a_row_of_every_setting_that_advise_tries_by_name() -> None:
    assert USES.keys() == {*OTHERS, UPDATES}
    for name, use in USES.items():
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {use} |"))
        optimizer = SGD if name == "dgc" else ADAMW
        told = told_cost_of_updates(ADAMW) if name == UPDATES else told_cost(name, OTHERS[name], optimizer)
        assert f'"{name}"' in row and f"| {told}" in row


def excess_of(contender: str) -> list[float]:
    """Return the mean excess in percent: 2, 4, 8 workers in rung 1, 4 in rung 2; largest batch, dense's rate."""
    runs = page.recorded()
    cells = [cell for name in ("rung1", "rung2") for cell in page.of_largest_batch(page.usual_of(runs[name]))]
    found = {
        (cell.first["size"], cell.first["workers"]): cell for cell in cells if cell.first["contender"] == contender
    }
    told = [found["0.25m", 2], found["0.25m", 4], found["0.25m", 8], found["1m", 4]]
    assert len(found) == len(told) and all(len(cell.rows) == 3 for cell in told)  # "three seeds" of the texts
    return [cell.excess.mean for cell in told if cell.excess]


def text_of(file: Path) -> str:
    """Return a page in one line."""
    return " ".join(file.read_text(encoding="utf-8").split())


def test_figures_of_updates_are_those_of_the_recorded_runs() -> None:
    written, means = text_of(DOCS / "adaptive.md"), excess_of("updates")
    two, four, eight, large = (f"{mean:.1f} %" for mean in means)
    assert f"increased the loss by {two} with two workers, {four} with four, and {eight} with" in written
    assert f"and three seeds, the recommended setting increased it by {large}" in written
    assert f"{min(means):.0f} to {max(means):.1f} %" == COST_OF_UPDATES


def test_figures_of_the_default_in_the_readme_are_those_of_the_recorded_runs() -> None:
    written, (*small, large) = text_of(DOCS.parent / "README.md"), excess_of("default")
    assert f"the default's loss was {-max(small):.1f} to {-min(small):.1f} % below uncompressed training's" in written
    assert f"four workers and three seeds, it was {large:.1f} % above" in written


def test_the_example_of_the_page_is_what_advise_prints() -> None:
    """Costs, exit codes, numbers of steps; its seconds are of one day."""
    example = PAGE.partition(" million parameters, AdamW")[2].partition("```")[0]
    assert example.strip() in (DOCS / "_data" / "command_line" / "advise.txt").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^(\S+)(?: \(default\))? +[\d.]+ +[\d.]+  (\S.*)$", example, re.MULTILINE))
    assert rows.pop("sync='updates'") == told_cost_of_updates(ADAMW)
    assert rows.keys() >= {*FOUR, "topk", "eden-1", "acpsgd"}
    for name, cost in rows.items():
        assert cost == told_cost(name, OTHERS.get(name), ADAMW), name
    where, lines = filled(DDP, {"model": "model", "optimizer": "optimizer"}, scaled=False)
    assert "\n".join([f"Put this {where}:", "", *(f"    {line}" for line in lines)]) in example
    assert f"at most {STEPS} steps" in PAGE and f"**{NOT_HERE}**" in PAGE
    codes = re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)
    assert [*map(int, codes)] == [0, advisor.NOT_USED, advisor.NO_ANSWER]
