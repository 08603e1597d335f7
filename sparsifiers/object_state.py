# SPDX-License-Identifier: Apache-2.0
"""State of a script's own objects: read from their attributes, and written back there.

It consists of dictionaries, lists, tensors and generators of random numbers, and of the plain values that have changed
since the object was handed over: those are counters. A value that has not changed is an option, which the script sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

KEPT = (dict, list, Tensor, torch.Generator)  # attributes of these types are state, whatever is in them
PLAIN = (int, float, str, type(None))  # and of these, if they have changed
Path = tuple[Any, ...]  # of a tensor: the attribute, then keys and positions
OnTensor = Callable[[Path, Tensor], Tensor]


class ObjectState:
    """State of one object, as it is now.

    ``given``: the object. Its dictionaries stay the same ones, because two objects may share one.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._names = frozenset(self._attributes())  # when it was handed over, as the next one
        self._plain = {name: value for name, value in self._attributes().items() if isinstance(value, PLAIN)}
        self._watched: dict[Path, tuple[Tensor, Tensor]] = {}  # tensors before the last round, and copies of them
        self._is_replaced: dict[Path, bool] = {}  # in a round the object puts another tensor there, and writes to none
        self._lent: dict[Path, tuple[ref[Tensor], int]] = {}  # tensors of the last snapshot, and their versions

    def copied(self) -> dict[str, Any]:
        """Return the state: a copy."""
        return self._mapped(_copy)

    def snapshot(self) -> dict[str, Any]:
        """Return the state for :meth:`restore` after the next round.

        It copies a tensor only if the object may write to it. A tensor that was replaced in an earlier round, and was
        not written to, is not copied.
        """
        self._is_replaced |= {path: False for path in self._lent if self._is_written(path)}
        watched, self._watched, self._lent = self._watched, {}, {}

        def kept(path: Path, tensor: Tensor) -> Tensor:
            before = watched.get(path)
            if before is not None and not torch.equal(*before):  # versions do not count what NumPy writes
                self._is_replaced[path] = False
            elif before is not None and before[0] is not tensor:
                self._is_replaced[path] = True
            if self._is_replaced.get(path):
                self._lent[path] = ref(tensor), tensor._version
                return tensor
            copy = _copy(path, tensor)
            if path not in self._is_replaced:
                self._watched[path] = tensor, copy
            return copy

        return self._mapped(kept)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Write a state back, of :meth:`copied` or :meth:`snapshot`: copies of its tensors.

        Raises ``RuntimeError`` if the object has written to a tensor that it used to replace, since the snapshot.
        """
        attributes = self._attributes()
        for name, value in self._state().items():
            if name in state:
                continue
            if name in self._plain:
                attributes[name] = self._plain[name]
            elif isinstance(value, (dict, list)):
                value.clear()
            elif name not in self._names:  # made since then
                del attributes[name]
        for name, saved in state.items():
            before, value = attributes.get(name), _mapped(saved, self._returned, (name,))
            if isinstance(before, torch.Generator):
                before.set_state(value)
            elif isinstance(before, dict) and isinstance(value, dict):
                before.clear()
                before.update(value)
            else:
                attributes[name] = value

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes of the object, to be read and written."""
        found: dict[str, Any] = getattr(self._given, "__dict__", {})
        return found

    def _state(self) -> dict[str, Any]:
        """Return the attributes that are state."""
        return {name: value for name, value in self._attributes().items() if self._is_state(name, value)}

    def _is_state(self, name: str, value: Any) -> bool:
        if isinstance(value, PLAIN):
            return name not in self._plain or type(value) is not type(self._plain[name]) or value != self._plain[name]
        return isinstance(value, KEPT)

    def _mapped(self, on_tensor: OnTensor) -> dict[str, Any]:
        return {name: _mapped(value, on_tensor, (name,)) for name, value in self._state().items()}

    def _is_written(self, path: Path) -> bool:
        """Return whether the object has written to a tensor that is not copied, since the last snapshot."""
        lent, version = self._lent[path]
        tensor = lent()
        return tensor is not None and tensor._version != version

    def _returned(self, path: Path, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of a state that is restored."""
        if path in self._lent and self._lent[path][0]() is tensor and self._is_written(path):
            raise RuntimeError(
                f"{type(self._given).__name__}: it wrote to a tensor of {path[0]!r} that it replaced in earlier steps, "
                "and this step cannot be repeated. Always replace it, or always write to it."
            )
        return _copy(path, tensor)


def _copy(path: Path, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor."""
    return tensor.detach().clone()


def _mapped(value: Any, on_tensor: OnTensor, path: Path) -> Any:
    """Return a copy of a value, with the result of ``on_tensor`` in the place of each tensor in it."""
    if isinstance(value, Tensor):
        return on_tensor(path, value)
    if isinstance(value, dict):
        return {key: _mapped(each, on_tensor, (*path, key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, on_tensor, (*path, place)) for place, each in enumerate(value))
    return value.get_state() if isinstance(value, torch.Generator) else value
