# SPDX-License-Identifier: Apache-2.0
"""Carry tensors of devices through the host's memory, for backends that move tensors of the CPU alone.

MPI, Gloo without NCCL, and a Horovod that was built without NCCL are such backends. A call copies its input down to
pinned memory, on the stream that is current where it is made, and returns. A thread takes the calls in their order,
which is plan order: it starts each on the backend when its copy has arrived, and queues the copies up on the same
stream when the backend has ended. So a hook waits for nothing, and the order of calls does not depend on a device.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from agmerge.backends import streams
from agmerge.backends.base import Backend, DelegatingBackend, Handle
from agmerge.backends.streams import Call, Progress, Streams, streams_of
from agmerge.errors import AGMergeError, CollectiveTimeout

ENDED = 1.0  # seconds, for the wait for a call that is known to have ended
SHORTEST = 1e-3  # seconds: to some libraries 0 means for ever
SLOW = (
    "AGM703: The backend {name!r} has no NCCL, so tensors on {device} are copied through host memory, twice for each "
    "message. `python -m agmerge doctor` shows how GPU tensors are sent."
)


class Copies:
    """Copies between devices and the host, without waiting. Tests have another class, of late copies.

    Memory of the host is pinned, and comes from torch's cache of such memory: after the first steps nothing is
    allocated, and freed memory is not taken again before the copies that use it have ended.
    """

    def needed(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies on a device."""
        return tensor.device.type != "cpu"

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory of the host for ``tensor``, of its shape and dtype."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def stream(self, tensor: torch.Tensor) -> Any:
        """Return the stream that is current for the device of ``tensor`` on this thread."""
        return _streams(tensor.device).current(tensor.device)

    def copy(self, to: torch.Tensor, source: torch.Tensor, device: torch.device, stream: Any) -> Any:
        """Queue a copy on ``stream`` of ``device``, where one of the tensors lies; return the event behind it."""
        device_streams = _streams(device)
        with device_streams.within(stream):
            to.copy_(source, non_blocking=True)
        return device_streams.record(stream)

    def wait_on_host(self, device: torch.device, event: Any) -> None:
        """Wait until ``device`` has got to ``event``."""
        _streams(device).wait_on_host(event, float("inf"))

    def join(self, tensor: torch.Tensor, event: Any) -> None:
        """Make the current stream of ``tensor``'s device wait for ``event``; the host does not wait."""
        _streams(tensor.device).wait(self.stream(tensor), event)


def _streams(device: torch.device) -> Streams:
    """Return the streams of a device; raise :class:`agmerge.AGMergeError` for a kind that has none here."""
    known = streams_of(device)
    if known is None:
        raise AGMergeError(f"AGM306: Tensors on {device} are not supported. Move them to the CPU, or to a CUDA GPU.")
    return known


class Queued:
    """Collective that the thread starts, by ``call()``, when its turn has come.

    The thread finishes it, as soon as that sees its end, or else a caller that waits for it: some calls of Gloo's end
    only where they are waited for.
    """

    def __init__(self, call: Callable[[], Handle]) -> None:
        self._call = call
        self._handle: Handle | None = None  # of the backend, once it has been started
        self._finishing = threading.Lock()  # held to look at the handle: its methods are not for two threads
        self._finished = False
        self._error: Exception | None = None  # of its end

    @property
    def finished(self) -> bool:
        """Return whether the result is there, or queued on the device."""
        return self._finished

    def on_host(self, out: torch.Tensor) -> torch.Tensor:
        """Return the result in the host's memory, once it is finished."""
        return out

    def begin(self) -> Queued:
        """Start it. On the thread only."""
        self._handle = self._call()
        return self

    def Test(self) -> bool:  # the name is Progress's
        """Return whether it is finished; raise its error. On the thread only."""
        assert self._handle is not None
        if not self._finishing.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            if not self._finished and self._handle.done():
                self._finish(self._handle, ENDED)
            return self._finished
        finally:
            self._finishing.release()

    def result(self, timeout: float) -> None:
        """Wait for it, up to ``timeout`` seconds, once it has begun; work queued later comes behind its result."""
        assert self._handle is not None
        with self._finishing:
            if self._error is not None:  # some handles say it once
                raise self._error
            if not self._finished:
                self._finish(self._handle, timeout)

    def _finish(self, handle: Handle, timeout: float) -> None:
        """Wait for the backend, up to ``timeout`` seconds."""
        # Not wait(): our own handle records the phase of this rank, and asks peers where it fails.
        try:
            handle._wait(timeout)
            self._deliver()
        except Exception as error:
            self._error = error
            raise
        self._finished = True

    def _deliver(self) -> None:
        """Copy the result to where it belongs; here it is there already."""


