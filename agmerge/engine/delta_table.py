# SPDX-License-Identifier: Apache-2.0
"""Table of the deltas that are exchanged: of the parameters, from this worker's to the shared ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from agmerge.engine.shared_parameters import wide
from agmerge.tensors.parameters import ParameterInfo, ParameterTable, is_dtensor, local_of


class DeltaTable:
    """Table of the deltas that are exchanged: of the parameters, in float32 or wider.

    A parameter that has taken part goes on, also when it is frozen: some of its updates may not have been sent yet. So
    does one that is frozen and has a gradient, which the optimizer steps with.
    """

    def __init__(self, members: ParameterTable) -> None:
        self._members = members
        self._tracked: set[str] = set()  # parameters that take part whether they need a gradient or not

    def track(self, names: Iterable[str]) -> None:
        """Make these parameters take part from now on, whether they need a gradient or not."""
        self._tracked.update(names)

    def parameters(self) -> list[ParameterInfo]:
        """Return the parameters that take part."""
        self._taking_part()  # so that frozen ones with a gradient are tracked
        return [replace(one, dtype=one.parameter.dtype) for one in self._members.active(self._tracked)]

    def _taking_part(self) -> list[torch.Tensor]:
        """Return the script's tensors of :meth:`parameters`; track those that are frozen and have a gradient."""
        every, name_of = self._members.name_all(), self._members.name_of
        self.track(name_of(p) for p in every if not p.requires_grad and p.grad is not None)
        return [p for p in every if p.requires_grad or name_of(p) in self._tracked]

    @property
    def is_narrow(self) -> bool:
        """Return whether a parameter has 16 bits, which cannot hold its unsent updates exactly."""
        return any(wide(member.dtype) != member.dtype for member in self.parameters())

    def active(self) -> list[ParameterInfo]:
        """Return those of :meth:`parameters`, each with the dtype of its delta."""
        return [replace(member, dtype=wide(member.dtype)) for member in self.parameters()]

    def names(self) -> set[str]:
        """Return the names of all parameters of the optimizer."""
        return self._members.names()

    def snapshot(self) -> object:
        """Return identity, dtype, device and shape of what takes part: if they differ, ranks agree again.

        Of DTensors also the address of this rank's shard, which is written to.
        """
        taking_part = self._taking_part()
        sharded = [local_of(parameter).data_ptr() for parameter in taking_part if is_dtensor(parameter)]
        return [(id(p), p.dtype, p.device, p.shape) for p in taking_part], sharded
