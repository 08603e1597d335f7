# SPDX-License-Identifier: Apache-2.0
"""Warnings, once each, for a script that reads, writes or saves parameters between steps of ``sync="updates"``.

They are this rank's own then, and differ between ranks.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from agmerge.errors import NO_SCRIPTS, and_more, warn
from agmerge.runtime import workers
from agmerge.tensors.parameters import is_dtensor, local_of

# Whether a script reads parameters between two steps, as averages of them do (EMA, a teacher).
#
# Python has no event for that. After some of the steps a dispatch mode of torch sees every operation, up to the next
# forward pass.

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


# Which parameters a script has written between two steps, where ``sync="updates"`` moves them as well.

ELEMENTS = 16  # sampled of each parameter


class ScriptWrites:
    """Record of the parameters as this library has left them: what differs later was written by the script.

    An ordinary write raises a tensor's version, and ``p.data = ...`` changes its address. A write to ``p.data`` does
    neither, so a few elements of each parameter are compared, too.
    """

    def __init__(self) -> None:
        self._left: _Left | None = None
        self._samples: list[_Sample] = []  # of the parameters at the addresses in `_left`

    def note(self, own: Mapping[str, torch.Tensor]) -> None:
        """Record the parameters as they are now."""
        names, before = list(own), self._left
        addresses = _addresses(own)
        if before is None or before.names != names or before.addresses != addresses:
            self._samples = _samples_of(own)
        self._left = _Left(names, addresses, _versions(own), [sample.now() for sample in self._samples])

    def found(self, own: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the parameters that were written since :meth:`note`. Waits for devices.

        If only samples show it, of a parameter with more elements than these, all names: samples of others may have
        missed it.
        """
        written, sampled = self._by_version(own), self.found_in_samples(own)
        if any(own[name].numel() > ELEMENTS for name in sampled - written):
            return list(own)
        return [name for name in own if name in written or name in sampled]

    def found_in_samples(self, own: Mapping[str, torch.Tensor], *, on_devices: bool = True) -> set[str]:
        """Return the names of the parameters with other sampled elements than at :meth:`note`.

        Waits for devices. Without ``on_devices`` it looks only for what their versions and addresses show.
        """
        left = self._left
        if left is None or left.names != list(own):
            return set()
        if not on_devices and any(each.is_cuda for each in left.elements) and not self._by_version(own):
            return set()
        moved = left.addresses != _addresses(own)
        samples = _samples_of(own) if moved else self._samples
        if [sample.names for sample in samples] != [sample.names for sample in self._samples]:
            return set(own)  # of another dtype, or on another device
        return {n for sample, then in zip(samples, left.elements, strict=True) for n in sample.changed(then)}

    def _by_version(self, own: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of the parameters that have another version or address than at :meth:`note`."""
        left = self._left
        if left is None or left.names != list(own):
            return set()
        now = zip(own, _addresses(own), _versions(own), strict=True)
        return {
            name
            for (name, address, version), then in zip(now, zip(left.addresses, left.versions, strict=True), strict=True)
            if (address, version) != then
        }


@dataclass(frozen=True)
class _Left:
    """Parameters as this library has left them."""

    names: list[str]
    addresses: list[tuple[int, int]]
    versions: list[int]
    elements: list[torch.Tensor]  # of each sample


@dataclass(frozen=True)
class _Sample:
    """Views of a few elements of each of some parameters, which have one dtype and device."""

    names: Sequence[str]
    views: Sequence[torch.Tensor]

    def now(self) -> torch.Tensor:
        """Return a copy of the elements, flat."""
        return torch.cat(list(self.views))

    def changed(self, before: torch.Tensor) -> list[str]:
        """Return the names of the parameters with other bits than ``before``, an earlier result of :meth:`now`."""
        now = self.now()
        if now.numel() != before.numel():
            return list(self.names)
        differs = (now.view(torch.uint8) != before.view(torch.uint8)).view(now.numel(), -1).any(dim=1)
        if not differs.any():
            return []
        changed: list[str] = []
        begin = 0
        for name, view in zip(self.names, self.views, strict=True):
            if differs[begin : begin + view.numel()].any():
                changed.append(name)
            begin += view.numel()
        return changed


def _addresses(own: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    return [(id(parameter), parameter.data_ptr()) for parameter in own.values()]


def _versions(own: Mapping[str, torch.Tensor]) -> list[int]:
    return [parameter._version for parameter in own.values()]


def _samples_of(own: Mapping[str, torch.Tensor]) -> list[_Sample]:
    """Return the sampled elements of parameters, by dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], dict[str, torch.Tensor]] = {}
    for name, parameter in own.items():
        if parameter.numel():
            by_kind.setdefault((parameter.dtype, parameter.device), {})[name] = _some(parameter.detach())
    return [_Sample(list(views), list(views.values())) for views in by_kind.values()]


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of some elements, flat: evenly spaced, or of one row where memory is not in C order."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor[(0,) * (tensor.dim() - 1)]
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]


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

    def forget(self) -> None:
        """Forget the recorded parameters: writes until the next :meth:`begin` or :meth:`left` are not reported."""
        self._writes = ScriptWrites()

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


# Whether a training ends while parameters differ between ranks.

ENDED = (
    "AGM118: Training with sync='updates' ended while parameters still differ between ranks. Call consolidate() on "
    "every rank after the last step, or evaluate and save inside `with optimizer.shared():`. See docs/adaptive.md."
)


@dataclass
class Strayed:
    """Flags of whether a worker's parameters may differ from the shared ones."""

    ahead: bool = False  # a step has been made since all were equal
    unseen: bool = False  # likewise, and since then the script has not asked for the shared ones
    says: bool = False  # this rank is the one that warns

    def stepped(self, *, says: bool) -> None:
        """Record a step of this worker among others. ``says``: this worker is the one that warns."""
        self.ahead = self.unseen = True
        self.says = says

    def seen(self) -> None:
        """Record that the script has used the shared parameters."""
        self.unseen = False

    def settled(self) -> None:
        """Record that parameters are the shared ones on all ranks."""
        self.ahead = self.unseen = False


def watch_straying(owner: object) -> Strayed:
    """Return a record of the steps of ``owner``.

    A warning is given if ``owner`` is deleted, or the interpreter ends, before the parameters are
    :meth:`Strayed.settled` or the shared parameters are :meth:`Strayed.seen`.
    """
    strayed = Strayed()
    weakref.finalize(owner, _warn, strayed)
    return strayed


def _warn(strayed: Strayed) -> None:
    if strayed.says and strayed.unseen:
        warn(ENDED, 0)
