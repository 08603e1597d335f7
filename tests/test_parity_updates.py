# SPDX-License-Identifier: Apache-2.0
"""Check the cases of ``parity.py --cases updates``, and what it says of them. Its runs take minutes, these do not."""

from __future__ import annotations

from dataclasses import replace

import parity
import pytest
from accuracy import parity_tasks, parity_updates
from accuracy.parity_tasks import Case
from torch import nn

import agmerge
from agmerge import testing

DIGITS = Case(task="digits", optimizer="adamw")


@pytest.mark.parametrize("case", [parity_updates.updates(DIGITS), parity_updates.local(DIGITS)])
def test_what_the_cases_write_out_are_the_librarys_defaults_with_a_density(case: Case) -> None:
    def settings(rank: int) -> list[dict[str, str]]:
        model = nn.Linear(64, 64)
        inner, options = parity_tasks.inner_optimizers(case, model)[0], {"exchange": "sparse"}
        usual = (
            agmerge.LocalOptimizer(inner, model.named_parameters(), **options)
            if case.every > 1
            else agmerge.DistributedOptimizer(inner, model.named_parameters(), sync="updates", density=0.05, **options)
        )
        return [parity_tasks.wrapped(case, model).settings, usual.settings]

    ((written, usual),) = testing.run(1, settings)
    assert written == usual


def test_cases_are_told_apart_by_their_lines() -> None:
    cases = parity.matrix(parity.arguments(["--cases", "updates"]))
    assert len({parity.line(case) for case in cases}) == len(set(cases)) == len(cases)
    assert {case.dense for case in cases} <= set(cases)


def test_halves_are_of_the_training_text() -> None:
    text = bytes(parity_tasks.corpus().tolist())
    task = parity_tasks.lm(0, 0, 8, halves=True)
    cut = (len(text) * 9 // 10) // 2
    for rank, half in enumerate((text[: cut + 64], text[cut - 64 : 2 * cut])):
        assert all(bytes(row.tolist()) in half for row in task.batch(3, rank, 2)[0])


def test_a_short_run_has_a_row_beside_its_dense_one() -> None:
    cases = [DIGITS, parity_updates.updates(DIGITS), replace(parity_updates.local(DIGITS), every=2)]
    records = {case: parity_tasks.train(case, 4) for case in cases}
    lines = list(parity_updates.tables(records))
    assert lines[0].startswith("Handwritten digits, small CNN, adamw, W = 2, ")
    names = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    assert names == ["| exchanged", "| dense", "| apply, 5 % sign", "| apply, every 2, everything int4"]
    sent = records[cases[1]]
    assert set(sent["wire"]) == {"header", "plain", "4-bit/sign"} and sent["exchanges"] == 4


def test_other_data_for_each_worker_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="no order"):
        parity_tasks.train(replace(DIGITS, halves=True), 1)
