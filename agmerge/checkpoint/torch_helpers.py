# SPDX-License-Identifier: Apache-2.0
"""Support of ``torch.distributed.checkpoint.state_dict``: helpers that save and load the state of an optimizer.

They know only the state of a plain optimizer, and make one without state take a step without gradients. Of a wrapper
they would drop residuals, so they need the plain optimizer. An SGD without momentum of its own, where a memory applies
it, would have momentum buffers where that step was made, and none elsewhere. Here it makes none, and the helpers always
read empty ones.
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
DEEP = 8  # frames between such a helper and an optimizer, with those of decorators
GIVE_THE_PLAIN_ONE = (
    "torch.distributed.checkpoint: {helper}() got the agmerge.{kind} and would not save its residuals. Pass the plain "
    "optimizer, and save the residuals separately: {{'optimizer': get_optimizer_state_dict(model, "
    "optimizer.{attribute}), 'residuals': agmerge.ResidualState(optimizer)}}. To load, use ResidualState(optimizer, "
    "path) and set_optimizer_state_dict(model, optimizer.{attribute}, state['optimizer']). See docs/checkpoints.md."
)


def refuse(optimizer: OptimizerHolder) -> None:
    """Raise ``ValueError`` if a helper of ``torch.distributed.checkpoint`` is calling a method of this wrapper."""
    helper = calling_helper()
    if helper:
        attribute = "optimizer" if len(optimizer.optimizers) == 1 else "optimizers"
        kind = type(optimizer).__name__
        raise ValueError(GIVE_THE_PLAIN_ONE.format(helper=helper, kind=kind, attribute=attribute))


def calling_helper() -> str:
    """Return the name of torch's helper among the callers, the one that the script has called; empty: there is none.

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
    """Show those helpers an empty momentum buffer for each parameter with a momentum that ``exchange`` applies.

    So saved states have the same keys as those that are loaded into, in any order of calls. ``optimizer``: the plain
    one, or a group of several. Returns a function that ends it.
    """
    held = weakref.ref(exchange)  # the plain optimizer may live longer
    ends = [_hide_from_helpers(each, held) for each in optimizers_of(optimizer) if isinstance(each, torch.optim.SGD)]

    def end() -> None:
        for each in ends:
            each()

    return end


def _hide_from_helpers(optimizer: torch.optim.Optimizer, held: weakref.ref[GradientExchange]) -> Callable[[], None]:
    """Register the hooks of :func:`hide_momentum` on one optimizer; return a function that removes them."""
    hidden: list[tuple[dict[str, Any], dict[str, Any]]] = []  # groups, and their own values, in a step of a helper

    def asked() -> bool:
        exchange = held()
        return exchange is not None and exchange.agreed.config.compression.rates is not None and bool(calling_helper())

    def hide(of: torch.optim.Optimizer, *_: Any) -> None:
        if not of.state and asked():  # without a gradient: weight decay alone would become a momentum
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
    if (
        exchange is not None and exchange.agreed.config.sync.model is None
    ):  # DeAR, without such a momentum, steps without hooks
        handles += [optimizer.register_step_pre_hook(hide), optimizer.register_step_post_hook(bring_back)]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
