"""Tell the outermost of nested calls of an optimizer's step, so that what follows it is done once.

torch runs the hooks of a step around the ``step`` of every class of which there has been an object. So where a subclass
calls ``super().step()`` they run twice, or once: that depends on what else the process has made.
"""

from __future__ import annotations

import sys
from types import FrameType


class OutermostStep:
    """The call of one optimizer's ``step`` that is under way, known by its frame.

    A step that raises has no hook behind it, so calls cannot be counted: a frame that is no caller any more has ended.
    """

    def __init__(self) -> None:
        self._frame: FrameType | None = None  # of the call that runs hooks; None: there is none under way

    def begins(self) -> bool:
        """Return whether the step that begins is in no other one. Called by a hook before it, and by nothing else."""
        calling = _hook_runner()
        outer = calling.f_back
        while self._frame is not None and outer is not None:
            if outer is self._frame:
                return False
            outer = outer.f_back
        self._frame = calling
        return True

    def ends(self) -> bool:
        """Return whether the step that ends was in no other one. Called by a hook behind it, and by nothing else."""
        if self._frame is not _hook_runner():
            return False
        self._frame = None
        return True


def _hook_runner() -> FrameType:
    """Return the frame that has called the hook that has called a method above."""
    return sys._getframe(3)
