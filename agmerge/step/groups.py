# SPDX-License-Identifier: Apache-2.0
"""Plan by Horovod's ``groups=``: the script decides which parameters share a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import merging
from agmerge.tensors.parameters import ParameterInfo
from merging.size_limit import LIMIT


@dataclass(frozen=True)
class Groups:
    """Groups of parameters: ``number`` of equal size in the order of parameters, or as listed."""

    number: int = 0  # 0: they are listed
    listed: tuple[tuple[torch.Tensor, ...], ...] = ()  # parameters, group by group

    def by_name(self, members: Sequence[ParameterInfo]) -> list[list[str]]:
        """Return the groups as names. A parameter that is in no group is one by itself, one that is frozen in none.

        Raises ``ValueError`` for a listed parameter that needs a gradient and is not among ``members``.
        """
        if self.number:
            names = [member.name for member in members]
            size, more = divmod(len(names), self.number)
            ends = [group * size + min(group, more) for group in range(self.number + 1)]
            return [names[start:stop] for start, stop in zip(ends, ends[1:], strict=False) if start < stop]
        names_of = {member.parameter: member.name for member in members}
        for tensor in (tensor for group in self.listed for tensor in group):
            if tensor.requires_grad and tensor.numel() and tensor not in names_of:
                raise ValueError(
                    f"groups: a tensor of shape {list(tensor.shape)} is not a parameter of this optimizer. List only "
                    "its parameters."
                )
        groups = [[names_of[tensor] for tensor in group if tensor in names_of] for group in self.listed]
        grouped = {name for group in groups for name in group}
        return [group for group in groups if group] + [[name] for name in names_of.values() if name not in grouped]

    def plan(self, members: Sequence[ParameterInfo], order: Sequence[str]) -> merging.Plan:
        """Return one merge buffer a group, in the order in which groups are complete; ``order``: names by readiness.

        Raises ``ValueError`` for a group that is too large for one message.
        """
        position = {name: index for index, name in enumerate(order)}
        groups = [sorted(group, key=position.__getitem__) for group in self.by_name(members)]
        groups.sort(key=lambda group: position[group[-1]])
        numel = {member.name: member.local.numel() for member in members}
        for group in groups:
            if sum(numel[name] for name in group) >= LIMIT:
                raise ValueError(f"groups: the group of {group[0]!r} has 2**31 elements or more. Split it.")
        return merging.Plan(tuple(len(group) for group in groups), names=tuple(n for group in groups for n in group))
