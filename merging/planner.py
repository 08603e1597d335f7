# SPDX-License-Identifier: Apache-2.0
"""Base of all planners, with their common checks, so that a planner has only its own rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from merging.costs import Costs, Profile
from merging.pieces import Pieces, in_pieces, pieces_of
from merging.plan import Plan
from merging.timeline import MODES, check_mode, check_tensors, cut


@dataclass(frozen=True, repr=False)
class Planner(ABC):
    """Base class of planners, which compute a plan from a profile and costs.

    A planner is a frozen dataclass (``repr=False, kw_only=True``) with a ``name``. Its fields are its options, plain
    values that ``__post_init__`` checks. It writes ``partition``, with ``in_pieces`` if that can take more than a
    millisecond. The same inputs must give the same plan in every process. Class variables control how training uses the
    plans (docs/extend.md).
    """

    name: ClassVar[str]  # for `merging.get`, in the texts that ranks compare, and in reports
    modes: ClassVar[tuple[str, ...]] = MODES  # those that it plans for
    timed: ClassVar[bool] = True  # False: its plans depend on no time and no cost, so nothing is measured for it
    recheck_every: ClassVar[int] = 0  # steps between two comparisons of the measured times with the plan's; 0: never
    min_gain: ClassVar[float] = 0.0  # share by which a new plan must be predicted to end sooner than the one in use
    max_messages: ClassVar[int] = 1  # in which a merge buffer may travel, see `divide`; 1: none is divided

    @in_pieces
    def plan(self, profile: Profile, costs: Costs, mode: str = "dense") -> Pieces[Plan]:
        """Compute the plan for a model.

        Args:
            profile (Profile): Sizes and times of the tensors.
            costs (Costs): Costs of selection and messages.
            mode (str): ``"dense"``, ``"ahead"`` or ``"behind"``, see ``sparsify`` of
                :class:`agmerge.DistributedOptimizer`. Default: ``"dense"``.

        Returns:
            A :class:`Plan` with names. Each merge buffer has fewer than 2**31 values.

        Raises:
            ValueError: If the planner does not support the mode, or a tensor has 2**31 values or more.
        """
        check_mode(mode, self.modes)
        check_tensors(profile)
        plan = yield from pieces_of(self.partition, profile, costs, mode)
        plan.check(len(profile))
        return cut(replace(plan, names=profile.names), profile)

    @abstractmethod
    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        """Return the plan by the rule of this planner. ``plan`` adds names, and enforces the size limit."""

    def options(self) -> dict[str, Any]:
        """Return the options by name, in alphabetical order."""
        return {name: getattr(self, name) for name in sorted(field.name for field in fields(self))}

    def __repr__(self) -> str:
        """Return e.g. `threshold(bytes=26214400)`: equal planners give equal text, on every rank."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.options().items())})"
