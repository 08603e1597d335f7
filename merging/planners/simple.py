# SPDX-License-Identifier: Apache-2.0
"""Planners by a simple rule: so many tensors, each tensor by itself, all of them, or so many bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from merging.costs import Costs, Profile
from merging.plan import Plan, whole
from merging.planner import Planner


@dataclass(frozen=True, repr=False, kw_only=True)
class Count(Planner):
    """Planner that closes a merge buffer at every `tensors`-th tensor; the last one has the remainder.

    Knows neither sizes nor times. Source: the fixed counts that FGBuff's and ADTopk's experiments use;
    10 is the number of FGBuff's OMGS baseline for a model without one of its own.
    """

    name: ClassVar[str] = "count"
    timed: ClassVar[bool] = False
    tensors: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", whole("count: tensors", self.tensors, least=1))

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        return Plan(even_counts(len(profile), self.tensors))


def even_counts(n: int, tensors: int) -> tuple[int, ...]:
    """Return tensors per merge buffer: `tensors` each, and the remainder of n, if any, in a last one."""
    full, last = divmod(n, tensors)
    return (tensors,) * full + (last,) * (last > 0)


@dataclass(frozen=True, repr=False, kw_only=True)
class Layerwise(Planner):
    """Planner with a merge buffer for every tensor: the most overlap, and n start-ups.

    The optimum where a start-up costs nothing; elsewhere the baseline to beat. Source: wait-free
    backpropagation (Zhang et al., Poseidon, USENIX ATC 2017), the WFBP of arXiv 1811.11141.
    """

    name: ClassVar[str] = "layerwise"
    timed: ClassVar[bool] = False

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        return Plan((1,) * len(profile))


@dataclass(frozen=True, repr=False, kw_only=True)
class Single(Planner):
    """Planner with all tensors in one merge buffer: one start-up, and no overlap with backward.

    The optimum where backward takes no time. Source: the packed message of Sync-EASGD (You, Buluc and
    Demmel, SC 2017); no elastic averaging.
    """

    name: ClassVar[str] = "single"
    timed: ClassVar[bool] = False

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        return Plan((len(profile),))


@dataclass(frozen=True, repr=False, kw_only=True)
class Threshold(Planner):
    """Planner that closes a merge buffer as soon as it has `bytes` or more; the tail is a merge buffer of its own.

    Elements are counted as fp32, 4 bytes each. 0 closes at every tensor. The tensor that crosses the
    threshold is inside, as in the threshold helper of the MG-WFBP and OMGS-SGD code; Horovod and DeAR
    close before it. The default, 25 MiB, is DeAR's and PyTorch DDP's.
    """

    name: ClassVar[str] = "threshold"
    timed: ClassVar[bool] = False
    bytes: int = 26_214_400

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", whole("threshold: bytes", self.bytes, least=0))

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        return Plan(threshold_counts(profile.numel.tolist(), -(-self.bytes // 4)))


def threshold_counts(numel: Iterable[int], elements: int) -> tuple[int, ...]:
    """Return tensors per merge buffer when one is closed once it holds `elements` elements or more."""
    counts = []
    tensors = size = 0
    for tensor in numel:
        tensors, size = tensors + 1, size + tensor
        if size >= elements:
            counts.append(tensors)
            tensors = size = 0
    return (*counts, tensors) if tensors else tuple(counts)