class Staged(Queued):
    """Collective of tensors on a device, from the copy down, which is queued at once, to the copy up.

    ``call``: starts it on the backend, given the twins of ``tensor`` and ``out``. ``out`` None: it is in place.
    """

    def __init__(
        self, copies: Copies, call: Callable[..., Handle], tensor: torch.Tensor, out: torch.Tensor | None
    ) -> None:
        self._copies, self._device, self._stream = copies, tensor.device, copies.stream(tensor)
        twin = copies.twin(tensor)
        self._down = copies.copy(twin, tensor, self._device, self._stream)
        self._out = tensor if out is None else out  # where the result is copied to
        twin_out = None if out is None else copies.twin(out)
        self._result = twin if twin_out is None else twin_out  # nothing writes to it any more, once it is there
        self._up: Any = None  # the event behind the result
        super().__init__(partial(call, twin, twin_out))

    def begin(self) -> Queued:
        self._copies.wait_on_host(self._device, self._down)  # later ones wait too: calls keep their order
        return super().begin()

    def _deliver(self) -> None:
        self._up = self._copies.copy(self._out, self._result, self._device, self._stream)

    def result(self, timeout: float) -> None:
        super().result(timeout)
        self._copies.join(self._out, self._up)

    def on_host(self, out: torch.Tensor) -> torch.Tensor:
        return self._result


class StagedHandle(Handle):
    """Handle of a collective on the thread. In ``wait`` the host waits for the other ranks, never for the device."""

    def __init__(self, call: Call, queued: Queued, name: str, ranks: Sequence[int]) -> None:
        super().__init__(name, ranks)
        self._call, self._queued = call, queued

    def done(self) -> bool:
        return self._queued.finished or self._call.ended.is_set()

    def on_host(self, out: torch.Tensor) -> torch.Tensor:
        return self._queued.on_host(out)

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if not self._call.begun.wait(timeout):
            raise CollectiveTimeout(
                f"AGM201: {self._name}: its tensors were not copied from the device within {timeout:g} s"
            )
        if self._call.error is not None:
            raise self._call.error
        self._queued.result(max(deadline - time.monotonic(), SHORTEST))


class Line:
    """Thread that all communicators of one backend share. ``name``: the backend's."""

    def __init__(self, name: str, copies: Copies) -> None:
        self.name, self.copies = name, copies
        self._progress: Progress | None = None  # from the first tensor of a device on

    def start(self, queued: Queued, device: torch.device | None) -> Call:
        """Hand ``queued`` to the thread, behind all earlier ones. ``device``: for the warning, which is given once."""
        if self._progress is None:
            if not streams.gpus_are_shared():  # then rank 0 has said so
                warnings.warn(SLOW.format(name=self.name, device=device), stacklevel=3)
            self._progress = Progress(f"agmerge {self.name} staging")
        return self._progress.start(queued.begin)


class StagedBackend(DelegatingBackend):
    """Backend that calls ``inner``: with the host's tensors as they are, with a device's through the host's memory.

    ``ranks``: those of ``inner``, by their numbers in the world.
    """

    def __init__(self, inner: Backend, line: Line, ranks: Sequence[int]) -> None:
        super().__init__(inner)
        self._line, self._ranks = line, list(ranks)
        self._last: Call | None = None  # the last one of this communicator on the thread

    @property
    def through_host(self) -> bool:
        return False  # it takes tensors of devices

    def renewed(self) -> Backend:
        return _root(self._inner.renewed(), self._line)

    def scatters_by_all_reduce(self, tensor: torch.Tensor) -> bool:
        moves = self._line.copies.needed(tensor)
        return self._inner.scatters_by_all_reduce(torch.empty(0, dtype=tensor.dtype) if moves else tensor)

    def _around(self, made: Backend, ranks: Sequence[int]) -> Backend:
        return StagedBackend(made, self._line, [self._ranks[rank] for rank in ranks])

    def _pass_on(
        self, call: str, name: str, tensor: torch.Tensor | None, out: torch.Tensor | None = None, **more: Any
    ) -> Handle:
        """Collective. Start a collective behind those before it: at once unless one of them has to be copied."""
        pass_on = super()._pass_on

        def start(tensor: torch.Tensor | None, out: torch.Tensor | None) -> Handle:
            return pass_on(call, name, tensor, out, **more)

        if tensor is not None and self._line.copies.needed(tensor):
            queued: Queued = Staged(self._line.copies, start, tensor, out)
        elif self._last is None or self._last.begun.is_set():
            return start(tensor, out)
        else:
            queued = Queued(partial(start, tensor, out))
        self._last = self._line.start(queued, None if tensor is None else tensor.device)
        return StagedHandle(self._last, queued, name, self._ranks)


def staged(backend: Backend, line: Line | None = None) -> Backend:
    """Return ``backend``, able to take tensors of devices too where there are any.

    ``line``: the thread of communicators that ``backend`` replaces; None: one of its own.
    """
    if not (backend.through_host and torch.cuda.is_available()):
        return backend
    return _root(backend, line or Line(backend.name, Copies()))


def _root(backend: Backend, line: Line) -> StagedBackend:
    """Return the communicator of all workers, with calls through ``line``."""
    return StagedBackend(backend, line, range(backend.size))
