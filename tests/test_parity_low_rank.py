# SPDX-License-Identifier: Apache-2.0
"""Check the cases of ``parity.py --cases lowrank``, and what is said of them. Its runs take minutes, these do not."""

from __future__ import annotations

from dataclasses import replace

import parity
import pytest
from accuracy import parity_low_rank, parity_tasks, parity_updates
from accuracy.parity_low_rank import density, elements, low_rank, of_equal_bytes
from accuracy.parity_tasks import Case

DIGITS = Case(task="digits", optimizer="adamw")


def test_cases_are_told_apart_by_their_lines_and_all_have_a_dense_one() -> None:
    cases = parity.matrix(parity.arguments(["--cases", "lowrank"]))
    assert len({parity.line(case) for case in cases}) == len(set(cases)) == len(cases)
    assert {case.dense for case in cases} <= set(cases)
    tasks = {(case.task, case.optimizer, case.compressor, case.rank) for case in cases if case.wire == "auto"}
    for task in parity_tasks.TASKS:
        for optimizer in ("sgd", "adamw"):
            assert {(task, optimizer, name, rank) for name in ("powersgd", "acpsgd") for rank in (4, 16)} <= tasks


def test_a_sparsifier_is_given_the_bytes_of_both_factors() -> None:
    # Of rank 4: 2 matrices of 128 x 128, and in 4 layers 128 x 384, 128 x 128, 128 x 512 and 512 x 128.
    assert elements("lm", 4) == (819200, 4 * (2 * 256 + 4 * (512 + 256 + 640 + 640)))
    assert 0.03 < density("lm", 4) < 0.04  # 4.25 % of the elements; a selected one takes five bytes
    assert density("lm", 4, "sign") > 0.3


@pytest.mark.parametrize("rank", parity_low_rank.RANKS)
def test_equal_bytes_are_counted_as_such(rank: int) -> None:
    cases = [low_rank(DIGITS, "powersgd", rank), *of_equal_bytes(DIGITS, rank)]
    factors, *others = (parity_tasks.train(case, 3)["bytes_sent"] for case in cases)
    assert others == pytest.approx([factors, factors], rel=0.05)


def test_a_short_run_has_a_row_beside_its_dense_one() -> None:
    powersgd, acpsgd = (low_rank(DIGITS, name) for name in parity_low_rank.NAMES)
    cases = [DIGITS, powersgd, replace(acpsgd, wire="fp16"), replace(acpsgd, sync="updates", carry="apply")]
    records = {case: parity_tasks.train(case, 4) for case in cases}
    names = [line.split(" | ")[0] for line in parity_updates.tables(records) if line.startswith("| ")]
    assert names == [
        "| exchanged",
        "| dense",
        "| gradients, powersgd of rank 4 fp32",
        "| gradients, acpsgd of rank 4 fp16",
        "| apply, acpsgd of rank 4 fp32",
    ]
