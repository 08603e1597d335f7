"""Hook parameters, so that a reducer hears of gradients; and notice what a script does to gradients after that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Protocol

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from agmerge.backends.streams import streams_of
from agmerge.errors import CHANGED, AGMergeError, and_more
from agmerge.tensors.parameters import ParameterTable

CAPTURED = (
    "the backward pass of parameter {!r} is being captured in a CUDA graph. Its replays run no hooks, so that nothing "
    "would be exchanged: leave backward() out of the graph, or capture modules by torch.cuda.make_graphed_callables, "
    "whose gradients autograd accumulates as ever"
)


class GradientListener(Protocol):
    """Hear of gradients."""

    def on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """Hear that ``parameter.grad`` has been accumulated once more. Called without gradient recording."""


# The hooks that a parameter has. Not an attribute of the parameter: that would travel with torch.save(model).
_owners: MutableMapping[torch.Tensor, weakref.ref[GradientHooks]] = WeakTensorKeyDictionary()


def refuse_owned(parameters: Iterable[torch.Tensor], names: ParameterTable) -> None:
    """Raise ``ValueError`` for a parameter that a living listener has. ``names``: for the error."""
    for parameter in parameters:
        owner = _owners[parameter] if parameter in _owners else None
        if owner is not None and owner() is not None:
            raise ValueError(
                f"parameter {names.name_of(parameter)!r} of shape {list(parameter.shape)} is already exchanged by "
                "another DistributedOptimizer, perhaps of an earlier run of this cell; close() that one first, or "
                "give each optimizer its own parameters"
            )


class GradientHooks:
    """Hold the post-accumulate hooks of one listener, one a parameter, for as long as the listener lives.

    ``register_post_accumulate_grad_hook`` fires after ``p.grad`` is complete for this backward pass, also for
    tied weights, survives ``model.to(dtype)``, and needs no reference to autograd nodes. The listener is held
    weakly, so that an optimizer that was dropped does not go on exchanging gradients.
    """

    def __init__(self, listener: GradientListener) -> None:
        self._listener = weakref.ref(listener)
        self._handles: MutableMapping[torch.Tensor, RemovableHandle] = WeakTensorKeyDictionary()  # by parameter

    def attach(self, parameters: Iterable[torch.Tensor], names: ParameterTable) -> None:
        """Hook every parameter that has no hook of this listener yet. ``names``: for errors.

        Raises ``ValueError`` for one that another living listener has.
        """
        new = [parameter for parameter in parameters if parameter not in self._handles]
        refuse_owned(new, names)
        for parameter in new:
            hook = _hook(self._listener, names.name_of(parameter))
            if parameter.device.type != "cpu":  # there it would cost more than it is worth: two microseconds a hook
                hook = _on_device(hook, names.name_of(parameter))
            _owners[parameter] = weakref.ref(self)
            self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take all hooks off."""
        for parameter, handle in list(self._handles.items()):
            handle.remove()
            _owners.pop(parameter, None)
        self._handles = WeakTensorKeyDictionary()


class HandedOver:
    """Remember the parameters whose gradients are handed over, in readiness order, each as backward left it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[torch.Tensor, torch.Tensor | None, int]] = {}  # parameter, gradient, its version
        self.overrun = False  # a backward pass too many has been refused, and it has changed some of them

    def add(self, name: str, parameter: torch.Tensor) -> None:
        """Remember ``parameter.grad`` and its version."""
        gradient = parameter.grad
        self._seen[name] = (parameter, gradient, 0 if gradient is None else gradient._version)

    def refuse_more(self) -> None:
        """Remember that a backward pass too many was refused: it has changed gradients that are on their way."""
        self.overrun = True

    def error(self, members: ParameterTable, step: int, remedy: str) -> AGMergeError | None:
        """Return the error of a script that has replaced, removed or written to a gradient since; None if it has not.

        ``step``: its number, and ``remedy``: what the script is to do, for the text.
        """
        changed = {
            name
            for name, (parameter, gradient, version) in self._seen.items()
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version)
        }
        if not changed:
            return None
        names = [name for name in map(members.name_of, members.name_all()) if name in changed]
        return AGMergeError(CHANGED.format(step, and_more(names), remedy))

    def __contains__(self, name: str) -> bool:
        return name in self._seen

    def __len__(self) -> int:
        return len(self._seen)


def _hook(reference: weakref.ref[GradientListener], name: str) -> Callable[[torch.Tensor], None]:
    """Return the hook that tells the listener, if it still lives, without gradient recording."""

    def hook(parameter: torch.Tensor) -> None:
        listener = reference()
        if listener is None:
            return
        if torch.is_grad_enabled():  # under create_graph=True; elsewhere its context would be half the cost of a hook
            with torch.no_grad():
                listener.on_gradient(parameter, name)
        else:
            listener.on_gradient(parameter, name)

    return hook


def _on_device(hook: Callable[[torch.Tensor], None], name: str) -> Callable[[torch.Tensor], None]:
    """Return ``hook`` for the gradient ``name`` of a device: not traced by torch.compile, nor captured in a graph."""

    @_disable_dynamo  # what it does depends on messages
    def outside(parameter: torch.Tensor) -> None:
        streams = streams_of(parameter.device)
        if streams is not None and streams.is_capturing():
            raise AGMergeError(CAPTURED.format(name))
        hook(parameter)

    return outside
