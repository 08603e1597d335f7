"""The end of a process whose exchange is broken: never a wait for ranks that do not come.

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
from types import TracebackType

from agmerge.backends import status
from agmerge.runtime.peers import monitor

GRACE = 4  # seconds from the end of the script to the end of the process

_prepared = False
_raised = False  # the script has ended with an error, and there are other ranks
_trains = 0  # the thread that has called init()


def prepare() -> None:
    """See to it that the process will end. Called after a backend was opened, so that it acts before the backend does.

    Handlers of ``atexit`` that were registered later run before it, and take the time they take.
    """
    global _prepared, _trains
    _trains = threading.get_ident()
    atexit.unregister(_leave)
    atexit.register(_leave)
    if not _prepared:
        _prepared = True
        _tell_of_errors()


def _leave() -> None:
    if status.lost or _raised:
        faulthandler.dump_traceback_later(GRACE, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(GRACE + 1)  # the other one does not outlive the interpreter
    else:
        monitor.ended("came to the end of its script")
    monitor.close()


def _raises(error: BaseException) -> None:
    """The script ends with ``error``."""
    global _raised
    _raised = _raised or monitor.is_open()
    monitor.raised(error)


def _tell_of_errors() -> None:
    before, before_in_threads = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _raises(error)
        before(kind, error, trace)

    def hook_in_threads(given: threading.ExceptHookArgs) -> None:
        ended = given.thread is not None and given.thread.ident in (_trains, status.here().thread)
        if ended and given.exc_value is not None and not isinstance(given.exc_value, SystemExit):
            _raises(given.exc_value)  # of another thread it says nothing about the exchange
        before_in_threads(given)

    sys.excepthook, threading.excepthook = hook, hook_in_threads
    if multiprocessing.parent_process() is not None:
        from multiprocessing import util

        # In its children an error reaches no hook: it is on its way through this when it is printed, or handed on.
        util.Finalize(None, _leave_child, exitpriority=100)


def _leave_child() -> None:
    """Before a child of multiprocessing ends, whose end runs no handlers of ``atexit`` after a fork."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code else None  # torch.multiprocessing.spawn has caught it, and exits
    if error is not None:
        _raises(error)
    else:
        monitor.ended("came to the end of its script")
