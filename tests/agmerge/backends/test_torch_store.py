# SPDX-License-Identifier: Apache-2.0
"""Where ranks meet before they are connected: what lies there can be read by all who reach the port."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from agmerge.backends import open_files, torch_store
from agmerge.backends.status import RankStatus
from agmerge.backends.torch_store import Meeting
from agmerge.errors import AGMergeError
from agmerge.runtime.peers.monitor import PeerMonitor

WAIT = 30.0


@pytest.fixture
def store() -> Any:
    """The store that rank 0 serves, as a stranger sees it."""
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=WAIT), wait_for_workers=False, multi_tenant=True)


def meetings(store: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[Meeting]:
    """The meeting of each rank, in this process."""
    made = []
    for rank in range(ranks):
        monkeypatch.setattr(torch_store, "_opened", 0)  # as in a process of its own
        env = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        made.append(Meeting(dist, env, WAIT))
    return made


def together(bodies: list[Callable[[], Any]]) -> list[Any]:
    """What each of ``bodies`` returns, on a thread of its own."""
    results: dict[int, Any] = {}

    def body(index: int) -> None:
        results[index] = bodies[index]()

    threads = [threading.Thread(target=body, args=(index,), daemon=True) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    return [results[index] for index in range(len(bodies))]


def read(store: Any) -> str:
    """All that a stranger can read in the store, keys and values."""
    return "; ".join(f"{key} = {store.get(key)!r}" for key in store.list_keys())


def test_no_token_lies_in_the_store_after_the_roll_call(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    met = meetings(store, 3, monkeypatch)
    calls = together([lambda rank=rank: PeerMonitor(rank, met[rank].gather, RankStatus(), {}) for rank in range(3)])
    try:
        tokens = [peer.token for peer in calls[0].peers]
        left = read(store)
        assert len(set(tokens)) == 3 and all(len(token) == 32 for token in tokens)
        assert not any(token in left for token in tokens), left
        assert "roll call/hosts" not in left and "roll call/ports" not in left
        assert all(not call._problems() for call in calls)
    finally:
        for call in calls:
            call.close()


def test_every_rank_reads_what_is_gathered_before_it_goes(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far one rank is ahead of another: each deletes its own text when all have come to the next gathering."""
    met = meetings(store, 4, monkeypatch)

    def gathers(meeting: Meeting) -> list[list[bytes]]:
        return [meeting.gather(b"%d of %d" % (turn, meeting.rank), f"turn {turn}") for turn in range(20)]

    expected = [[b"%d of %d" % (turn, rank) for rank in range(4)] for turn in range(20)]
    assert together([lambda one=one: gathers(one) for one in met]) == [expected] * 4
    assert "turn 18" not in read(store)


def test_who_claims_a_rank_with_escapes_is_quoted_without(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = dist.PrefixStore("agmerge 0.1", store)
    prefix.set("process/0", "host \x1b[31mx\n, pid 3\xff".encode("latin1"))
    with pytest.raises(AGMergeError, match="as rank 0: first host x , pid 3") as caught:
        meetings(store, 1, monkeypatch)
    assert str(caught.value).isprintable()


def test_a_store_that_cannot_be_served_for_want_of_files_says_so(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise RuntimeError("The server socket has failed to bind")

    monkeypatch.setattr(dist, "TCPStore", full)
    for known, said in (
        ((20, 24), "limit is 24 .ulimit -n., which is not enough to connect 2 ranks"),
        (None, "Set MASTER_PORT"),
    ):
        monkeypatch.setattr(open_files, "counted", lambda known=known: known)
        with pytest.raises(AGMergeError, match=said) as caught:
            meetings(store, 2, monkeypatch)
        assert ("MASTER_PORT to a port" in str(caught.value)) is (known is None)
