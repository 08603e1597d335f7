# SPDX-License-Identifier: Apache-2.0
"""Updates of one step that DeAR applies under the next forward, for a few parameters at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from agmerge.engine import seen_steps
from agmerge.errors import AGMergeError
from agmerge.exchanges import InFlight
from agmerge.step.combined import Combined
from agmerge.tensors.parameters import gradient_dtype

_PLAIN = (bool, int, float, str, tuple, type(None))  # values of a group that compare with ==


class Updates:
    """Updates of a step: combined gradients on their way, and the hyper-parameters as of that step.

    Parameters that no rank had a gradient for have an update only where a residual was sent, or with ``zero_unused``.
    ``p.grad`` is the script's own before and after.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, combined: Combined, zero_unused: bool) -> None:
        """Collective. Start the all-gathers of ``combined``, the result of the reduce-scatters."""
        buffers = combined.buffers
        assert buffers.scatter is not None
        self._optimizer, self._buffers, self._exchange = optimizer, buffers, buffers.scatter
        self._slot_of = dict(zip(buffers.flat.parameters, buffers.layout.slots, strict=True))  # by parameter
        self._groups = [_snapshot(group) for group in optimizer.param_groups]  # hyper-parameters as of this step
        self._group_of: dict[torch.Tensor, int] = {}  # parameters with a pending update, in the optimizer's order
        self._left_over: set[torch.Tensor] = set()  # of these, parameters that no rank used in this step
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                slot = self._slot_of.get(parameter)
                if slot is None:
                    continue
                if combined.used[slot.index] or zero_unused:
                    self._group_of[parameter] = number
                elif buffers.flat.arena_of[slot.index].memory.has_residual:  # known once it has arrived
                    self._group_of[parameter] = number
                    self._left_over.add(parameter)
        self._arriving: dict[int, InFlight] = {  # by slot: messages not yet waited for
            slot.index: in_flight for in_flight in self._exchange.gather() for slot in in_flight.loads[0].segment.slots
        }

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._group_of

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Return all parameters that take part: first those with an update, in the optimizer's order."""
        return tuple(dict.fromkeys([*self._group_of, *self._buffers.flat.parameters]))

    @property
    def done(self) -> bool:
        """Return whether everything has been received and applied."""
        return not self._group_of and not self._arriving

    def receive(self, parameter: torch.Tensor) -> None:
        """Collective. Wait for the message with this parameter's update, if it has not been waited for."""
        slot = self._slot_of.get(parameter)
        in_flight = None if slot is None else self._arriving.get(slot.index)
        if in_flight is not None:
            self._exchange.receive(in_flight)
            for other in in_flight.loads[0].segment.slots:
                del self._arriving[other.index]

    def apply(self, parameters: Iterable[torch.Tensor]) -> None:
        """Step the optimizer for those of ``parameters`` with a pending update. All have been received."""
        groups: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter in self._group_of:
                self._check_same(parameter)
                group = self._group_of.pop(parameter)
                left_over = parameter in self._left_over
                if not left_over or self._buffers.flat.left_over(self._slot_of[parameter]):
                    groups.setdefault(group, []).append(parameter)
        if groups:
            self._step([{**self._groups[number], "params": chosen} for number, chosen in groups.items()])

    def _step(self, groups: list[dict[str, Any]]) -> None:
        """Step the optimizer once, with these groups and the combined gradients; restore groups and ``p.grad``."""
        chosen = [parameter for group in groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in chosen]
        given = self._optimizer.param_groups  # the very list may be a scheduler's or another wrapper's too
        kept = given[:]
        try:
            for parameter in chosen:
                parameter.grad = self._buffers.flat.update(self._slot_of[parameter])
            given[:] = groups
            with ExitStack() as stack:
                # The forward around this may be one for inference, or in lower precision; the update is not.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
                for kind in {parameter.device.type for parameter in chosen}:
                    if torch.is_autocast_enabled(kind):
                        stack.enter_context(torch.autocast(kind, enabled=False))
                before = [_plain(group) for group in groups]
                self._optimizer.step()
                self._check_unchanged(before, groups)
        finally:
            given[:] = kept
            for parameter, gradient in zip(chosen, gradients, strict=True):
                parameter.grad = gradient

    def _check_same(self, parameter: torch.Tensor) -> None:
        """Raise ``AGMergeError`` if a parameter has another dtype, device or shape than in ``step()``."""
        slot = self._slot_of[parameter]
        now, then = (gradient_dtype(parameter), parameter.device), (slot.tensor_class.dtype, slot.tensor_class.device)
        if now != then or tuple(parameter.shape) != slot.shape:
            raise AGMergeError(
                f"AGM116: Parameter {slot.name!r} changed before its update: it was {then[0]}{list(slot.shape)} on "
                f"{then[1]} in step(), and is now {now[0]}{list(parameter.shape)} on {now[1]}. Call optimizer.flush() "
                "between step() and the change."
            )

    def _check_unchanged(self, before: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Raise ``AGMergeError`` if a step has changed a value of a group. ``before``: the plain values."""
        for was, group in zip(before, groups, strict=True):
            now = _plain(group)
            changed = [key for key in {**was, **now} if key not in was or key not in now or was[key] != now[key]]
            if changed:
                raise AGMergeError(
                    f"AGM116: {type(self._optimizer).__name__}.step() changed {changed[0]!r} of its param group. "
                    "merging='dear' requires state per parameter, because it steps a few parameters at a time. Use "
                    "another merging."
                )


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ValueError`` if ``optimizer.step()`` has hooks."""
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *optimizers._global_optimizer_pre_hooks.values(),
        *optimizers._global_optimizer_post_hooks.values(),
    )
    if any(hook not in seen_steps.OWN for hook in hooks):
        raise ValueError(
            f"merging='dear' is not supported with step hooks of {type(optimizer).__name__}, which would run once per "
            "module. Remove the hooks, or use another merging."
        )


def _snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the hyper-parameters of a group as they are now: schedulers change tensors in place."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a group that compare with ``==``."""
    return {key: value for key, value in group.items() if isinstance(value, _PLAIN)}
