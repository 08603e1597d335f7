"""Queue what an exchange does on devices beside what the script does there, and in order with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from agmerge.backends.streams import Streams, streams_of


class SideStreams:
    """Hold one stream for each device, in which all that an exchange does there is queued: backward goes on beside it.

    A gradient may be ready in any stream: :meth:`note` it there, then do :meth:`within` what reads it. Whoever reads
    what was written within, or lets go of what is read there, has to :meth:`join` first. Without devices, or where
    their streams are not known, all of this does nothing.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        known = {device: streams_of(device) for device in devices}
        self._kinds: dict[torch.device, Streams] = {device: kind for device, kind in known.items() if kind is not None}
        self._side = {device: kind.new(device) for device, kind in self._kinds.items()}
        self._noted: dict[torch.device, list[Any]] = {device: [] for device in self._kinds}  # streams, since `within`

    def note(self, device: torch.device) -> None:
        """Remember the stream that this thread queues into now: what is ready in it will be read."""
        kind = self._kinds.get(device)
        if kind is not None and (stream := kind.current(device)) not in self._noted[device]:
            self._noted[device].append(stream)

    def follow(self) -> None:
        """Let what is queued within from now on wait for the streams that were noted, and for this thread's own.

        Also before what was allocated within is let go of: others may have read it.
        """
        for device, kind in self._kinds.items():
            self.note(device)
            noted, self._noted[device] = self._noted[device], []
            for stream in noted:
                kind.wait(self._side[device], kind.record(stream))

    def within(self) -> AbstractContextManager[None]:
        """Let this thread queue into the side streams, see :meth:`follow`."""
        return self._within() if self._kinds else nullcontext()

    @contextmanager
    def _within(self) -> Iterator[None]:
        self.follow()
        with ExitStack() as entered:
            for device, kind in self._kinds.items():
                entered.enter_context(kind.within(self._side[device]))
            yield

    def join(self) -> None:
        """Let what this thread queues from now on wait for all that was queued within. The host does not wait."""
        for device, kind in self._kinds.items():
            kind.wait(kind.current(device), kind.record(self._side[device]))
