# SPDX-License-Identifier: Apache-2.0
"""Messages under way on a device: what is queued, and once only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agmerge.errors import CollectiveTimeout
from agmerge.step import round
from agmerge.step.round import MessagesUnderWay


def test_messages_that_were_queued_before_an_error_are_not_queued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would wait twice for a collective that all other ranks have made once."""
    queued: list[str] = []
    exchange = SimpleNamespace(
        can_queue=lambda one: True,
        arrive=lambda one, on_stream: queued.append(one),
        announced=lambda one: [],
        overwrites=True,
    )
    clock = SimpleNamespace(on_device=True)
    nothing: Any = SimpleNamespace(note=lambda noted: None, now=lambda: None, clock=clock)
    guards, store = SimpleNamespace(timeout=1.0), SimpleNamespace(counts_zeros=False)
    options: Any = SimpleNamespace(config=SimpleNamespace(guards=guards), store=store)
    messages = MessagesUnderWay(options, nothing, nothing)
    first, second = "buffer 0", "buffer 1"
    messages.sent += [[(SimpleNamespace(exchange=exchange), name)] for name in (first, second)]  # type: ignore[list-item]
    asked: list[list[str]] = []

    def announced(messages: list[Any], timeout: float) -> dict[int, Any]:
        asked.append([name for name, _ in messages])
        if len(asked) == 1:
            raise CollectiveTimeout("no answer")
        return {}

    monkeypatch.setattr(round, "announced_on_host", announced)
    with pytest.raises(CollectiveTimeout):
        messages.queue(2, writes=False)
    messages.queue(2, writes=False)
    assert queued == [first, second] and asked == [[first, second]] * 2
