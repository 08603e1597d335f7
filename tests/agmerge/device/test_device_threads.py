# SPDX-License-Identifier: Apache-2.0
"""Which threads the hooks of a device run on."""

from __future__ import annotations

import threading
from typing import Any

from support.device_training import Given, plain_step, train


def test_hooks_come_on_a_thread_of_autograds_own() -> None:
    threads: dict[str, set[int]] = {"hooks": set(), "ranks": set()}

    def watching(optimizer: Any, model: Given, rank: int, step: int) -> None:
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: threads["hooks"].add(threading.get_ident()))
            for p in model.given
        ]
        threads["ranks"].add(threading.get_ident())
        plain_step(optimizer, model, rank, step)
        for handle in handles:
            handle.remove()

    train(2, each=watching, compression="topk", exchange="sparse")
    assert len(threads["hooks"]) == 1 and not threads["hooks"] & threads["ranks"]
