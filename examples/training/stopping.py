# SPDX-License-Identifier: Apache-2.0
"""Let workers agree to end after the same step, where a signal asks one of them to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

import agmerge

# Of a user or a cluster, and of launchers that would not wait: Open MPI hands on the second one as it is.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PATIENCE = 1.0  # seconds between two agreements, about
MOST = 100  # steps between them, at most


class Stopping:
    """Note a signal, and agree on it with the other workers every so many steps."""

    def __init__(self) -> None:
        self._asked = False
        self._next = 0  # the step of the next agreement, the same on all workers

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note SIGTERM and SIGUSR1, inside, instead of ending at once."""
        before = {number: signal.signal(number, self.note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note the signal ``number``: a handler for :func:`signal.signal`."""
        self._asked = True

    def agreed(self, step: int, seconds: float, at_once: bool = False) -> bool:
        """Collective. Tell whether any worker was asked to end; workers communicate at few steps.

        step: how many were made, the same on all workers. seconds: what a step takes here, by which the next
        agreement is about a second ahead. at_once: communicate now, on all workers.
        """
        if step < self._next and not at_once:
            return False
        row = torch.tensor([float(self._asked), seconds], dtype=torch.float64)
        asked, mean = agmerge.allreduce(row, name="stopping").tolist()
        self._next = step + min(MOST, max(1, int(PATIENCE / max(mean, 1e-6))))
        return asked > 0
