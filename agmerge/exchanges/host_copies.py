# SPDX-License-Identifier: Apache-2.0
"""Move a few numbers between the host and a device, so that neither waits for the other before it has to.

A copy that the host need not wait for is one of pinned memory. torch gives such memory away again only when the copies
of it that were queued have ended, so nothing here has to outlive them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from agmerge.backends.streams import Streams, streams_of


def write(numbers: Sequence[float], out: Tensor) -> None:
    """Write ``numbers`` into ``out``, 1-D; the host does not wait, if the streams of the device are known."""
    values = torch.tensor(numbers, dtype=out.dtype)
    streams = None if out.device.type == "cpu" else streams_of(out.device)
    if streams is None:
        out.copy_(values)
    else:
        out.copy_(streams.pinned(len(numbers), out.dtype).copy_(values), non_blocking=True)


class HostCopies:
    """Copy of tensors of one device on the host: one transfer, queued at once, and waited for at most once."""

    def __init__(self, tensors: Sequence[Tensor], streams: Streams) -> None:
        """Queue the copy of ``tensors``, contiguous or with contiguous rows, in the device's current stream."""
        self._tensors, self._streams = tensors, streams
        rows = [row for tensor in tensors for row in ([tensor] if tensor.is_contiguous() else tensor.unbind(0))]
        together = torch.cat([row.view(-1).view(torch.uint8) for row in rows])
        self._bytes = streams.pinned(together.numel(), torch.uint8).copy_(together, non_blocking=True)
        self._event = streams.record(streams.current(together.device))

    def arrive(self, timeout: float) -> bool:
        """Wait until the host has them, for at most ``timeout`` seconds; return whether it has."""
        return self._streams.wait_on_host(self._event, timeout)

    def tensors(self) -> list[Tensor]:
        """Return them on the host, each in its shape, once they have arrived."""
        ends = itertools.accumulate(tensor.nbytes for tensor in self._tensors)
        return [
            self._bytes[end - tensor.nbytes : end].clone().view(tensor.dtype).view(tensor.shape)
            for tensor, end in zip(self._tensors, ends, strict=True)
        ]
