# SPDX-License-Identifier: Apache-2.0
"""The page about advise has the figures and words of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import torch

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


def excess_of_updates(rung: str) -> dict[int, list[float]]:
    """Return for each number of workers the excess of each seed over dense, in percent: largest batch, dense's rate."""
    run = json.loads((DOCS.parent / "benchmarks" / "prove" / f"{rung}.json").read_text(encoding="utf-8"))
    largest = max(row["batch"] for row in run["rows"])
    (best,) = (rate for key, rate in run["best"].items() if key.endswith(f"batch {largest}"))
    rows = [row for row in run["rows"] if (row["batch"], row["rate"]) == (largest, best)]
    dense = {row["seed"]: row["loss"] for row in rows if row["contender"] == "dense"}
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["contender"] == "updates":
            found.setdefault(row["workers"], []).append(100 * (row["loss"] / dense[row["seed"]] - 1))
    return found


def test_figures_of_updates_are_those_of_the_recorded_runs() -> None:
    small, large = excess_of_updates("rung1"), excess_of_updates("rung2")
    page = " ".join((DOCS / "adaptive.md").read_text(encoding="utf-8").split())
    two, four, eight = (fmean(small[workers]) for workers in (2, 4, 8))
    assert f"increased the loss by {two:.1f} % with two workers, {four:.1f} % with four, and {eight:.1f} % with" in page
    assert all(len(seeds) == 3 for seeds in (*small.values(), *large.values()))
    assert f"and three seeds, the recommended setting increased it by {fmean(large[4]):.1f} %" in page
    means = [two, four, eight, fmean(large[4])]
    assert f"{min(means):.0f} to {max(means):.1f} %" == COST_OF_UPDATES


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
