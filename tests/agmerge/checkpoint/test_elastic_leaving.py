# SPDX-License-Identifier: Apache-2.0
"""``state.leave()``: a worker goes after a whole step, and what it had not sent is applied all the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import agmerge
from agmerge.backends.local import Call
from tests.support import elastic

SIZE, STEPS, GOES_IN, NUMBERS = 3, 8, 3, 64
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"compression": "none"},
    "default": {},
    "sparse": {"compression": "topk", "density": 0.1, "exchange": "sparse", "wire": "fp32"},
    "feedback": {"compression": "int4", "memory": "residual"},
    "updates": {"sync": "updates", "density": 0.1, "wire": "fp32"},
    "hold": {"sync": "updates", "density": 0.1, "carry": "hold", "wire": "fp32"},
    "local": {"sync": "updates", "density": 0.1, "every": 2, "wire": "fp32"},
    "late": {"sync": "updates", "density": 0.1, "overlap": 1, "wire": "fp32"},
}
Result = tuple[torch.Tensor, torch.Tensor, list[bool], dict[str, float]]


def gradient(worker: int) -> torch.Tensor:
    """Return the gradient of a worker, the same in each step."""
    return torch.randn(NUMBERS, 32, generator=torch.Generator().manual_seed(worker))


def train(worker: int, options: dict[str, Any], leavers: tuple[int, ...]) -> Result:
    """Return the shared parameters, what this worker has not sent, what commit() returned, and the counts."""
    parameter = torch.nn.Parameter(torch.zeros(NUMBERS, 32))
    inner = torch.optim.SGD([parameter], lr=1.0)
    optimizer = agmerge.DistributedOptimizer(inner, [("p", parameter)], timeout=20.0, check_every=1, **options)
    model = torch.nn.ParameterDict({"p": parameter})
    state = agmerge.elastic.State(model=model, optimizer=optimizer)
    commits: list[bool] = []
    for step in range(STEPS):
        if step == GOES_IN - 1 and worker in leavers:
            state.leave()
        parameter.grad = None
        parameter.backward(gradient(worker))
        optimizer.step()
        commits.append(state.commit())
        if not commits[-1]:
            break
    reducer = optimizer._reducer
    shared = parameter.detach() if reducer.combines_gradients else reducer.replica.shared.base["p"]
    unsent = reducer.replica.unsent().get("p", torch.zeros(NUMBERS, 32))
    return shared.clone(), unsent.clone(), commits, optimizer.stats()["elastic"]


def run(options: dict[str, Any], leavers: tuple[int, ...], inject: elastic.Inject | None = None) -> list[Any]:
    """Return by worker what :func:`train` does."""
    return elastic.run(SIZE, lambda worker: train(worker, options, leavers), inject)


@pytest.mark.parametrize("leavers", [(0,), (2,), (0, 1)], ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_sum_of_all_gradients_is_applied_or_kept(setting: str, leavers: tuple[int, ...]) -> None:
    """Also those of the workers that have left, up to their last step, with the weight that they had then."""
    results = run(SETTINGS[setting], leavers)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    staying = [worker for worker in range(SIZE) if worker not in leavers]
    gone_after = len(results[leavers[0]][2])
    assert gone_after < STEPS and results[leavers[0]][2] == [True] * (gone_after - 1) + [False]
    for worker in staying:
        shared, _, commits, counts = results[worker]
        assert torch.equal(shared, results[staying[0]][0]) and commits == [True] * STEPS
        assert counts["left"] == len(leavers) and not counts["lost"] and not counts["repeated"]
    if setting == "default":
        return  # what its quantiser rounds is nobody's
    first = sum(gradient(worker) for worker in range(SIZE)) / SIZE * gone_after
    later = sum(gradient(worker) for worker in staying) / len(staying) * (STEPS - gone_after)
    kept = sum(results[worker][1] for worker in staying) / len(staying)
    assert torch.allclose(-results[staying[0]][0] + kept, first + later, atol=1e-3)


def test_any_thread_may_ask_for_it_and_the_step_after_is_the_last() -> None:
    """Asked for between two passes of one step, whose messages have begun to leave: the next step has the news."""

    def asks_late(worker: int) -> list[bool]:
        model = torch.nn.Linear(40, 40)
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), timeout=20.0, merging="layerwise"
        )
        state, commits = agmerge.elastic.State(model=model, optimizer=optimizer), []
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 40)).sum().backward()
            if step == 1 and worker == 1:
                state.leave()
            optimizer.step()
            commits.append(state.commit())
            if not commits[-1]:
                break
        return commits

    assert elastic.run(2, asks_late) == [[True] * 4, [True, True, False]]


def test_where_all_leave_all_end() -> None:
    for result in run({}, (0, 1, 2)):
        assert result[2][-1] is False and len(result[2]) == GOES_IN


def test_a_lone_worker_leaves_at_its_next_commit() -> None:
    [result] = elastic.run(1, lambda worker: train(worker, {}, (0,)))
    assert not isinstance(result, BaseException) and len(result[2]) == GOES_IN


@pytest.mark.parametrize("setting", ["dense", "sparse", "hold"])
def test_a_death_while_others_leave_ends_nobody_else(setting: str) -> None:
    """Worker 1 leaves and worker 2 dies, in each call of the step and of the commit in turn."""
    calls: list[str] = []
    lock = threading.Lock()

    def killing(dies_at: int) -> elastic.Inject:
        def kill(worker: int, generation: int, call: Call) -> None:
            if worker == 2 and generation == 0:
                with lock:
                    calls.append(call.name)
                    if len(calls) > dies_at:
                        raise elastic.Killed

        return kill

    assert not any(isinstance(result, BaseException) for result in run(SETTINGS[setting], (1,), killing(10**9)))
    first = calls.index("who leaves")
    last = len(calls)
    for dies_at in range(first - 4, last):
        calls.clear()
        stays, leaves, dead = run(SETTINGS[setting], (1,), killing(dies_at))
        assert isinstance(dead, elastic.Killed)
        assert not isinstance(stays, BaseException) and stays[2] == [True] * STEPS, stays
        assert not isinstance(leaves, BaseException) and leaves[2][-1] is False, leaves
