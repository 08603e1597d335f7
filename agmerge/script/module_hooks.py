# SPDX-License-Identifier: Apache-2.0
"""Modules that read parameters, and hooks that say when their forward is about to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch._compile import _disable_dynamo

Parameters = tuple[torch.Tensor, ...]

# Their forward may read parameters of children that it does not call. Of an encoder layer's fast path that was so
# until torch 2.5; since then it is not taken where there are hooks.
_OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 5)
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer) if _OLD else (nn.MultiheadAttention,)


def readers(model: nn.Module) -> dict[nn.Module, Parameters]:
    """Return the parameters that each module's forward reads by itself; modules that read none are left out.

    A tied parameter has several readers. The parameters of a module without a forward (``ParameterList``,
    ``ModuleDict``) are read by the module around it. ``MultiheadAttention`` reads its projection's parameters itself,
    and an encoder layer of an old torch those of all its children.
    """
    read = {module: tuple(dict.fromkeys(_read(module))) for module in model.modules() if not _passive(module)}
    return {module: parameters for module, parameters in read.items() if parameters}


def check_readers(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ValueError`` for a parameter of the optimizer that no forward of ``model`` reads."""
    known = {parameter for parameters in readers(model).values() for parameter in parameters}
    strange = [
        f"parameter {i} of group {g}, {parameter.dtype} {list(parameter.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
        if parameter not in known
    ]
    if strange:
        raise ValueError(
            f"merging='dear': model={type(model).__name__} has no module whose own forward uses {'; '.join(strange)}. "
            "Updates are applied before the forward of the module that holds the parameter. Pass as model= the module "
            "that holds all parameters."
        )


def _read(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters that the forward of ``module`` reads by itself, perhaps more than once."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for child in module.children():
        if _passive(child) or isinstance(module, _FUSED):
            yield from _read(child)


def _passive(module: nn.Module) -> bool:
    """Return whether a module is never called: it has no forward."""
    return getattr(module.forward, "__func__", None) is nn.Module.forward


class ForwardListener(Protocol):
    """Listener to forward passes, and to states that are about to be read or loaded."""

    def before_forward(self, number: int, parameters: Parameters) -> None:
        """React to a module's forward that is about to read ``parameters``. ``number``: index in :func:`readers`."""

    def flush(self) -> None:
        """React to parameters that are about to be read or overwritten as a whole."""


class Hook:
    """Hook that notifies a listener, held weakly: a module's forward begins (``number`` >= 0), or its state is read.

    Copies of the model, pickled too, carry a hook that does nothing.
    """

    def __init__(
        self, listener: weakref.ref[ForwardListener] | None = None, number: int = -1, parameters: Parameters = ()
    ) -> None:
        """Make the hook of reader ``number``, which reads ``parameters``, or by default that of a module's state."""
        self.listener, self.number, self.parameters = listener, number, parameters

    def __call__(self, *_: Any) -> None:
        _tell(self)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


@_disable_dynamo  # its effect depends on messages, and must not be traced by torch.compile
def _tell(hook: Hook) -> None:
    listener = None if hook.listener is None else hook.listener()
    if listener is None:
        return
    if hook.number < 0:
        listener.flush()
    else:
        listener.before_forward(hook.number, hook.parameters)


class ModuleHooks:
    """Hooks of one listener on the modules of one model."""

    def __init__(self, listener: ForwardListener) -> None:
        self._listener = weakref.ref(listener)
        self._handles: list[Any] = []  # of hooks
        self.readers: list[Parameters] = []  # by number: the parameters that a module reads

    def attach(self, model: nn.Module) -> None:
        """Hook every module of ``model`` as it is now; older hooks are removed."""
        self.remove()
        read_by = readers(model)
        self.readers = list(read_by.values())
        for number, (module, parameters) in enumerate(read_by.items()):
            # First of all, so that hooks that compute from parameters (weight_norm) see them updated.
            hook = Hook(self._listener, number, parameters)
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        for module in model.modules():
            flush = Hook(self._listener)
            self._handles.append(module.register_state_dict_pre_hook(flush))  # type: ignore[no-untyped-call]
            self._handles.append(module._register_load_state_dict_pre_hook(flush))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
