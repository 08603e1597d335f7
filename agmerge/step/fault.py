"""Error that has ended an exchange: after it ranks are at different places, and nothing can be exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agmerge.errors import AGMergeError


class Fault:
    """The error that has ended an exchange; none at first."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __bool__(self) -> bool:
        return self._error is not None

    def record(self, error: BaseException | None) -> None:
        """Record an error, after which :meth:`check` raises; None: there is none, in another group."""
        self._error = error

    def check(self) -> None:
        """Raise :class:`agmerge.AGMergeError` if an error has ended the exchange."""
        if self._error is not None:
            raise AGMergeError(f"an earlier error ended this exchange: {self._error}") from self._error

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record an error that leaves the block, and let it pass."""
        try:
            yield
        except BaseException as error:
            self._error = error
            raise
