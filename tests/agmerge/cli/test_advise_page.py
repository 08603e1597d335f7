# SPDX-License-Identifier: Apache-2.0
"""The page about advise has the figures and words of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from agmerge.cli import advisor
from agmerge.cli.advice import DDP, NOT_HERE, filled
from agmerge.cli.advisor import COSTS, OTHERS, STEPS, USES, told_cost_of_updates
from agmerge.options.defaults import FOUR, told_cost
from agmerge.step.config import UPDATES

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "will_it_help.md").read_text(encoding="utf-8")
WORDS = {2: "two", 4: "four", 8: "eight"}
ADAMW = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def test_the_table_of_the_page_has_a_row_of_every_setting_that_advise_tries_by_name() -> None:
    assert USES.keys() == {*OTHERS, UPDATES}
    for name, use in USES.items():
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {use} |"))
        optimizer = SGD if name == "dgc" else ADAMW
        told = told_cost_of_updates(2, ADAMW) if name == UPDATES else told_cost(name, OTHERS[name], optimizer)
        assert f'"{name}"' in row and f"| {told}" in row


def test_figures_of_updates_are_those_of_the_recorded_runs() -> None:
    """Mean excess over dense training with the same seeds and the largest batch, in percent of the loss."""
    run = json.loads((DOCS.parent / "benchmarks" / "prove" / "rung1.json").read_text(encoding="utf-8"))
    largest = max(row["batch"] for row in run["rows"])
    best = run["best"][f"0.25m, adamw, batch {largest}"]
    rows = [row for row in run["rows"] if (row["batch"], row["rate"]) == (largest, best)]
    loss = {(row["contender"], row["workers"], row["seed"]): row["loss"] for row in rows}
    adaptive = (DOCS / "adaptive.md").read_text(encoding="utf-8")
    for workers, percent in COSTS:
        seeds = [seed for name, number, seed in loss if (name, number) == ("updates", workers)]
        excess = [100 * (loss["updates", workers, seed] / loss["dense", 1, seed] - 1) for seed in seeds]
        assert len(excess) >= 3 and percent == round(sum(excess) / len(excess), 1)
        assert f"{percent:.1f} % with {WORDS[workers]}" in adaptive


@pytest.mark.parametrize(("workers", "figure"), [(2, "0.3 % "), (3, "0.0 % "), (8, "1.0 % "), (64, "1.0 % ")])
def test_of_updates_the_figure_of_as_many_workers_is_told(workers: int, figure: str) -> None:
    assert told_cost_of_updates(workers, ADAMW).startswith(figure)


def test_the_example_of_the_page_is_what_advise_prints() -> None:
    """Costs, exit codes, numbers of steps; its seconds are of one day."""
    example = PAGE.partition(" million parameters, AdamW")[2].partition("```")[0]
    rows = re.findall(r"^([\w-]+)(?: \(default\))? +[\d.]+ +[\d.]+  (\S.*)$", example, re.MULTILINE)
    assert {name for name, _ in rows} >= {*FOUR, "topk", "eden-1", "acpsgd"}
    for name, cost in rows:
        assert cost == told_cost(name, OTHERS.get(name), ADAMW), name
    where, lines = filled(DDP, {"model": "model", "optimizer": "optimizer"}, scaled=False)
    assert "\n".join([f"Put this {where}:", "", *(f"    {line}" for line in lines)]) in example
    assert f"at most {STEPS} steps" in PAGE and f"**{NOT_HERE}**" in PAGE
    codes = re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)
    assert [*map(int, codes)] == [0, advisor.NOT_USED, advisor.NO_ANSWER]
