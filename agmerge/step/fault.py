# SPDX-License-Identifier: Apache-2.0
"""Error that has ended an exchange: after it ranks are at different places, and nothing can be exchanged.

In an elastic group a lost rank ends nothing: the others meet in the next group, and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agmerge.errors import AGMergeError, NoAnswer


class Fault:
    """The error that has ended an exchange; none at first. ``abort``: called where a rank is missing.

    ``survives``: the others go on without a rank that is missing: see ``lost``.
    """

    def __init__(self, abort: Callable[[], None], *, survives: bool = False) -> None:
        self.lost: NoAnswer | None = None  # in an elastic group: a rank is missing, and nothing can be sent in it
        self._error: BaseException | None = None
        self._abort, self._survives = abort, survives

    def __bool__(self) -> bool:
        return self._error is not None

    def record(self, error: BaseException | None) -> None:
        """Record an error, after which :meth:`check` raises; None: there is none, in another group."""
        self.lost = None
        if isinstance(error, NoAnswer):
            self._abort()
            if self._survives:
                self.lost = error
                return
        self._error = error

    def check(self) -> None:
        """Raise :class:`agmerge.AGMergeError` if an error has ended the exchange."""
        if self._error is not None:
            raise AGMergeError(f"AGM124: An earlier error ended this exchange: {self._error}") from self._error

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record an error that leaves the block, and let it pass."""
        try:
            yield
        except BaseException as error:
            self.record(error)
            raise

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Record an error that leaves the block, and let it pass, unless the next exchange goes on without the lost."""
        try:
            with self.recording():
                yield
        except NoAnswer:
            if self.lost is None:
                raise
