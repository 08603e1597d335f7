# SPDX-License-Identifier: Apache-2.0
"""Communicators of Gloo that are being made when one of their ranks is lost."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from agmerge.backends.bare_gloo import BareGloo, Broken
from agmerge.errors import PeerLost


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["copy", "part"])
def test_who_connects_to_one_that_is_lost_does_not_wait_for_the_time_out(kind: str) -> None:
    store, broken, groups = dist.HashStore(), Broken(), {}

    def connect(rank: int) -> None:
        groups[rank] = BareGloo(dist, store, rank, 2, (rank, 2), 30.0, broken)

    threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    begun = time.monotonic()
    timer = threading.Timer(0.3, broken.give_up, ["no sign of worker 2"])
    timer.start()
    with pytest.raises(PeerLost, match="no sign of worker 2"):  # which does not make its own
        groups[0].duplicate("copy", 20.0) if kind == "copy" else groups[0].subgroup([0, 1], "part", 20.0)
    assert time.monotonic() - begun < 15.0 and groups[0].has_failed
