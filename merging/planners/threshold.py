# SPDX-License-Identifier: Apache-2.0
"""Planner with merge buffers that leave as soon as they are large enough."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from merging.checks import whole
from merging.costs import Costs
from merging.plan import Plan
from merging.planner import Planner
from merging.profile import Profile


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
