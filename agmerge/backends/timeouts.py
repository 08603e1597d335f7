# SPDX-License-Identifier: Apache-2.0
"""Default time-out of waits, and deadlines for calls of libraries that know none."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from agmerge.backends import status
from agmerge.errors import CollectiveTimeout, NoAnswer

VARIABLE = "AGMERGE_TIMEOUT"
SECONDS = 300.0
LONGEST = 1e9  # seconds, 31 years: clocks of the system overflow with more

T = TypeVar("T")


def default() -> float:
    """Return the default time-out, seconds: ``AGMERGE_TIMEOUT``, else 300. Raises ``ValueError`` for other text."""
    text = os.environ.get(VARIABLE) or str(SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"{VARIABLE}={text!r}: give a number of seconds > 0, and at most {LONGEST:g}")
    return seconds


def on_thread(call: Callable[[], T], name: str) -> tuple[threading.Thread, list[T], list[BaseException]]:
    """Start ``call()`` on a thread of its own; return it, and two lists: its result will be in one, or its error."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread, results, errors


def bounded(call: Callable[[], T], timeout: float, what: str, advice: str = "") -> T:
    """Return the result of ``call()``, or raise its error.

    Raises :class:`agmerge.CollectiveTimeout` after ``timeout`` seconds. The call runs on a thread of its own, which is
    left behind then. ``what``: its name, for errors. ``advice``: what to do, for the error where a rank is missing.
    """
    thread, results, errors = on_thread(call, f"agmerge {what}")
    with status.waiting_for(what, ()):
        thread.join(timeout)
        if not errors and not results:
            errors.append(CollectiveTimeout(f"{what}: no answer from all ranks within {timeout:.3g} s"))
        if errors and isinstance(errors[0], NoAnswer):
            errors[0].advise(advice)
        if errors:
            raise errors[0]
    return results[0]


@contextmanager
def or_die(timeout: float, armed: bool) -> Iterator[None]:
    """Print a traceback and end the process, if ``armed``, when the body takes more than ``timeout`` seconds.

    For a body that keeps every other thread of Python from running.
    """
    if armed:
        faulthandler.dump_traceback_later(timeout, exit=True, file=2)
    try:
        yield
    finally:
        if armed:
            faulthandler.cancel_dump_traceback_later()
