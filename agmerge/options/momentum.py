# SPDX-License-Identifier: Apache-2.0
"""Momentum of an optimizer's groups, which a memory applies before selection in the optimizer's place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import sparsifiers
from agmerge.tensors.layout import Slot
from agmerge.tensors.parameters import optimizers_of
from sparsifiers import Rate

Groups = Sequence[Mapping[str, Any]]

UNKNOWN = "{what}. Pass optimizer=, the optimizer that steps."


class GroupRates:
    """Momentum of ``optimizer``'s groups, for a memory that applies it in the optimizer's place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers_of(optimizer)  # their groups are read whenever a slot is asked for

    def by_slot(self, parameters: Sequence[torch.Tensor]) -> Callable[[Slot], Rate]:
        """Return a function from a slot to the present rate of its parameter's group; parameters keep their groups.

        ``parameters``: in the order of the slots.
        """
        place_of = {
            parameter: (optimizer, number)
            for optimizer in self._optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        places = [place_of[parameter] for parameter in parameters]

        def by_slot(slot: Slot) -> Rate:
            optimizer, number = places[slot.index]
            return rate(optimizer.param_groups[number])

        return by_slot


def rate(group: Mapping[str, Any]) -> Rate:
    """Return the momentum of a group of ``torch.optim.SGD``."""
    return _rate(float(group["momentum"]), bool(group["nesterov"]))


_rate = functools.lru_cache(Rate)  # one of a few, asked for in every step for every tensor


def applies(optimizer: torch.optim.Optimizer, groups: Groups | None = None) -> bool:
    """Return whether ``optimizer`` has a momentum that a memory can apply in its place: that of ``torch.optim.SGD``.

    ``groups``: its own, or those that it is about to load.
    """
    groups = optimizer.param_groups if groups is None else groups
    moving = [group for group in groups if group.get("momentum")]
    return bool(moving) and _is_sgd(optimizer) and not any(group.get("dampening") for group in moving)


def rates(
    optimizer: torch.optim.Optimizer | None, memory: sparsifiers.Memory, groups: Groups | None = None
) -> GroupRates | None:
    """Return the groups' momentum, which ``memory`` follows; None: it has its own, or none.

    Raises ``ValueError`` where both would apply one, or a memory cannot apply the groups'. ``groups``: those of
    ``optimizer`` (None: it is not known), or those that it is about to load.
    """
    if not memory.has_momentum:
        return None
    if optimizer is None:
        raise ValueError(UNKNOWN.format(what=f"{memory} applies the momentum of the optimizer before selection"))
    groups = optimizer.param_groups if groups is None else groups
    kind = type(optimizer).__name__
    for number, group in enumerate(groups):
        if "betas" in group:
            raise ValueError(
                f"{memory} applies momentum before selection, but {kind} has its own (betas, group {number}). Pass "
                "memory='residual'."
            )
    moving = [number for number, group in enumerate(groups) if group.get("momentum")]
    if not moving:
        return None
    both = f"{memory} applies momentum before selection, but group {moving[0]} of {kind} has "
    both += f"momentum={groups[moving[0]]['momentum']} too"
    if not _is_sgd(optimizer):
        raise ValueError(
            f"{both}. Only the momentum of torch.optim.SGD can be applied before selection. Set it to 0, or pass "
            "memory='residual'."
        )
    if not memory.follows:
        raise ValueError(
            f"{both}. Set momentum in one place: pass memory=sparsifiers.memory('dgc') without momentum, which "
            "applies the optimizer's, or use SGD(momentum=0)."
        )
    check_dampening(groups)
    if memory.options().get("nesterov") and not all(groups[number].get("nesterov") for number in moving):
        raise ValueError(f"{both}, without nesterov. Set it in one place, SGD(nesterov=True).")
    return GroupRates(optimizer)


def _is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step is that of ``torch.optim.SGD``, of several each; others use momenta otherwise."""
    return all(
        isinstance(each, torch.optim.SGD) and inspect.unwrap(type(each).step) is inspect.unwrap(torch.optim.SGD.step)
        for each in optimizers_of(optimizer)
    )


def check_dampening(groups: Groups) -> None:
    """Raise ``ValueError`` for a group with a momentum that has dampening."""
    for number, group in enumerate(groups):
        if group.get("momentum") and group.get("dampening"):
            raise ValueError(
                f"group {number} has dampening={group['dampening']}, which is not supported when momentum is applied "
                "before selection. Set dampening=0, or pass memory='residual'."
            )
