"""Get along with ``torch.distributed.checkpoint.state_dict``, whose helpers save and load the state of an optimizer.

They know of the state of a plain optimizer alone, and make one that has none take a step without gradients. Of a
wrapper they would drop what is not sent yet, so they get the plain one. That of an SGD whose momentum a memory applies
in its place would have momentum buffers where that step was made, and none elsewhere: it makes none, and they are told
of empty ones, always.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from agmerge.engine.optimizer_wrapper import OptimizerHolder
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.tensors.parameters import optimizers_of

HELPERS = os.path.join("distributed", "checkpoint", "state_dict.py")  # the end of their file's path
DEEP = 8  # calls, from such a helper to an optimizer, that decorators may lie between
GIVE_THE_PLAIN_ONE = (
    "torch.distributed.checkpoint: {helper}() got the agmerge.{kind}, and would leave out what is not sent yet. Give "
    "it the plain optimizer, and keep the rest under a key of its own: {{'optimizer': get_optimizer_state_dict(model, "
    "optimizer.{attribute}), 'residuals': agmerge.ResidualState(optimizer)}}; to load, ResidualState(optimizer, path) "
    "and set_optimizer_state_dict(model, optimizer.{attribute}, state['optimizer']) (docs/checkpoints.md)"
)


def refuse(optimizer: OptimizerHolder) -> None:
    """Raise ``ValueError`` if a helper of ``torch.distributed.checkpoint`` is calling a method of this wrapper."""
    helper = calling_helper()
    if helper:
        attribute = "optimizer" if len(optimizer.optimizers) == 1 else "optimizers"
        kind = type(optimizer).__name__
        raise ValueError(GIVE_THE_PLAIN_ONE.format(helper=helper, kind=kind, attribute=attribute))


def calling_helper() -> str:
    """Return the name of the helper of torch that a script has called, and that has called here; empty: there is none.

    Looks at few frames, so that it costs a step about a microsecond.
    """
    frame, found, left = sys._getframe(1).f_back, "", DEEP
    while frame is not None and left:
        frame_of, left = frame.f_code, left - 1
        if frame_of.co_filename.endswith(HELPERS):
            found, left = frame_of.co_name, DEEP  # its own caller may be one, too
        frame = frame.f_back
    return found


def hide_momentum(exchange: GradientExchange, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Let those helpers find an empty momentum buffer for each parameter whose momentum ``exchange`` applies.

    So what is saved has the same keys as what is loaded into, whatever came before. ``optimizer``: the plain one, or
    one that stands for several. Returns a function that ends it.
    """
    held = weakref.ref(exchange)  # the plain optimizer may live longer
    ends = [_hide_from_helpers(each, held) for each in optimizers_of(optimizer) if isinstance(each, torch.optim.SGD)]

    def end() -> None:
        for each in ends:
            each()

    return end


def _hide_from_helpers(optimizer: torch.optim.Optimizer, held: weakref.ref[GradientExchange]) -> Callable[[], None]:
    """Do what :func:`hide_momentum` does with one optimizer."""
    hidden: list[tuple[dict[str, Any], dict[str, Any]]] = []  # groups, and what they say, in a step of a helper

    def asked() -> bool:
        exchange = held()
        return exchange is not None and exchange.config.rates is not None and bool(calling_helper())

    def hide(of: torch.optim.Optimizer, *_: Any) -> None:
        if not of.state and asked():  # without a gradient: weight decay would become a momentum that nothing has had
            for group in of.param_groups:
                hidden.append((group, {name: group[name] for name in ("momentum", "nesterov")}))
                group.update(momentum=0.0, nesterov=False)

    def bring_back(*_: Any) -> None:
        while hidden:
            group, values = hidden.pop()
            group.update(values)

    def show(of: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        if not asked():
            return None
        entries = dict(state["state"])
        for group, packed in zip(of.param_groups, state["param_groups"], strict=True):
            for parameter, number in zip(group["params"], packed["params"], strict=True):
                if group.get("momentum") and parameter.requires_grad:
                    entry = entries.get(number, {})
                    if entry.get("momentum_buffer") is None:
                        entries[number] = {**entry, "momentum_buffer": torch.zeros_like(parameter)}
        return {**state, "state": entries}

    handles = [optimizer.register_state_dict_post_hook(show)]
    exchange = held()
    if exchange is not None and exchange.config.model is None:  # DeAR, which applies none, steps without hooks
        handles += [optimizer.register_step_pre_hook(hide), optimizer.register_step_post_hook(bring_back)]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
