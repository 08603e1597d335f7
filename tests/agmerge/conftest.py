# SPDX-License-Identifier: Apache-2.0
"""For all tests of ranks that are threads of this process."""

from __future__ import annotations

import math

import pytest

from agmerge.backends import local
from agmerge.planning import cost_probe, plan_trial
from agmerge.script import parameter_access


@pytest.fixture(autouse=True)
def hidden_collectives_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups of ranks refuse a collective that a public function starts without saying so in its docstring."""
    monkeypatch.setattr(local, "CHECKS_MARKS", True)


@pytest.fixture(autouse=True)
def probes_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each size once or twice, all after the same step: test_cost_probe.py alone says how often, and when.

    Between threads that share Python's lock that takes longer than all else a test does.
    """
    monkeypatch.setattr(cost_probe, "SHARE", math.inf)
    monkeypatch.setattr(cost_probe, "RUNS", 2)
    for never in ("HOPELESS", "SURE"):
        monkeypatch.setattr(plan_trial, never, math.inf)
    monkeypatch.setattr(plan_trial.PlanTrial, "doubts", lambda trial: [0.0] * len(trial.plans))
    monkeypatch.setattr(cost_probe, "VISITS", 1)


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for reads of a script although other tests of this process have compiled, after which none are seen."""
    monkeypatch.setattr(parameter_access, "_compiles", lambda: False)
