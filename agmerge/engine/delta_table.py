# SPDX-License-Identifier: Apache-2.0
"""Table of the deltas that are exchanged: of the parameters, from this worker's to the shared ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agmerge.engine.shared_parameters import wide
from agmerge.tensors.dtensors import is_dtensor, local_of
from agmerge.tensors.parameters import ParameterInfo, ParameterTable


class DeltaTable:
    """Table of the deltas that are exchanged: of the parameters, in float32 or wider.

    A parameter that has taken part goes on, also when it is frozen: some of its updates may not have been sent yet.
    """

    def __init__(self, members: ParameterTable) -> None:
        self._members = members
        self._tracked: set[str] = set()  # parameters that take part whether they need a gradient or not

    def track(self, names: Iterable[str]) -> None:
        """Make these parameters take part from now on, whether they need a gradient or not."""
        self._tracked.update(names)

    def parameters(self) -> list[ParameterInfo]:
        """Return the parameters that take part."""
        return [replace(one, dtype=one.parameter.dtype) for one in self._members.active(self._tracked)]

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
        """Return the table's snapshot; of DTensors also the address of this rank's shard, which is written to."""
        sharded = [parameter for parameter in self._members.name_all() if is_dtensor(parameter)]
        return self._members.snapshot(), [local_of(parameter).data_ptr() for parameter in sharded]
