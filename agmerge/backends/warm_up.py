# SPDX-License-Identifier: Apache-2.0
"""Connect the ranks of a communicator before its first message, where a library would do so during that.

NCCL makes a communicator at the first call on a device, and connections at the first call of a kind. For that it
allocates memory, which may wait until all kernels of the device have ended. In a hook some of these wait for other
ranks, which may wait for this one to be connected: ranks would wait in a circle.

Source: NCCL's manual, "Using multiple NCCL communicators concurrently"; its variable ``NCCL_RUNTIME_CONNECT``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from agmerge.backends.base import Backend, Handle

NAME = "warm-up"


def warm_up(comm: Backend, devices: Iterable[torch.device], timeout: float) -> None:
    """Collective. Make one small call of each kind over ``comm`` on each of ``devices``, and wait for it.

    ``devices``: outside the host's memory, as many on each rank, in the same order. To be called where nothing is under
    way on them, for all communicators in the same order on all ranks. ``timeout``: seconds, for each call.
    """
    if comm.size == 1:
        return
    for device in devices:
        for handle in _calls(comm, device):
            handle.wait(timeout)


def _calls(comm: Backend, device: torch.device) -> Iterator[Handle]:
    """Collective. Start the calls that exchanges make, each when the next one is asked for."""
    row, rows, each = torch.zeros(1, device=device), torch.zeros(comm.size, device=device), [1] * comm.size
    yield comm.all_reduce(row, f"{NAME}/sum")
    yield comm.reduce_scatter(row, rows, f"{NAME}/scatter")
    yield comm.all_gather(rows, row, f"{NAME}/gather")
    yield comm.all_to_all(torch.zeros_like(rows), rows, each, each, f"{NAME}/all to all")
