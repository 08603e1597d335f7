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

_of_script = 0.0  # seconds: of the process group that the script has made; 0: it has none; written by take_over alone
_is_chosen = False  # the script has given that time-out by itself; written by take_over alone

T = TypeVar("T")


def default() -> float:
    """Return the default time-out, seconds: ``AGMERGE_TIMEOUT``, else 300; that of the script's group if it is longer.

    Where ``AGMERGE_TIMEOUT`` is set, torch's own default of a group does not count. Raises ``ValueError`` for other
    text.
    """
    given = os.environ.get(VARIABLE)
    text = given or str(SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"{VARIABLE}={text!r}: expected a number of seconds > 0, and at most {LONGEST:g}")
    return max(seconds, _of_script) if _is_chosen or not given else seconds


def take_over(seconds: float, *, is_chosen: bool = False) -> None:
    """Record the time-out of the process group that the script has made; 0: it has none any more.

    A script whose rank 0 evaluates for long has chosen it for that. ``is_chosen``: it is not torch's default.
    """
    global _of_script, _is_chosen
    _of_script, _is_chosen = min(seconds, LONGEST), is_chosen


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
            errors.append(CollectiveTimeout(f"AGM201: {what}: no answer from all ranks within {timeout:.3g} s"))
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
