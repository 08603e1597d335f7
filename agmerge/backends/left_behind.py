# SPDX-License-Identifier: Apache-2.0
"""Process groups that are used no more, with collectives under way: destroyed when these have ended.

Gloo's destructor waits for them, perhaps for a worker that is lost, up to its time-out. Not to destroy a group at all
costs five open files and three threads, and an elastic job leaves several of them behind at each change.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable
from typing import Any

# (group, works under way when it was left). Each is referred to once more than Python knows of: at the end of the
# process it is not destroyed. Without a lock: a destructor may leave a group at any moment, on any thread.
_left: deque[tuple[Any, list[Any]]] = deque()


def leave(group: Any, works: Iterable[Any]) -> None:
    """Drop a process group of torch's, now or when its ``works`` have ended. The caller keeps no reference to it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _left.append((group, list(works)))
    release()


def release() -> None:
    """Destroy those groups of which all works have ended; how long that takes does not depend on other workers."""
    for _ in range(len(_left)):
        try:
            entry = _left.popleft()
        except IndexError:  # another thread has it
            return
        if all(work.is_completed() for work in entry[1]):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(entry[0]))
        else:
            _left.append(entry)


def count() -> int:
    """Return how many groups are left behind now."""
    return len(_left)
