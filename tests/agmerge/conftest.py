"""For all tests of ranks that are threads of this process."""

from __future__ import annotations

import pytest

from agmerge.planning import cost_probe, message_timing


@pytest.fixture(autouse=True)
def probes_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each size thrice at most, and a few small messages once in a row: test_cost_probe.py alone counts how often.

    Between threads that share Python's lock that takes longer than all else a test does.
    """
    monkeypatch.setattr(cost_probe, "RUNS", (2, 3))
    monkeypatch.setattr(cost_probe, "ROUNDS", (1, 1))
    for module in (cost_probe, message_timing):
        monkeypatch.setattr(module, "BURST", 4)
