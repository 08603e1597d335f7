"""Selecting on the CPU allocates in the size of k, not in the size of the vector."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import sparsifiers

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


def test_topk_allocates_no_quarter_of_the_vector(distribution: str, draw: Callable[..., Tensor]) -> None:
    vector = draw(distribution, N)
    topk = sparsifiers.get("topk", 0.01)
    assert numpy_peak(lambda: topk.select(vector)) < QUARTER
    assert torch_largest(lambda: topk.select(vector)) < QUARTER


def test_the_gauges_see_a_temporary(draw: Callable[..., Tensor]) -> None:
    vector = draw("gaussian", N)
    array = vector.numpy()
    assert numpy_peak(lambda: abs(array)) >= 4 * N
    assert torch_largest(lambda: vector.abs()) >= 4 * N
