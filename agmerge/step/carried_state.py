# SPDX-License-Identifier: Apache-2.0
"""State of a rank between steps, as the next agreement takes it over, in a group of perhaps another size."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

import torch

import merging
from agmerge.ops import Average, ReduceOp
from agmerge.step.flat_buffers import State

OF_GRADIENTS = ("residual", "momentum")  # kinds of state that are linear in gradients


@dataclass
class CarriedState:
    """State that waits for the next agreement."""

    tensors: State = field(default_factory=dict)  # without a place in the merge buffers of now
    plan: merging.Plan | None = None  # to go on with, if it still fits
    budgets: dict[str, int] | None = None  # elements to send by name, by importance; None if not known of every tensor
    trial: str = ""  # of plans, to go on with, as Plans.trial() has returned it; "": none was under way
    origin: tuple[int, int] | None = None  # rank and size of the group that the state is of, until it is fitted

    def copied(self) -> CarriedState:
        """Return a copy with all tensors on the host: a device may have no room for them twice."""
        return replace(self, tensors={key: tensor.to("cpu", copy=True) for key, tensor in self.tensors.items()})

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return every residual of this rank, by name."""
        return {name: tensor for (kind, name), tensor in self.tensors.items() if kind == "residual"}

    def stash(self, kind: str, name: str, tensor: torch.Tensor | None) -> None:
        """Keep ``tensor`` in place of one of this kind and name; None: remove that."""
        self.tensors.pop((kind, name), None)
        if tensor is not None:
            self.tensors[kind, name] = tensor

    def forget_all_but(self, names: Container[str]) -> None:
        """Drop the state of tensors with other names: the script has removed or replaced them."""
        self.tensors = {key: tensor for key, tensor in self.tensors.items() if key[1] in names}

    def fit(self, op: ReduceOp, workers: int) -> None:
        """Scale the state from the number of workers of its origin to ``workers``, once; see :func:`rescaled`."""
        origin, self.origin = self.origin, None
        if origin is not None:
            self.tensors = rescaled(self.tensors, weight_factor(op, origin[1], workers))


def weight_factor(op: ReduceOp, before: int, now: int) -> float:
    """Return the factor for a residual of one of ``before`` workers among ``now`` workers.

    A residual enters the update with the weight of its rank's gradient: 1 / W where updates are averages, 1 where they
    are sums. The sum of residual * weight over all ranks stays the same.
    """
    return now / before if op is Average else 1.0


def rescaled(state: State, factor: float) -> State:
    """Return one rank's state as a member of another number of workers: its own residuals times ``factor``.

    A momentum that each rank has of its own gradients is linear in them, and is scaled too. A momentum of averages,
    equal on every rank, stays as it is, and so do bases, which have no scale.
    """
    if factor == 1.0:
        return state
    return {key: tensor * factor if key[0] in OF_GRADIENTS else tensor for key, tensor in state.items()}
