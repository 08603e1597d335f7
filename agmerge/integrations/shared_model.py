# SPDX-License-Identifier: Apache-2.0
"""Show the parameters that all ranks have in common where a model is evaluated or saved in ``eval()`` mode.

With ``sync="updates"`` a worker's own parameters are ahead of these. One rule holds for forward passes, with gradients
or without, and for ``state_dict()``: parameters that the script has written since the last step (an average of weights,
the best ones) are shown as they are; else a worker's own in training mode, and the shared ones in ``eval()`` mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks

from agmerge.engine.update_reducer import UpdateReducer


def show_shared(module: torch.nn.Module, reducer: UpdateReducer) -> Callable[[], None]:
    """Put hooks on ``module``, the plain one inside DistributedDataParallel; return a function that removes them.

    A forward pass in ``eval()`` mode copies all parameters twice; inside of ``shared()`` it copies none. Entries of
    ``module.state_dict()`` are copies then. Neither the model nor the reducer is kept alive.
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
    """Hooks that put shared parameters in place around forward passes in ``eval()`` mode, and into saved states.

    A script that trains in ``eval()`` mode has its own in both.
    """

    def __init__(self, reducer: UpdateReducer) -> None:
        self._reducer = weakref.ref(reducer)
        self._inside: list[AbstractContextManager[None]] = []  # of forward passes in eval() mode that are under way
        # Whether the forward passes with gradients since the last step were in training mode, or in eval() mode.
        self._in_training = self._in_eval = False
        self._steps = 0  # when that was noted
        self._trains_in_eval = False  # the last step had forward passes in eval() mode alone

    def before(self, module: torch.nn.Module, *_: Any) -> None:
        """Begin a forward pass."""
        if not module.training:
            self._enter()
        elif torch.is_grad_enabled():
            self._in_training = True

    def after(self, *_: Any) -> None:
        """End a forward pass, also one that raises."""
        if self._inside:
            self._leave()

    @_disable_dynamo
    def _enter(self) -> None:
        reducer = self._showing()
        entered: AbstractContextManager[None] = nullcontext()
        if reducer is not None and not self._is_own(reducer):
            entered = _replaced(reducer, reducer.replica.written())
        self._in_eval |= torch.is_grad_enabled()
        entered.__enter__()
        self._inside.append(entered)

    @_disable_dynamo
    def _leave(self) -> None:
        self._inside.pop().__exit__(None, None, None)

    def save(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Put copies of the shared parameters into ``state``, the result of ``state_dict()``."""
        reducer = self._showing()
        if reducer is None:
            return
        if module.training or self._is_own(reducer):
            reducer.replica.saved_own()
            return
        values = reducer.replica.shared_values(but=reducer.replica.written())
        for name, parameter in module.named_parameters(remove_duplicate=False):
            entry = state.get(f"{prefix}{name}")
            if parameter in values and entry is not None and not isinstance(entry, torch.nn.Parameter):
                state[f"{prefix}{name}"] = values[parameter].to(device=entry.device, dtype=entry.dtype, copy=True)

    def _showing(self) -> UpdateReducer | None:
        """Return the reducer; None where a model's parameters are the right ones anyway."""
        reducer = self._reducer()
        is_right = reducer is None or reducer.exchange.group.alone or reducer.replica.shared.is_shown
        return None if is_right else reducer

    def _is_own(self, reducer: UpdateReducer) -> bool:
        """Return whether the script trains in ``eval()`` mode, so that the mode does not tell evaluation apart."""
        if self._steps != reducer.replica.steps:
            if self._in_training or self._in_eval:
                self._trains_in_eval = not self._in_training
            self._steps, self._in_training, self._in_eval = reducer.replica.steps, False, False
        return self._trains_in_eval


@contextmanager
def _replaced(reducer: UpdateReducer, written: Container[str]) -> Iterator[None]:
    """Put the shared parameters in place, all but those that the script has ``written``.

    A backward pass through what is computed inside gets copies: the parameters have this rank's own values by then.
    """
    replica = reducer.replica
    with replica.showing(but=written):
        if not torch.is_grad_enabled():
            yield
            return
        shown = {parameter.untyped_storage().data_ptr() for parameter in replica.shared_values()}
        with saved_tensors_hooks(lambda tensor: _kept(tensor, shown), lambda tensor: tensor):
            yield


def _kept(tensor: torch.Tensor, shown: set[int]) -> torch.Tensor:
    """Return what a backward pass keeps of ``tensor``: a copy, if its memory is one of those in ``shown``."""
    return tensor.detach().clone() if tensor.untyped_storage().data_ptr() in shown else tensor


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
