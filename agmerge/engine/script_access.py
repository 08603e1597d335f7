# SPDX-License-Identifier: Apache-2.0
"""Warnings, once each, for a script that reads, writes or saves parameters between steps of ``sync="updates"``.

They are this rank's own then, and differ between ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from agmerge.engine.script_reads import ScriptReads
from agmerge.engine.script_writes import ScriptWrites
from agmerge.errors import and_more, warn
from agmerge.runtime import workers

WRITTEN = (
    "AGM145: The script wrote parameters between two steps ({names}). With sync='updates', these belong to this rank "
    "only, until the next step. Set bounds (clamp_) again inside shared() before you evaluate or save. To keep the "
    "new values, call consolidate() on every rank. See docs/adaptive.md."
)
READ = (
    "AGM146: The script reads parameters between two steps ({operation}() of {name!r}). With sync='updates', they "
    "differ between ranks, and so does any average of them (EMA, SWA, a teacher). Read them inside `with "
    "compressed.shared():` or `with optimizer.shared():`. See docs/adaptive.md."
)
SAVED = (
    "AGM147: state_dict() of a model in training mode: with sync='updates', it has this rank's parameters, which "
    "differ between ranks. To evaluate or share it, save it inside shared() or in eval() mode. To resume, also save "
    "the state_dict() of the agmerge object on every rank. See docs/adaptive.md."
)


class Replica(Protocol):
    """Object with the shared parameters ``base`` and this worker's ``own``, both by name."""

    base: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor]
    is_shown: bool


class ScriptAccess:
    """Watch on what the script does with the parameters of ``owner`` between its steps; says each thing once.

    ``owner`` is not kept alive. :meth:`begin` after each step, :meth:`end` before the next one.
    """

    def __init__(self, owner: object) -> None:
        self._writes, self._said = ScriptWrites(), set[str]()
        self._shared: weakref.ReferenceType[Replica] | None = None  # with the parameters that are looked for
        self._names: dict[int, str] = {}  # by address of the parameter, during a look
        self._reads = ScriptReads(owner, _weakly(self))

    def begin(self, shared: Replica, step: int) -> None:
        """Record the parameters as step ``step``, or an exchange, has left them, and look at what is read."""
        self.left(shared)
        if READ not in self._said:
            self._shared = weakref.ref(shared)
            self._names = {parameter.data_ptr(): name for name, parameter in shared.own.items()}
            self._reads.begin(step)

    def left(self, shared: Replica) -> None:
        """Record the parameters as this library has left them."""
        self._writes.note(shared.own)

    def end(self, shared: Replica) -> None:
        """Stop looking at what is read; warn of what was written, as :meth:`check` does."""
        self._reads.end()
        self.check(shared)

    def check(self, shared: Replica) -> None:
        """Warn of parameters that have other values than this library has left."""
        if WRITTEN not in self._said:
            self._say_written(shared, self._writes.found_in_samples(shared.own, on_devices=False))

    def written(self, shared: Replica) -> list[str]:
        """Return the names of the parameters that the script has written since the last step; warn of them."""
        names = self._writes.found(shared.own)
        self._say_written(shared, names)
        return names

    def saved(self, shared: Replica) -> None:
        """Warn of saved parameters that are this rank's own."""
        if SAVED not in self._said and any(_differs(shared, name) for name in shared.own):
            self._said.add(SAVED)
            warn(SAVED, workers.rank())

    def read(self, operation: str, tensor: torch.Tensor) -> None:
        """Warn of an operation of the script, if it reads a parameter that differs from the shared one."""
        shared = None if self._shared is None else self._shared()
        name = self._names.get(tensor.data_ptr())
        if shared is None or shared.is_shown or name is None or READ in self._said:
            return
        if tensor.numel() == shared.own[name].numel() and _differs(shared, name):
            self._said.add(READ)
            warn(READ.format(operation=operation, name=name), workers.rank())

    def _say_written(self, shared: Replica, names: Sequence[str] | set[str]) -> None:
        if names and WRITTEN not in self._said:
            self._said.add(WRITTEN)
            warn(WRITTEN.format(names=and_more([name for name in shared.own if name in names])), workers.rank())


def _weakly(access: ScriptAccess) -> Callable[[str, torch.Tensor], None]:
    """Return :meth:`ScriptAccess.read`, which does not keep the object alive."""
    held = weakref.ref(access)

    def read(operation: str, tensor: torch.Tensor) -> None:
        access = held()
        if access is not None:
            access.read(operation, tensor)

    return read


@torch.no_grad()
def _differs(shared: Replica, name: str) -> bool:
    """Return whether this rank's own parameter differs from the shared one. Waits for a device."""
    own, base = shared.own[name].detach(), shared.base.get(name)
    return base is not None and not torch.equal(own, base.to(own.dtype))
