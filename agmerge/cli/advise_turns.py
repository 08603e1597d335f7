# SPDX-License-Identifier: Apache-2.0
"""Turns of compressors in the steps of a training script: each has some steps, several times, and is timed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from agmerge.cli.advise_updates import takes_updates
from agmerge.options.defaults import candidates_for, sparsifier_for
from agmerge.step.updates import UPDATES

WARM = 3  # steps before anything is timed: first touches of memory, first connections
TURN = 4  # steps of a turn that are timed; one before them is not
ROUNDS = 2  # turns of each compressor
# By name, beside the default's, with the density or the rank that their cost in loss is of.
OTHERS: dict[str, float | None] = {"eden-1": None, "topk": 0.01, "dgc": 0.01, "acpsgd": 4}
# What these, and updates, are for: the end of "To ...".
USES = {
    "eden-1": "halve the traffic of 2 bits",
    "topk": "send 1 % of each gradient",
    "dgc": "send very little with SGD and momentum",
    "acpsgd": "send low-rank factors of large matrices",
    UPDATES: "send very little with AdamW",
}
STEPS = (1 + WARM) + ROUNDS * 9 * (1 + TURN)  # at most


class Enough(BaseException):
    """Signal that ends a script with measured steps. No error, and not for ``except Exception`` to catch."""


class Swappable(Protocol):
    """Whatever exchanges gradients, with a compressor that can be changed between steps."""

    def set_compressor(self, compression: Any, **options: Any) -> None:
        """Collective. Compress otherwise from the next step on."""


class Turns:
    """Turns of one script: of the script as it is, of updates, then of gradients by compressor.

    ``begin``: puts an exchange of gradients in place of the script's, for good, and returns it. ``updates``: puts one
    of updates there for a while; None: it cannot.

    ``tell``: is given, after each turn, the compressor and the seconds of its steps.

    ``seconds``: of the timed steps on this rank, by compressor; ``""``: as the script was, if ``as_it_is`` was timed,
    and ``UPDATES``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        begin: Callable[[torch.optim.Optimizer], Swappable],
        updates: Callable[[torch.optim.Optimizer], AbstractContextManager[None]] | None = None,
        *,
        as_it_is: bool = True,
        tell: Callable[[str, list[float]], None] = lambda name, seconds: None,
    ) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.defaults = candidates_for(optimizer)
        left_out = "dgc" if sparsifier_for(optimizer) == "topk" else "topk"
        self._names = [*self.defaults, *(name for name in OTHERS if name not in (left_out, *self.defaults))]
        self._begin, self._as_it_is, self._tell = begin, as_it_is, tell
        self._updates = updates if takes_updates(optimizer) else None
        self._story = self._in_turns(optimizer)
        next(self._story)

    def step(self) -> bool:
        """Count a step that has ended; return whether all turns are over. The same on all ranks."""
        return next(self._story, True) is True

    def _in_turns(self, optimizer: torch.optim.Optimizer) -> Iterator[bool]:
        """Yield False until the next step has ended."""
        yield from self._timed(WARM, None)
        for _ in range(ROUNDS):
            if self._as_it_is:
                yield from self._turn("")
            if self._updates is not None:
                with self._updates(optimizer):
                    yield from self._turn(UPDATES)
        exchange = self._begin(optimizer)
        for _ in range(ROUNDS):
            for name in self._names:
                exchange.set_compressor(name)
                yield from self._turn(name)

    def _turn(self, name: str) -> Iterator[bool]:
        """Yield False until the steps of a turn have ended."""
        seconds = self.seconds.setdefault(name, [])
        yield from self._timed(TURN, seconds)
        self._tell(name, seconds[-TURN:])

    def _timed(self, steps: int, seconds: list[float] | None) -> Iterator[bool]:
        """Yield False until so many steps have ended, and one before them; note how long they took."""
        yield False
        for _ in range(steps):
            began = time.perf_counter()
            yield False
            if seconds is not None:
                seconds.append(time.perf_counter() - began)


def leave_out_notices() -> None:
    """Hide this library's warnings from now on: they are about compressors that the script has not named itself."""
    warnings.filterwarnings("ignore", message=r"AGM\d{3}: ")
