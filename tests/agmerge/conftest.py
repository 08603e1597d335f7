"""For all tests of ranks that are threads of this process."""

from __future__ import annotations

import pytest

from agmerge import probing


@pytest.fixture(autouse=True)
def probes_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much longer work takes beside messages is asked once, not seven times: no test looks at the answer.

    Threads that share Python's lock are slow to hand it over, so the answers took longer than what is tested.
    """
    monkeypatch.setattr(probing, "ROUNDS", (1, 1))
