# SPDX-License-Identifier: Apache-2.0
"""Train on pretended devices: ranks are threads, each with a device of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch

import sparsifiers
from agmerge import testing
from agmerge.runtime import workers
from pretend import streams
from pretend.device import Device
from pretend.nccl import DeviceBackend, Turn
from pretend.schedule import Schedule

T = TypeVar("T")
NEEDS_RANKS = ("oktopk", "masked", "two-level")  # exchanges of which a hook needs what other ranks have sent


def needs_own_thread(exchange: str, compression: str) -> bool:
    """Whether hooks need other ranks, see :func:`on_devices`: by these names of an exchange and a compressor."""
    return exchange in NEEDS_RANKS or sparsifiers.is_quantiser(compression)


def on_devices(
    size: int,
    body: Callable[[int, Device], T],
    *,
    own_thread: bool = False,
    watched: Collection[int] | None = None,
    schedules: Sequence[Schedule] = (),
    **options: Any,
) -> list[T]:
    """``body(rank, device)`` on every rank of an in-memory group; ``watched``: these ranks' devices; None: all.

    Hooks come on autograd's device thread, which all ranks share: what waits for another rank in a hook needs
    ``own_thread``, by which hooks come on the rank's. ``schedules``: by rank, of its
    collectives; empty: each is seen as ended when it has. ``options``: of :func:`agmerge.testing.run`.
    """

    turn = Turn()

    def rank_body(rank: int) -> T:
        device = Device(is_watched=watched is None or rank in watched)
        device.use()
        workers.bind(DeviceBackend(workers.world(), device, turn, schedules[rank] if schedules else None))
        with turn.taken(), torch.autograd.set_multithreading_enabled(not own_thread):
            return body(rank, device)

    with streams.installed():
        return testing.run(size, rank_body, **options)
