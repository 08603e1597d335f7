# SPDX-License-Identifier: Apache-2.0
"""DeAR planner: groups of modules below a size, reduce-scattered under backward and all-gathered under forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from merging.costs import Costs, Profile
from merging.plan import Plan, whole
from merging.planner import Planner
from merging.timeline import MODES, predict

MIB = 1 << 20


@dataclass(frozen=True, repr=False, kw_only=True)
class DeAR(Planner):
    """Planner that groups whole modules in the order of forward, while the group stays below `bytes`.

    A module that would reach `bytes` opens the next group (Horovod still includes an exact fit), unless
    the group is empty. Elements are counted as fp32. A module is a run of tensors with names that agree up to
    the last dot. Forward is taken to be the reverse of the readiness order, so that the small group left
    over is the one that is ready first.

    bytes=None tries 1 to 256 MiB, every whole one, and keeps the threshold with the earliest predicted end,
    the smallest of equals. DeAR's own tuner measures ten trials of Bayesian optimisation over that range;
    here the profile stands for the measurements, and every rank finds the same. 26_214_400 is its start.

    Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
    Pipelining", ICDCS 2023, and its code (dear_pytorch). Besides the common modes it plans for mode
    "dear", which needs profile.forward. One threshold for all groups: no optimum, only the best of 256.
    """

    name: ClassVar[str] = "dear"
    modes: ClassVar[tuple[str, ...]] = (*MODES, "dear")
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bytes is not None:
            object.__setattr__(self, "bytes", whole("dear: bytes", self.bytes, least=0))

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        modules = module_runs(profile.names)
        numel = profile.numel.tolist()
        if self.bytes is not None:
            return Plan(module_counts(numel, modules, self.bytes))
        plans = dict.fromkeys(Plan(module_counts(numel, modules, size * MIB)) for size in range(1, 257))
        return min(plans, key=lambda plan: predict(plan, profile, costs, mode).finish)


def module_runs(names: Sequence[str]) -> tuple[int, ...]:
    """Return tensors per module: a run of names with the same text before the last dot; no dot, one alone."""
    runs: list[int] = []
    last = ""
    for name in names:
        owner = name.rpartition(".")[0]
        if owner and owner == last:
            runs[-1] += 1
        else:
            runs.append(1)
        last = owner
    return tuple(runs)


def module_counts(numel: Sequence[int], modules: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return tensors per group, in readiness order, when groups of modules are formed from its end."""
    counts: list[int] = []
    size, stop = 0, len(numel)
    for tensors in reversed(modules):
        module = 4 * sum(numel[stop - tensors : stop])
        stop -= tensors
        if counts and size + module < limit:
            counts[-1] += tensors
            size += module
        else:
            counts.append(tensors)
            size = module
    return tuple(reversed(counts))
