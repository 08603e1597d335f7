# SPDX-License-Identifier: Apache-2.0
"""Base of all planners, with their common checks, so that a planner has only its own rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from merging.costs import Costs
from merging.pieces import Pieces, in_pieces, pieces_of
from merging.plan import Plan
from merging.profile import Profile
from merging.size_limit import check_tensors, cut
from merging.timeline import MODES, check_mode


@dataclass(frozen=True, repr=False)
class Planner(ABC):
    """Planner: a pure function from a profile and costs to a plan, with its hyper-parameters.

    A planner is a frozen dataclass (`repr=False`, `kw_only=True`) with a `name`; its fields are its
    options, plain values checked in `__post_init__`; it implements `partition`, with `in_pieces` if that may take
    more than a millisecond. The same inputs give the same plan in every process. The other class variables control
    how training uses its plans.
    """

    name: ClassVar[str]  # for `merging.get`, in the texts that ranks compare, and in reports
    modes: ClassVar[tuple[str, ...]] = MODES  # those that it plans for
    timed: ClassVar[bool] = True  # False: its plans depend on no time and no cost, so nothing is measured for it
    recheck_every: ClassVar[int] = 0  # steps between two comparisons of the measured times with the plan's; 0: never
    min_gain: ClassVar[float] = 0.0  # share by which a new plan must be predicted to end sooner than the one in use
    max_messages: ClassVar[int] = 1  # in which a merge buffer may travel, see `divide`; 1: none is divided

    @in_pieces
    def plan(self, profile: Profile, costs: Costs, mode: str = "dense") -> Pieces[Plan]:
        """Return this planner's partition of the profile's tensors, with their names.

        Every merge buffer holds fewer than 2**31 elements. Raises ValueError for a mode not in `modes` and for
        a tensor that reaches 2**31 elements.
        """
        check_mode(mode, self.modes)
        check_tensors(profile)
        plan = yield from pieces_of(self.partition, profile, costs, mode)
        plan.check(len(profile))
        return cut(replace(plan, names=profile.names), profile)

    @abstractmethod
    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        """Return the plan by this planner's own rule, which may leave names and the size limit to `plan`."""

    def options(self) -> dict[str, Any]:
        """Return the hyper-parameters by name, in alphabetical order."""
        return {name: getattr(self, name) for name in sorted(field.name for field in fields(self))}

    def __repr__(self) -> str:
        """Return e.g. `threshold(bytes=26214400)`: equal planners give equal text, on every rank."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.options().items())})"
