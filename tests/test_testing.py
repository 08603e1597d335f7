# SPDX-License-Identifier: Apache-2.0
"""``agmerge.testing``: what a test can inject, and what it gets back."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import agmerge
from agmerge import testing
from agmerge.errors import AGMergeError, PeerLost


def test_ranks_know_where_they_are() -> None:
    def body(rank: int) -> tuple[object, ...]:
        assert agmerge.is_initialized()
        here = agmerge.rank(), agmerge.size(), agmerge.local_rank(), agmerge.local_size()
        return *here, agmerge.backend_name()

    assert testing.run(3, body) == [(rank, 3, rank, 3, "local") for rank in range(3)]
    assert not agmerge.is_initialized()  # nothing is left behind in this thread


def test_groups_are_separate_also_when_they_are_nested() -> None:
    def inner(rank: int) -> float:
        return agmerge.allreduce(torch.tensor([1.0]), op=agmerge.Sum).item()

    def outer(rank: int) -> tuple[list[float], float]:
        return testing.run(3, inner), inner(rank)

    assert testing.run(2, outer) == [([3.0] * 3, 2.0)] * 2


def test_inject_sees_every_call_before_it_starts() -> None:
    seen: dict[int, list[tuple[str, str, int, float]]] = {0: [], 1: []}

    def inject(call: testing.Call) -> None:
        seen[call.rank].append((call.kind, call.name, call.index, call.tensor.sum().item()))

    def body(rank: int) -> list[tuple[str, str, int]]:
        world = agmerge.runtime.workers.world()
        copy = world.duplicate("copy", 30.0)
        world.all_reduce(torch.full((3,), float(rank)), "a").wait(30.0)
        copy.broadcast(torch.full((2,), float(rank)), 0, "b").wait(30.0)
        world.all_gather(torch.empty(2), torch.ones(1), "c").wait(30.0)
        return testing.calls()

    logs = testing.run(2, body, inject=inject)
    for rank in range(2):
        assert logs[rank] == [("all_reduce", "a", 12), ("broadcast", "b", 8), ("all_gather", "c", 4)]
        assert seen[rank] == [
            ("all_reduce", "a", 0, 3.0 * rank),
            ("broadcast", "b", 1, 2.0 * rank),
            ("all_gather", "c", 2, 1.0),
        ]


def test_inject_can_damage_a_message() -> None:
    def inject(call: testing.Call) -> None:
        if call.rank == 1 and call.index == 1:
            call.tensor.add_(100.0)

    def body(rank: int) -> list[float]:
        tensors = [torch.ones(1), torch.ones(1), torch.ones(1)]
        for i, tensor in enumerate(tensors):
            agmerge.runtime.workers.world().all_reduce(tensor, f"sum {i}").wait(30.0)
        return [tensor.item() for tensor in tensors]

    assert testing.run(2, body, inject=inject) == [[2.0, 102.0, 2.0]] * 2


def test_inject_can_fail_a_rank() -> None:
    def inject(call: testing.Call) -> None:
        if call.rank == 2 and call.name == "second":
            raise OSError("cable")

    def body(rank: int) -> None:
        for name in ("first", "second"):
            agmerge.runtime.workers.world().all_reduce(torch.ones(1), name).wait(30.0)

    errors = testing.run(3, body, inject=inject, return_errors=True)
    assert isinstance(errors[2], OSError)
    for error in errors[:2]:
        assert isinstance(error, PeerLost)
        assert str(error) == "AGM206: second: rank 2 raised OSError: cable"
    with pytest.raises(OSError, match="cable"):  # not PeerLost, which is a consequence
        testing.run(3, body, inject=inject)


def test_results_and_errors_stand_rank_by_rank() -> None:
    def body(rank: int) -> str:
        if rank == 1:
            raise ValueError("one")
        return f"rank {rank}"

    first, second, third = testing.run(3, body, return_errors=True)
    assert (first, third) == ("rank 0", "rank 2")
    assert isinstance(second, ValueError)


def test_an_exit_of_a_rank_is_not_swallowed() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        testing.run(2, body)


def test_jitter_is_bounded_and_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    lock = threading.Lock()

    def sleep(seconds: float) -> None:
        with lock:
            slept.append(seconds)

    def body(rank: int) -> float:
        total = torch.zeros(1)
        for i in range(10):
            total += agmerge.allreduce(torch.tensor([float(i * rank)]), op=agmerge.Sum)
        return total.item()

    monkeypatch.setattr(testing.time, "sleep", sleep)
    results, times = [], []
    for seed in (1, 1, 2):
        slept.clear()
        results.append(testing.run(3, body, inject=testing.jitter(seed, longest=0.002)))
        times.append(sorted(slept))
    assert results == [[135.0] * 3] * 3
    assert len(times[0]) == 3 * 10 * 2  # each allreduce is an agreement and a sum
    assert times[0] == times[1] != times[2]
    assert 0.0 <= times[0][0] and times[0][-1] <= 0.002


def test_calls_outside_a_group() -> None:
    with pytest.raises(AGMergeError, match="has not been initialized"):
        testing.calls()


# -- what is inside an optimizer ----------------------------------------------------------------------------------


def test_an_optimizer_can_be_looked_into_before_the_first_step_and_after_it() -> None:
    original = torch.nn.Linear(8, 400)

    def body(rank: int) -> None:
        model = copy.deepcopy(original)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), compression="topk", density=0.01)
        assert testing.inspect(optimizer) == testing.Inspection(plan=None, residuals={}, measurements=None, classes={})
        model(torch.ones(1, 8) + rank).sum().backward()
        optimizer.step()
        found = testing.inspect(optimizer)
        assert found.plan == optimizer.plan and found.measurements is None
        assert {name: tensor_class.sparse for name, tensor_class in found.classes.items()} == {
            "weight": True,
            "bias": False,
        }
        assert found.residuals.keys() == {"weight", "bias"} and not found.residuals["bias"].any()  # it may be rounded
        saved = optimizer.state_dict()["agmerge"]["residuals"]["weight"]
        assert torch.equal(found.residuals["weight"], saved) and saved.any()
        found.residuals["weight"].zero_()  # a copy
        assert testing.inspect(optimizer).residuals["weight"].any()
        optimizer.measure()
        measured = testing.inspect(optimizer).measurements
        assert measured is not None and measured.dumps() == optimizer.measurements.dumps()

    testing.run(2, body)
