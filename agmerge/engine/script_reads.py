# SPDX-License-Identifier: Apache-2.0
"""Whether a script reads parameters between two steps, as averages of them do (EMA, a teacher).

Python has no event for that. After some of the steps a dispatch mode of torch sees every operation, up to the next
forward pass.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from agmerge.errors import NO_SCRIPTS
from agmerge.tensors.parameters import is_dtensor, local_of

FIRST, THEN = 8, 100  # a look follows each of the first steps, and later every hundredth one
MOST = 10_000  # operations that one look lasts at most
# Averages and copies are made by these, also of lists (torch._foreach_lerp_) and in place.
OPERATIONS = frozenset(("add", "sub", "rsub", "mul", "div", "lerp", "addcmul", "copy", "clone", "_to_copy"))

Found = Callable[[str, torch.Tensor], None]


class ScriptReads:
    """Look at what a script does between two steps; ``found(operation, tensor)`` is called where one is read.

    ``found`` gets whatever is read by an operation of a kind that makes averages or copies: a parameter, an alias of
    one, or another tensor. Operations of this library do not count.
    """

    def __init__(self, owner: object, found: Found) -> None:
        self._found = found
        self._mode: _Look | None = None
        self._handle: RemovableHandle | None = None  # of the hook that ends the look
        weakref.finalize(owner, self.end)

    def begin(self, step: int) -> None:
        """Look until the next forward pass of a module, if step ``step`` is followed by a look."""
        self.end()
        # A mode that is there already, and ends before this one, would take this one off in its own place. And what
        # torch.compile has made does not run under a mode.
        if step > FIRST and step % THEN or _get_current_dispatch_mode_stack() or _compiles():
            return
        mode: Any = _Look(self._found)
        mode.__enter__()
        self._mode = mode
        self._handle = register_module_forward_pre_hook(self._end)

    def end(self) -> None:
        """End the look. It stays in place without effect while the script is inside of a mode that it began later."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        mode: Any = self._mode
        if mode is not None:
            mode.stop()
            if _get_current_dispatch_mode_stack()[-1:] == [mode]:
                mode.__exit__(None, None, None)
                self._mode = None

    def _end(self, *_: object) -> None:
        if self._mode in _get_current_dispatch_mode_stack():  # else a module of another thread
            self.end()


class _Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which operations that read tensors are seen."""

    def __init__(self, found: Found) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: Found | None = found
        self._left, self._process = MOST, os.getpid()

    def stop(self) -> None:
        """See nothing any more."""
        self._found = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, and report what it reads."""
        result = func(*args, **(kwargs or {}))
        found = self._found
        if found is not None:
            self._left -= 1
            if not self._left or os.getpid() != self._process:  # a worker of a DataLoader, which was forked meanwhile
                self.stop()
            elif (name := _short(func)) in OPERATIONS and _is_of_script():
                for tensor in _read(func, args):
                    found(name, tensor)
        return result


def _compiles() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    utilities: Any = sys.modules.get("torch._dynamo.utils")
    return utilities is not None and bool(utilities.counters["frames"])


def _short(operation: Any) -> str:
    """Return ``lerp`` of ``aten::lerp_`` or ``aten::_foreach_lerp_``; empty: not one of torch's own operations."""
    namespace, _, name = str(getattr(getattr(operation, "_schema", None), "name", "")).partition("::")
    short = name.removeprefix("_foreach_")
    return short if short in OPERATIONS else short.removesuffix("_") if namespace == "aten" else ""


def _read(operation: Any, args: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an operation, and in lists, that it does not write."""
    for argument, value in zip(operation._schema.arguments, args, strict=False):
        if argument.alias_info is None or not argument.alias_info.is_write:
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if type(each) in (torch.Tensor, torch.nn.Parameter) or is_dtensor(each):
                    yield local_of(each)


def _is_of_script() -> bool:
    """Return whether the operation was called by the script, or another library, and not by this one."""
    frame, own = sys._getframe(2), __name__
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        package = name.partition(".")[0]
        if name != own and package != "torch":
            return package not in NO_SCRIPTS
        frame = frame.f_back
    return True
