"""List the ways that are exchanged, from the shared parameters to this worker's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agmerge.engine.carry import wide
from agmerge.tensors.dtensors import is_dtensor, local_of
from agmerge.tensors.parameters import ParameterInfo, ParameterTable


class WayTable:
    """List the ways that are exchanged: of the parameters, in float32 or wider.

    Who has taken part goes on, also when it is frozen: something of it may not have been sent yet.
    """

    def __init__(self, members: ParameterTable) -> None:
        self._members = members
        self._kept: set[str] = set()  # names of those that take part whether they need a gradient or not

    def keep(self, names: Iterable[str]) -> None:
        """Let these parameters take part from now on."""
        self._kept.update(names)

    def parameters(self) -> list[ParameterInfo]:
        """Return the parameters that take part."""
        return self._members.active(self._kept)

    def active(self) -> list[ParameterInfo]:
        """Return those of :meth:`parameters`, each with the dtype of its way."""
        return [replace(member, dtype=wide(member.dtype)) for member in self.parameters()]

    def snapshot(self) -> object:
        """Return what must not change unnoticed; of DTensors also where this rank's shard lies, which is written to."""
        sharded = [parameter for parameter in self._members.name_all() if is_dtensor(parameter)]
        return self._members.snapshot(), [local_of(parameter).data_ptr() for parameter in sharded]
