# SPDX-License-Identifier: Apache-2.0
"""Check 10 of ``benchmarks/gpu.py``, in memory: it passes, and fails where replicas or bits differ or a rank stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device import gpu_exchanges
from device.gpu_bench import HOST, Bench
from device.gpu_figures import Figure

import agmerge
import sparsifiers
from agmerge import testing

FEW = ("the default", "topk", "topk in int8", "topk, two levels", "updates, eden")


def found(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = FEW, size: int = 2) -> list[Figure]:
    """What rank 0 finds."""
    few = {name: gpu_exchanges.trainings()[name] for name in names}
    monkeypatch.setattr(gpu_exchanges, "trainings", lambda: few)
    figures, *_ = testing.run(size, lambda rank: list(gpu_exchanges.exchanges(Bench(HOST))))
    assert len(figures) == 2 * len(names)
    return figures


def test_all_is_right_where_both_trainings_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [figure.line() for figure in found(monkeypatch) if figure.failed or figure.value] == []


def test_the_list_has_every_compressor_and_every_exchange() -> None:
    trainings = gpu_exchanges.trainings()
    assert {*sparsifiers.names(), *sparsifiers.quantisers(), *sparsifiers.low_rank_names()} <= set(trainings)
    assert {"oktopk", "masked", "two-level", "sparse"} <= {one.get("exchange") for one in trainings.values()}


@pytest.mark.parametrize("name, promised", [("topk", True), ("gaussiank", False)])
def test_bits_that_differ_from_the_hosts_fail_where_they_are_promised(
    name: str, promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = gpu_exchanges.trained
    calls: dict[int, int] = {}

    def other(device: torch.device, options: dict[str, Any]) -> list[str]:
        seen, rank = train(device, options), agmerge.rank()
        calls[rank] = calls.get(rank, 0) + 1
        return seen if calls[rank] == 2 else [*seen[:-1], "other"]

    monkeypatch.setattr(gpu_exchanges, "trained", other)
    replicas, bits = found(monkeypatch, (name,))
    assert not replicas.failed and bits.value == 1 and bits.failed is promised and "from step 3" in bits.note


def test_replicas_that_differ_and_a_rank_that_stops_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_exchanges, "trained", lambda *_: [str(agmerge.rank())] * gpu_exchanges.STEPS)
    assert [figure.failed for figure in found(monkeypatch, ("topk",))] == [True, False]

    def stopping(*_: Any) -> list[str]:
        if agmerge.rank() == 1:
            raise ValueError("no such thing")
        return ["0"] * gpu_exchanges.STEPS

    monkeypatch.setattr(gpu_exchanges, "trained", stopping)
    replicas, _ = found(monkeypatch, ("topk",))
    assert replicas.failed and "ValueError: no such thing" in replicas.note
