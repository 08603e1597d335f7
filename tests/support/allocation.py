# SPDX-License-Identifier: Apache-2.0
"""How much memory a call takes at most."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

N = 4_000_000


QUARTER = N * 4 // 4  # bytes: a quarter of the fp32 vector


def numpy_peak(run: Callable[[], object]) -> int:
    """The most bytes that numpy and Python held at once beyond what they held before."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def torch_largest(run: Callable[[], object]) -> int:
    """The most bytes that one torch operation allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    return max((event.cpu_memory_usage for event in recorded.events()), default=0)
