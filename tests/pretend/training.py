"""Train on pretended devices: ranks are threads, each with a device of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from agmerge import testing
from agmerge.runtime import workers
from pretend import streams
from pretend.device import Device
from pretend.nccl import DeviceBackend

T = TypeVar("T")


def on_devices(size: int, body: Callable[[int, Device], T], *, own_thread: bool = False, **options: Any) -> list[T]:
    """``body(rank, device)`` on every rank of an in-memory group.

    Hooks come on autograd's device thread, which all ranks share: what waits for another rank in a hook needs
    ``own_thread``, by which hooks come on the rank's. ``options``: of :func:`agmerge.testing.run`.
    """

    def rank_body(rank: int) -> T:
        device = Device()
        device.use()
        workers.bind(DeviceBackend(workers.world(), device))
        with torch.autograd.set_multithreading_enabled(not own_thread):
            return body(rank, device)

    with streams.installed():
        return testing.run(size, rank_body, **options)
