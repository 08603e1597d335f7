# SPDX-License-Identifier: Apache-2.0
"""Detect the outermost of nested calls of an optimizer's step, so that later actions happen once.

torch runs the hooks of a step around the ``step`` of every class of which there has been an object. So where a subclass
calls ``super().step()`` they run twice, or once, depending on the other optimizers that the process has made.
"""

from __future__ import annotations

import sys
from types import FrameType


class OutermostStep:
    """Call of one optimizer's ``step`` that is under way, known by its frame.

    A step that raises runs no hook at its end, so calls cannot be counted: a frame that is not among the callers has
    ended.
    """

    def __init__(self) -> None:
        self._frame: FrameType | None = None  # of the call that runs hooks; None: there is none under way

    def begins(self) -> bool:
        """Return whether the step that begins is not inside another one. For a hook before it, and no other caller."""
        calling = _hook_runner()
        outer = calling.f_back
        while self._frame is not None and outer is not None:
            if outer is self._frame:
                return False
            outer = outer.f_back
        self._frame = calling
        return True

    def ends(self) -> bool:
        """Return whether the step that ends was not inside another one. For a hook after it, and no other caller."""
        if self._frame is not _hook_runner():
            return False
        self._frame = None
        return True


def _hook_runner() -> FrameType:
    """Return the frame that has called the hook that has called a method above."""
    return sys._getframe(3)
