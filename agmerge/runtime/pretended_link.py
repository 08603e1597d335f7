# SPDX-License-Identifier: Apache-2.0
"""Link that is slower than the real one: a slow network on a laptop, without root.

``AGMERGE_LINK=200mbit`` holds back the collectives of whatever backend is opened, and ``agmerge.testing.link`` those of
ranks in memory. Each rank has a full-duplex port of that rate: a collective ends when the bytes that leave this rank in
it, by the usual algorithm (:mod:`agmerge.metrics.totals`), would have left, after those of the ones before.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from agmerge.backends import Backend, Handle
from agmerge.backends.base import DelegatingBackend
from agmerge.metrics import totals

VARIABLE = "AGMERGE_LINK"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bytes_a_second(rate: str) -> float:
    """Return the bytes a second of ``rate``, as ``tc`` writes it: ``"200mbit"``. Raises ``ValueError`` for others."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.strip().lower())
    if match is None or not float(match[1]):
        raise ValueError(
            f"{VARIABLE}={rate!r}: expected a number above 0 and one of {', '.join(UNITS)}, such as 200mbit"
        )
    return float(match[1]) * UNITS[match[2]] / 8


class Port:
    """Port of one rank, through which its bytes leave one after the other.

    ``rate``: bytes a second. ``now``, ``sleep``: the clock, in seconds.
    """

    def __init__(
        self, rate: float, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.now, self.sleep = now, sleep
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def send(self, size: int) -> float:
        """Return when ``size`` bytes that are handed over now will have left."""
        with self._lock:
            self._free = max(self._free, self.now()) + size / self._rate
            return self._free


class LinkedHandle(Handle):
    """Handle of a collective that ends with ``inner``, and not before ``at``, seconds of the port's clock."""

    def __init__(self, name: str, inner: Handle, port: Port, at: float) -> None:
        super().__init__(name)
        self._inner, self._port, self._at = inner, port, at

    def done(self) -> bool:
        return self._inner.done() and self._port.now() >= self._at

    def wait(self, timeout: float) -> None:
        """Return when the result is in place, and the link would have carried it. See :meth:`Handle.wait`."""
        self._inner.wait(timeout)
        left = self._at - self._port.now()
        if left > 0:
            self._port.sleep(left)

    def _wait(self, timeout: float) -> None:
        self.wait(timeout)


class LinkedBackend(DelegatingBackend):
    """Communicator with a pretended link. Those that are made from it share its port."""

    def __init__(self, inner: Backend, port: Port) -> None:
        super().__init__(inner)
        self._port = port

    def renewed(self) -> Backend:
        return LinkedBackend(self._inner.renewed(), self._port)

    def _around(self, made: Backend, ranks: Sequence[int]) -> Backend:
        return LinkedBackend(made, self._port)

    def _pass_on(
        self, call: str, name: str, tensor: torch.Tensor | None, out: torch.Tensor | None = None, **more: Any
    ) -> Handle:
        """Collective. Start a collective whose handle ends when the link would have carried it."""
        handle = super()._pass_on(call, name, tensor, out, **more)
        if tensor is None:
            return handle
        return LinkedHandle(name, handle, self._port, self._port.send(self._bytes(call, tensor, more)))

    def _bytes(self, call: str, tensor: torch.Tensor, more: Mapping[str, Any]) -> int:
        """Return the bytes that leave this rank in a collective; those that arrive, if these are more."""
        if call == "all_to_all":
            width = tensor.element_size()
            splits = more["splits"], more["out_splits"]
            return max(totals.all_to_all_bytes([width * length for length in each], self.rank) for each in splits)
        if call == "broadcast":
            return tensor.nbytes if self.size > 1 else 0
        if call == "all_gather":
            return totals.all_gather_bytes(tensor.nbytes, self.size)
        scatters = call == "reduce_scatter" and not self._inner.scatters_by_all_reduce(tensor)
        moved = totals.reduce_scatter_bytes if scatters else totals.all_reduce_bytes
        return moved(self._inner.summed_bytes(tensor), self.size)


def linked(backend: Backend, rate: str) -> Backend:
    """Return ``backend`` with a pretended link of ``rate``, as :func:`bytes_a_second` reads it; empty: as it is."""
    return LinkedBackend(backend, Port(bytes_a_second(rate))) if rate else backend
