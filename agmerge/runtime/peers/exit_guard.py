# SPDX-License-Identifier: Apache-2.0
"""End a process after its exchange broke: never wait for ranks that do not come.

At their end Gloo, MPI and Horovod wait for their threads, and those for the other ranks. Once a wait has failed
here, or the script has ended with an error, the process gets a few seconds to end by itself; then it is ended, with
status 1 or, where no thread may exit any more, by SIGALRM.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from types import TracebackType

from agmerge.backends import status
from agmerge.runtime.peers import monitor

GRACE = 4  # seconds from the end of the script to the end of the process
NORMAL_END = "came to the end of its script"

# Of this process, as hooks of the interpreter are; each has one writer.
_installed = False  # the hooks are in place; written by install()
_main_thread = 0  # identity of the thread that has called init(); written by install()
_script_failed = False  # the script has ended with an error, and there are other ranks; written by _tell_of_failure()


def install() -> None:
    """Ensure that this process will end, and that others hear of an error of its script.

    Called after a backend was opened, so that it acts before the backend does: handlers of ``atexit`` run in the
    reverse order. Those that are registered later run before it, and take the time they take. May be called again.
    """
    global _installed, _main_thread
    _main_thread = threading.get_ident()
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    if not _installed:
        _installed = True
        _watch_for_errors()


def _at_exit() -> None:
    """Tell the others that the script has ended; where the exchange is broken, end the process after ``GRACE``."""
    if status.any_wait_failed() or _script_failed:
        with suppress(OSError):  # too many open files; the alarm below needs none
            faulthandler.dump_traceback_later(GRACE, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(GRACE + 1)  # the other one does not outlive the interpreter
    else:
        monitor.ended(NORMAL_END)
    monitor.close()


def _tell_of_failure(error: BaseException) -> None:
    """Tell the other ranks that the script ends with ``error``."""
    global _script_failed
    _script_failed = _script_failed or monitor.is_open()
    monitor.raised(error)


def _watch_for_errors() -> None:
    """Hook into the ends of the script by an error: of the main thread, of the training thread, of a child process."""
    before, before_in_threads = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _tell_of_failure(error)
        before(kind, error, trace)

    def hook_in_threads(given: threading.ExceptHookArgs) -> None:
        trains = given.thread is not None and given.thread.ident in (_main_thread, status.current().thread)
        if trains and given.exc_value is not None and not isinstance(given.exc_value, SystemExit):
            _tell_of_failure(given.exc_value)  # of another thread it says nothing about the exchange
        before_in_threads(given)

    sys.excepthook, threading.excepthook = hook, hook_in_threads
    if multiprocessing.parent_process() is not None:
        from multiprocessing import util

        # In its children an error reaches no hook: it passes through this when it is printed, or handed on.
        util.Finalize(None, _at_exit_of_child, exitpriority=100)


def _at_exit_of_child() -> None:
    """Tell the others how a child of multiprocessing ends: after a fork it runs no handlers of ``atexit``."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code else None  # torch.multiprocessing.spawn has caught it, and exits
    if error is not None:
        _tell_of_failure(error)
    else:
        monitor.ended(NORMAL_END)
