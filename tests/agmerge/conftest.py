"""For all tests of ranks that are threads of this process."""

from __future__ import annotations

import pytest

from agmerge import probing, rehearsal


@pytest.fixture(autouse=True)
def probes_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size is timed thrice at most, small messages once and a few in a row: only test_probing.py counts how often.

    Between threads that share Python's lock that takes longer than all else a test does.
    """
    monkeypatch.setattr(probing, "RUNS", (2, 3))
    monkeypatch.setattr(probing, "ROUNDS", (1, 1))
    for module in (probing, rehearsal):
        monkeypatch.setattr(module, "MANY", 4)
