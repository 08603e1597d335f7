# SPDX-License-Identifier: Apache-2.0
"""Planner after Horovod's tensor fusion: tensors that become ready within a cycle share a message."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from merging.costs import Costs, Profile
from merging.plan import Plan, seconds, whole
from merging.planner import Planner
from merging.planners.search.frontier import usable


@dataclass(frozen=True, repr=False, kw_only=True)
class Horovod(Planner):
    """Planner that sends, every `cycle` seconds, the tensors that became ready since, at most `bytes` a message.

    Elements are counted as fp32, 4 bytes each. A tensor that would take the message over `bytes` opens
    the next one (the threshold helper of MG-WFBP keeps it inside); one that is over by itself goes alone.
    A tensor ready exactly at a tick is in that tick. cycle=0 leaves only the threshold, as in PyTorch DDP:
    everything is one list, split at `bytes`. bytes=0 is HOROVOD_FUSION_THRESHOLD=0: no fusion.

    Source: the background loop and FuseResponses of Horovod, with the defaults of its current head,
    128 MiB and 1 ms. Where this differs: Horovod negotiates readiness over all ranks in each cycle, so
    its messages change from step to step; here the profile stands for all of them and the plan is fixed.
    Its look-ahead past a message of another type is left out (all tensors are alike here), as is the
    rounding of the threshold up to local_size * 512 bytes. Knows no cost: no better than its two knobs.
    """

    name: ClassVar[str] = "horovod"
    bytes: int = 134_217_728
    cycle: float = 1e-3

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", whole("horovod: bytes", self.bytes, least=0))
        object.__setattr__(self, "cycle", seconds("horovod: cycle", self.cycle))

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        ready = usable(profile, costs, mode).tolist()
        return Plan(fused_counts(profile.numel.tolist(), [tick(t, self.cycle) for t in ready], self.bytes // 4))


def tick(ready: float, cycle: float) -> float:
    """Return the number of the first tick at or after `ready`; 0 where cycle is 0 or too short to count."""
    ratio = ready / cycle if cycle else 0.0
    return math.ceil(ratio) if math.isfinite(ratio) else 0.0


def fused_counts(numel: list[int], ticks: list[float], elements: int) -> tuple[int, ...]:
    """Return tensors per message: a run of one tick, closed before it would exceed `elements` elements."""
    counts: list[int] = []
    size = 0
    for i, tensor in enumerate(numel):
        if i and ticks[i] == ticks[i - 1] and size + tensor <= elements:
            counts[-1] += 1
            size += tensor
        else:
            counts.append(1)
            size = tensor
    return tuple(counts)
