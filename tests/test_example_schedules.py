# SPDX-License-Identifier: Apache-2.0
"""Learning rates over time, as the jobs of ``examples/train.py`` have them."""

from __future__ import annotations

import pytest
import torch
from jobs import schedules
from torch import nn


def rates(schedule: schedules.Schedule, steps: int, epochs: int, workers: int = 1) -> list[float]:
    """The rate of each step, of an optimizer whose highest is 1."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = schedule.of(optimizer, steps, epochs, workers)
    found = []
    for _ in range(steps * epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_constant_rate() -> None:
    assert rates(schedules.Constant(), 2, 2) == [1.0] * 4


def test_steps_after_a_warm_up_from_the_rate_of_one_worker() -> None:
    schedule = schedules.Steps(((2, 0.1), (3, 0.01)), warmup=1)
    expected = [0.25, 0.625, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    assert rates(schedule, steps=2, epochs=4, workers=4) == pytest.approx(expected)


def test_linear_rises_and_falls_to_nothing() -> None:
    assert rates(schedules.Linear(0.5), 4, 1) == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert rates(schedules.Linear(), 4, 1) == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_noam_falls_with_the_root_of_the_steps() -> None:
    found = rates(schedules.Noam(4), 16, 1)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0]) and found[15] == pytest.approx(0.5)


def test_a_plateau_halves_after_epochs_without_a_gain() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = schedules.Plateau(0.5, after=3).of(optimizer, 10, 10, 1)
    found = []
    for perplexity in (9.0, 8.0, 8.5, 8.4, 8.3, 8.2, 7.0):
        scheduler.step(perplexity)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5]


def test_one_cycle_has_its_highest_rate_where_it_says() -> None:
    found = rates(schedules.OneCycle(0.25), 10, 4)
    assert max(found) == pytest.approx(1.0) and found.index(max(found)) == 9 and found[-1] < 1e-3
