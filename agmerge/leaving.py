"""The end of a process whose exchange is broken: never a wait for ranks that do not come.

At their end Gloo, MPI and Horovod wait for their threads, and those for the other ranks. Once a wait has failed
here, or the script has ended with an error, the process gets a few seconds to end by itself; then it is ended, with
status 1 or, where no thread may exit any more, by SIGALRM.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
from types import TracebackType

from agmerge import rollcall, whereabouts

GRACE = 4  # seconds from the end of the script to the end of the process

_prepared = False
_raised = False  # the script has ended with an error, and there are other ranks


def prepare() -> None:
    """See to it that the process will end. Called after a backend was opened, so that it acts before the backend does.

    Handlers of ``atexit`` that were registered later run before it, and take the time they take.
    """
    global _prepared
    atexit.unregister(_leave)
    atexit.register(_leave)
    if not _prepared:
        _prepared = True
        _tell_of_errors()


def _leave() -> None:
    if whereabouts.lost or _raised:
        faulthandler.dump_traceback_later(GRACE, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(GRACE + 1)  # the other one does not outlive the interpreter
    rollcall.close()


def _tell_of_errors() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _raised
        _raised = rollcall.is_open()
        rollcall.raised(error)
        before(kind, error, trace)

    sys.excepthook = hook
