# SPDX-License-Identifier: Apache-2.0
"""What exchanges are said to move is what they move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.exchanges import CPU, Make, Quiet, context, control_of, draw_work, masked, oktopk, segments_of

from agmerge import testing
from agmerge.exchanges import SegmentBuffers, SparseExchange
from agmerge.exchanges.message.format import section_codecs
from agmerge.exchanges.routing import exchanged_by, traffic_of
from agmerge.tensors.layout import TensorClass
from merging import Curve
from sparsifiers import Kind, Selection

FP32 = TensorClass(CPU, torch.float32, Kind.SPARSE)
LENGTH, K = 400_000, 20_000


def gathered(wire: str) -> Make:
    return lambda store: SparseExchange(context(store, wire=wire))


MAKE: dict[str, Callable[[str], Make]] = {
    "sparse": gathered,
    "oktopk": lambda wire: oktopk(wire=wire),
    "masked": lambda wire: masked(wire=wire),
}


def moved(exchange: str, size: int, wire: str) -> float:
    """Bytes that a rank receives, as usual algorithms of collectives move them, without surplus; of all, the mean."""
    (segment,) = segments_of([(LENGTH, FP32)])

    def body(rank: int) -> float:
        work = draw_work(segment, rank, 1.0)
        indices = work.abs().topk(K).indices.sort().values.to(torch.int32)
        load = SegmentBuffers(segment, work, torch.zeros(segment.length))
        here = MAKE[exchange](wire)(Quiet())
        control = control_of(rank, [segment])
        here.wait(here.start("b", [load], [Selection(indices, K)], control))
        calls = [(kind, length) for kind, name, length in testing.calls() if name != "b/surplus"]
        return sum(FACTOR[kind](size) * length for kind, length in calls)

    return sum(testing.run(size, body)) / size


FACTOR: dict[str, Callable[[int], float]] = {
    "all_gather": lambda size: size - 1,
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "all_to_all": lambda size: (size - 1) / size,
}


@pytest.mark.parametrize("wire", ["auto", "int8", "int4"])
@pytest.mark.parametrize("exchange", MAKE)
@pytest.mark.parametrize("size", [2, 4, 7])
def test_what_is_said_is_what_is_measured(size: int, exchange: str, wire: str) -> None:
    index, value = section_codecs(LENGTH, K, torch.float32, wire)
    expected = traffic_of(exchange, size, coded=wire != "auto").received(index.size, value.size(K))
    assert moved(exchange, size, wire) == pytest.approx(expected, rel=0.06)


def test_an_exchange_without_figures_is_an_error() -> None:
    with pytest.raises(KeyError):
        traffic_of("two-level", 4, coded=False)


@given(st.integers(2, 64), st.floats(0.5, 2), st.floats(0.2, 4), st.integers(0, 10**6), st.booleans())
def test_seconds_are_those_of_as_many_bytes(size: int, index: float, value: float, k: int, coded: bool) -> None:
    start, byte = 2e-4, 1e-8
    rate = (size - 1) * (index + value) * byte  # of an element of `sparse`
    sparse = Curve((0, 10**7), (start, start + 10**7 * rate))
    for name in ("sparse", "masked", "oktopk"):
        traffic = traffic_of(name, size, coded=coded)
        expected = traffic.rounds * start + traffic.received(k * index, k * value) * byte
        found = exchanged_by(name, sparse, size, index, value, coded=coded)(k)
        assert found == pytest.approx(expected, rel=0.02, abs=1e-5)


def test_who_is_predicted_to_be_faster() -> None:
    """Bytes decide on a slow link with several workers, rounds on a fast one, and with two workers nothing is won."""

    def fastest(workers: int, bits_a_second: float, elements: int) -> str:
        seconds = (workers - 1) * 2.1 * 8 / bits_a_second
        sparse = Curve((0, 10**7), (1e-3, 1e-3 + 10**7 * seconds))
        names = ("sparse", "masked", "oktopk")
        return min(names, key=lambda name: exchanged_by(name, sparse, workers, 1.1, 1.0, coded=True)(elements))

    assert fastest(4, 2e8, 138_000) == "masked"
    assert fastest(4, 1e10, 10_000) == fastest(2, 1e10, 138_000) == "sparse"
