# SPDX-License-Identifier: Apache-2.0
"""Headers of a round's messages on devices, brought to the host in one wait.

Until then only the devices wait for the messages and write their updates: the host merely queues that. No result is
visible, for an update becomes a gradient only after all headers were checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from agmerge.backends import status
from agmerge.backends.streams import streams_of
from agmerge.errors import CollectiveTimeout
from agmerge.exchanges import InFlight
from agmerge.exchanges.host_copies import HostCopies


def said_by_all(messages: Iterable[InFlight], timeout: float) -> dict[int, list[torch.Tensor]]:
    """Return the tensors that :meth:`Exchange.read` takes for each message, on the host, by the message's ``id``.

    ``messages``: in plan order, each with all of ``said``. Their devices wait for them already; here the host waits,
    with the deadline: raises :class:`agmerge.CollectiveTimeout` after ``timeout`` seconds, which names the first
    missing message.
    """
    by_device: dict[torch.device, list[InFlight]] = {}
    for message in messages:
        by_device.setdefault(message.message.device, []).append(message)
    copies = []
    for device, group in by_device.items():
        streams = streams_of(device)
        assert streams is not None, f"{group[0].name}: {device} was not told to wait"
        copies.append(HostCopies([part for message in group for part in message.said], streams))
    found: dict[int, list[torch.Tensor]] = {}
    deadline = time.monotonic() + timeout
    for group, copy in zip(by_device.values(), copies, strict=True):
        with status.waiting_for(group[0].name, ()):
            if not copy.arrive(deadline - time.monotonic()):
                missing = next((message for message in group if not message.handle.done()), group[-1])
                raise CollectiveTimeout(f"AGM201: {missing.name}: no answer from all ranks within {timeout:g} s")
        parts = iter(copy.tensors())
        found |= {id(message): [next(parts) for _ in message.said] for message in group}
    return found
