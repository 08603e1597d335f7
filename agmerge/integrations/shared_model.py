# SPDX-License-Identifier: Apache-2.0
"""Show the parameters that all ranks have in common wherever a model is evaluated or saved.

With ``sync="updates"`` a worker's own parameters are ahead of these. They are for training: a forward pass without
gradients, and ``state_dict()``, are about the model that all ranks train together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._compile import _disable_dynamo

from agmerge.engine.update_reducer import UpdateReducer


def show_shared(module: torch.nn.Module, reducer: UpdateReducer) -> Callable[[], None]:
    """Put hooks on ``module``, the plain one inside DistributedDataParallel; return a function that removes them.

    A forward pass in ``torch.no_grad()`` or ``inference_mode()`` copies all parameters twice; inside of ``shared()`` it
    copies none. Entries of ``module.state_dict()`` are copies. Neither the model nor the reducer is kept alive.
    """
    shown = _Shown(reducer)
    register_save: Any = module._register_state_dict_hook  # the public one is of torch 2.5
    handles = [
        module.register_forward_pre_hook(_Hook(shown.before)),
        module.register_forward_hook(_Hook(shown.after), always_call=True),
        register_save(_Hook(shown.save)),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


class _Shown:
    """Hooks that put shared parameters in place around forward passes without gradients, and into saved states."""

    def __init__(self, reducer: UpdateReducer) -> None:
        self._reducer = weakref.ref(reducer)
        self._inside: list[AbstractContextManager[None]] = []  # of forward passes that are under way

    def before(self, *_: Any) -> None:
        """Begin a forward pass."""
        if not torch.is_grad_enabled():
            self._enter()

    def after(self, *_: Any) -> None:
        """End a forward pass, also one that raises."""
        if self._inside and not torch.is_grad_enabled():
            self._leave()

    @_disable_dynamo
    def _enter(self) -> None:
        reducer = self._reducer()
        if reducer is not None and not reducer.exchange.group.alone and not reducer.replica.shared.is_shown:
            shared = reducer.replica.showing()
            shared.__enter__()
            self._inside.append(shared)

    @_disable_dynamo
    def _leave(self) -> None:
        self._inside.pop().__exit__(None, None, None)

    def save(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Put copies of the shared parameters into ``state``, the result of ``state_dict()``."""
        reducer = self._reducer()
        if reducer is None or reducer.exchange.group.alone or reducer.replica.shared.is_shown:
            return
        values = reducer.replica.shared_values()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            entry = state.get(f"{prefix}{name}")
            if parameter in values and entry is not None and not isinstance(entry, torch.nn.Parameter):
                state[f"{prefix}{name}"] = values[parameter].to(device=entry.device, dtype=entry.dtype, copy=True)


class _Hook:
    """Hook that calls a function. A copy of the model, or one that is loaded, has a hook that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Do nothing."""
