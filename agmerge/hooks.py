"""Post-accumulate hooks: one a parameter, gone when their engine is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary


class Listener(Protocol):
    """Who wants to know of gradients."""

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """``parameter.grad`` has been accumulated once more. Gradients are not recorded."""


# Which hooks a parameter has. Not an attribute of the parameter: that would travel with torch.save(model).
_owners: MutableMapping[torch.Tensor, weakref.ref[Hooks]] = WeakTensorKeyDictionary()


class Hooks:
    """The hooks of one listener.

    ``register_post_accumulate_grad_hook`` fires after ``p.grad`` is complete for this backward pass, also for
    tied weights, survives ``model.to(dtype)``, and needs no reference to autograd nodes. The listener is held
    weakly, so that an optimizer that was dropped does not go on exchanging gradients.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)
        self._handles: MutableMapping[torch.Tensor, RemovableHandle] = WeakTensorKeyDictionary()

    def attach(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hook every parameter that has no hook of this listener yet.

        Raises ``ValueError`` for one that another living listener has.
        """
        new = [parameter for parameter in parameters if parameter not in self._handles]
        for parameter in new:
            owner = _owners[parameter] if parameter in _owners else None
            if owner is not None and owner() is not None:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is already exchanged by another "
                    "DistributedOptimizer; close() that one first, or give each optimizer its own parameters"
                )
        hook = _hook(self._listener)
        for parameter in new:
            _owners[parameter] = weakref.ref(self)
            self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take all hooks off."""
        for parameter, handle in list(self._handles.items()):
            handle.remove()
            _owners.pop(parameter, None)
        self._handles = WeakTensorKeyDictionary()


def _hook(listener: weakref.ref[Listener]) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        here = listener()
        if here is None:
            return
        if torch.is_grad_enabled():  # under create_graph=True; elsewhere its context would be half the cost of a hook
            with torch.no_grad():
                here.on_gradient(parameter)
        else:
            here.on_gradient(parameter)

    return hook
