# SPDX-License-Identifier: Apache-2.0
"""Side streams, in which an exchange works on devices beside the script's work and in order with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from agmerge.backends.streams import Streams, streams_of

ELSEWHERE = (
    "AGM703: Tensors are on {device}, which is not the current device of this process, so other libraries and pinned "
    "memory use {kind}:0 on every rank. Call torch.{kind}.set_device() first."
)


class SideStreams:
    """One stream for each device, in which all device work of an exchange is queued: backward goes on beside it.

    A gradient may be ready in any stream: :meth:`note` it there, then queue its readers :meth:`within`. Before results
    are read, or tensors freed that are read within, :meth:`join` is required. Without devices, or where their streams
    are not known, all methods do nothing.
    """

    def __init__(self) -> None:
        self._kinds: dict[torch.device, Streams] = {}  # of the devices that are served
        self._side: dict[torch.device, Any] = {}  # one of each device that ever was: allocators keep memory by stream
        self._noted: dict[torch.device, dict[int, Any]] = {}  # streams by their numbers, since `within`

    def serve(self, devices: Iterable[torch.device]) -> None:
        """Work on ``devices`` from now on, and on no others. Warns where this thread's own device is another one."""
        known = {device: streams_of(device) for device in devices}
        self._kinds = {device: kind for device, kind in known.items() if kind is not None}
        new = {device: kind for device, kind in self._kinds.items() if device not in self._side}
        if new and not any(kind.is_current(device) for device, kind in self._kinds.items()):
            device = next(iter(new))
            warnings.warn(ELSEWHERE.format(device=device, kind=device.type), stacklevel=2)
        for device, kind in new.items():
            self._side[device], self._noted[device] = kind.new(device), {}

    def note(self, device: torch.device) -> None:
        """Record the stream that this thread queues into now: tensors that are ready in it will be read."""
        kind = self._kinds.get(device)
        if kind is not None and (number := kind.number(device)) not in self._noted[device]:
            self._noted[device][number] = kind.current(device)

    def follow(self) -> None:
        """Make work queued within from now on wait for the noted streams, and for this thread's own.

        Also before memory that was allocated within is freed: other streams may have read it.
        """
        for device, kind in self._kinds.items():
            self.note(device)
            noted, self._noted[device] = self._noted[device], {}
            for stream in noted.values():
                kind.wait(self._side[device], kind.record(stream))

    def within(self) -> AbstractContextManager[None]:
        """Make this thread queue into the side streams inside the context, after :meth:`follow`."""
        return self._within() if self._kinds else nullcontext()

    @contextmanager
    def _within(self) -> Iterator[None]:
        self.follow()
        with ExitStack() as entered:
            for device, kind in self._kinds.items():
                entered.enter_context(kind.within(self._side[device]))
            yield

    def join(self) -> None:
        """Make work that this thread queues from now on wait for all that was queued within. The host does not wait."""
        for device, kind in self._kinds.items():
            kind.wait(kind.current(device), kind.record(self._side[device]))
