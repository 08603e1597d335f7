"""For all tests of ranks that are threads of this process."""

from __future__ import annotations

import pytest

from agmerge import probing


@pytest.fixture(autouse=True)
def probes_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much longer work takes beside messages is timed once, not up to seven times: no test counts how often.

    Between threads that share Python's lock that takes longer than all else a test does.
    """
    monkeypatch.setattr(probing, "ROUNDS", (1, 1))
