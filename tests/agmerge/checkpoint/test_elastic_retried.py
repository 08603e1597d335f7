# SPDX-License-Identifier: Apache-2.0
"""``state.retried``: where a worker is lost, all survivors call a function of the script again, or none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import agmerge
from agmerge.backends.local import Call
from tests.support import elastic

STEPS, SIZE = 3, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {}, "dgc": {"compression": "dgc", "density": 0.1}, "updates": {"sync": "updates"},
    "late": {"sync": "updates", "exchange": "sparse", "overlap": 1},
}  # fmt: skip


class Training:
    """Training of an elastic group, with a function of the script after each step.

    Worker 0 dies in its call number ``dies_at``; None: nobody does.
    """

    def __init__(self, options: dict[str, Any], dies_at: int | None = None, *, lets_in: bool = False) -> None:
        self.options, self.dies_at = options, dies_at
        self.lets_in = lets_in  # each exchange tells all workers that newcomers wait
        self.calls: list[str] = []  # of worker 0, in the first generation
        self.runs = [0] * SIZE  # of the function, by worker

    def run(self, luck: elastic.BadLuck | None = None) -> list[Any]:
        """Return by worker what the function returned after each step, and the parameters; an error where it died."""
        return elastic.run(SIZE, self._train, self._kill, luck)

    def _kill(self, worker: int, generation: int, call: Call) -> None:
        if worker == 0 and generation == 0:
            self.calls.append(call.name)
            if self.dies_at is not None and len(self.calls) > self.dies_at:
                raise elastic.Killed

    def _train(self, worker: int) -> list[tuple[float, int, torch.Tensor]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 40)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = agmerge.DistributedOptimizer(
            inner, model.named_parameters(), timeout=20.0, check_every=1, **self.options
        )
        state = agmerge.elastic.State(model=model, optimizer=optimizer)

        @state.retried
        def evaluated(scale: float) -> tuple[float, int]:
            self.runs[worker] += 1
            total = agmerge.allreduce(torch.tensor([scale * 10.0**worker]), op=agmerge.Sum)
            return float(total), len(agmerge.allgather(torch.ones(1)))

        source, trace = torch.Generator().manual_seed(worker), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 40, generator=source)).square().mean().backward()
            optimizer.step()
            optimizer._reducer.participation.lets_in |= self.lets_in
            result = evaluated(1.0)
            trace.append((*result, torch.cat([one.detach().flatten() for one in model.parameters()])))
            assert state.commit()
        return trace


def check(training: Training, results: list[Any]) -> None:
    """Survivors have made all steps, with equal results of one group each: of three workers, or of two."""
    assert isinstance(results[0], elastic.Killed), results[0]
    for result in results[1:]:
        if isinstance(result, BaseException):
            raise result
    for one, other in zip(results[1], results[2], strict=True):
        assert one[:2] == other[:2] and one[:2] in ((111.0, 3), (110.0, 2)), (one, other)
        assert training.options.get("sync") or torch.equal(one[2], other[2])
    assert max(training.runs[1:]) <= STEPS + 1


@pytest.mark.parametrize("setting", OPTIONS)
def test_survivors_agree_on_each_result_wherever_a_worker_dies(setting: str) -> None:
    quiet = Training(OPTIONS[setting])
    assert not any(isinstance(result, BaseException) for result in quiet.run())
    first, *_, last = (number for number, name in enumerate(quiet.calls) if "evaluated" in name)
    for call in range(first - 8, last + 1):
        training = Training(OPTIONS[setting], call)
        check(training, training.run())


def test_who_has_not_heard_of_its_end_returns_what_the_others_have() -> None:
    """An unlucky worker loses each result in turn; where that is the last one, others have gone on."""
    quiet = Training({})
    quiet.run()
    first, second, *_ = (number for number, name in enumerate(quiet.calls) if "evaluated" in name)
    runs = set()
    for call in range(first - 6, second + 1):
        for dies_at in (None, call + 1):
            training = Training({}, dies_at)
            check(training, training.run(elastic.BadLuck(of=1, call=call, victim=0)))
            runs.add(training.runs[1])
    assert runs == {STEPS, STEPS + 1}  # no repetition where another had seen its end


def test_who_is_let_in_waits_where_a_worker_is_lost_meanwhile() -> None:
    """One rank has gone on to let newcomers in, the other has lost the end of the function: both leave it for later."""
    quiet = Training({}, lets_in=True)
    quiet.run()
    end = [number for number, name in enumerate(quiet.calls) if "evaluated" in name][0]
    for call in range(end - 2, end + 1):
        training = Training({}, lets_in=True)
        check(training, training.run(elastic.BadLuck(of=1, call=call, victim=0)))


def test_ends_of_different_functions_are_one_error_on_all() -> None:
    def train(worker: int) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), timeout=20.0
        )
        state = agmerge.elastic.State(model=model, optimizer=optimizer)
        state.retried(min if worker else max)(1, 2)

    for error in elastic.run(2, train):
        assert isinstance(error, agmerge.RankMismatchError) and "disagree on function: " in str(error)


@pytest.mark.parametrize("combines", [False, True])
def test_within_a_step_it_says_where_to_call_it(combines: bool) -> None:
    def train(worker: int) -> None:
        model = torch.nn.Linear(40, 40)
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), timeout=20.0
        )
        state = agmerge.elastic.State(model=model, optimizer=optimizer)
        model(torch.ones(1, 40)).sum().backward()
        if combines:
            optimizer.synchronize()
        state.retried(lambda: None)()

    for error in elastic.run(2, train):
        assert isinstance(error, agmerge.AGMergeError) and "AGM111" in str(error)
