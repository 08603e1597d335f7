# SPDX-License-Identifier: Apache-2.0
"""A worker is lost while another hands over what it has not sent: the survivors count on all of it, or on nothing.

Worker 1 leaves, worker 0 takes what it has not sent, and 2 and 3 look on. Each of them dies in each of its calls in
turn, and each other one loses each result in turn.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import agmerge
from agmerge.backends.local import Call
from tests.support import elastic

SIZE, STEPS, GOES_IN, NUMBERS = 4, 6, 2, 64
TAKES, LEAVES, STAYS = 0, 1, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "sparse": {"compression": "topk", "density": 0.1, "exchange": "sparse", "wire": "fp32"},
    "feedback": {"compression": "int4", "memory": "residual"},
    "updates": {"sync": "updates", "density": 0.1, "wire": "fp32"},
    "hold": {"sync": "updates", "density": 0.1, "carry": "hold", "wire": "fp32"},
    "few bits": {"sync": "updates", "exchange": "sparse"},
    "late": {"sync": "updates", "exchange": "sparse", "overlap": 1},
}


def gradient(worker: int) -> torch.Tensor:
    """Return the gradient of a worker, the same in each step."""
    return torch.randn(NUMBERS, 32, generator=torch.Generator().manual_seed(worker))


class Training:
    """Training in which worker ``victim`` dies in its call number ``dies_at`` of the first group; None: nobody does."""

    def __init__(self, setting: str, victim: int | None = None, dies_at: int = 0) -> None:
        self.setting, self._victim, self._dies_at = setting, victim, dies_at
        self.calls: list[list[str]] = [[] for _ in range(SIZE)]  # by worker, in the first group
        self.optimizers: dict[int, Any] = {}
        self.steps: list[list[int]] = [[] for _ in range(SIZE)]  # by worker: the workers in each step

    def run(self, luck: elastic.BadLuck | None = None) -> list[Any]:
        """Return by worker what commit() returned, or the error with which it ended."""
        return elastic.run(SIZE, self._train, self._kill, luck)

    def _kill(self, worker: int, generation: int, call: Call) -> None:
        if generation == 0:
            self.calls[worker].append(call.name)
            if worker == self._victim and len(self.calls[worker]) > self._dies_at:
                raise elastic.Killed

    def _train(self, worker: int) -> list[bool]:
        parameter = torch.nn.Parameter(torch.zeros(NUMBERS, 32))
        inner, options = torch.optim.SGD([parameter], lr=1.0), SETTINGS[self.setting]
        optimizer = agmerge.DistributedOptimizer(inner, [("p", parameter)], timeout=20.0, check_every=1, **options)
        self.optimizers[worker] = optimizer
        model = torch.nn.ParameterDict({"p": parameter})
        state, commits = agmerge.elastic.State(model=model, optimizer=optimizer), []
        for step in range(STEPS):
            if step == GOES_IN - 1 and worker == LEAVES:
                state.leave()
            parameter.grad = None
            parameter.backward(gradient(worker))
            optimizer.step()
            self.steps[worker].append(agmerge.size())
            commits.append(state.commit())
            if not commits[-1]:
                break
        return commits

    def shared(self, worker: int) -> torch.Tensor:
        """Return the parameters that all workers share, as this one has them."""
        reducer = self.optimizers[worker]._reducer
        if reducer.combines_gradients:
            return next(iter(reducer.members.name_all())).detach()
        return reducer.replica.shared.base["p"]

    def unsent(self, worker: int) -> torch.Tensor:
        """Return what a worker has not sent, also one that is dead."""
        return self.optimizers[worker]._reducer.replica.unsent().get("p", torch.zeros(NUMBERS, 32))

    def owed(self, worker: int) -> torch.Tensor:
        """Return what a worker, as an owner of sums, owes to all."""
        state = self.optimizers[worker]._reducer.exchange.agreed.current.tensors
        return state.get(("owed", "p"), torch.zeros(NUMBERS, 32))

    def check(self, results: list[Any]) -> None:
        """All that survivors have made is applied or kept; of the dead worker what it had not sent is lost."""
        dead = [worker for worker in range(SIZE) if isinstance(results[worker], elastic.Killed)]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, elastic.Killed):
                raise result
        staying = [worker for worker in range(SIZE) if worker not in (LEAVES, *dead)]
        counts = [self.optimizers[worker].stats()["elastic"] for worker in staying]
        for worker in staying:
            assert results[worker] == [True] * STEPS
            assert torch.equal(self.shared(worker), self.shared(staying[0]))
        left = counts[0]["left"]
        assert all((one["left"], one["lost"]) == (left, SIZE - len(staying) - left) for one in counts), counts
        if LEAVES not in dead:
            assert left == 1 and results[LEAVES][-1] is False
        if any(len(self.steps[worker]) < GOES_IN for worker in dead):
            return  # it has died within the step before, of which it has not committed what it sent
        lost = torch.zeros(NUMBERS, 32)
        for worker in dead:
            if worker != LEAVES or not left:  # else it had given it away
                lost += self.unsent(worker) / self.steps[worker][-1] + self.owed(worker)
        # A worker may see a step end when there is one less.
        sizes = [max(there) for there in itertools.zip_longest(*self.steps, fillvalue=0)]
        made = sum(gradient(worker) / sizes[step] for worker in range(SIZE) for step in range(len(self.steps[worker])))
        kept = sum(self.unsent(worker) / len(staying) + self.owed(worker) for worker in staying)
        assert torch.allclose(-self.shared(staying[0]) + kept, made - lost, atol=1e-3)


def calls_of(setting: str) -> tuple[range, Training]:
    """Return the numbers of the calls of a hand-over in which nobody dies, the same on all but the last one."""
    quiet = Training(setting)
    quiet.check(quiet.run())
    names = quiet.calls[STAYS]
    return range(names.index("who leaves"), len(names)), quiet


@pytest.mark.parametrize("victim", [TAKES, LEAVES, STAYS])
@pytest.mark.parametrize("setting", SETTINGS)
def test_wherever_a_worker_dies_what_the_others_have_not_sent_stays_theirs(setting: str, victim: int) -> None:
    calls, quiet = calls_of(setting)
    names = quiet.calls[victim]
    assert len(calls) >= 6
    for dies_at in range(calls.start, len(names)):
        training = Training(setting, victim, dies_at)
        results = training.run()
        assert isinstance(results[victim], elastic.Killed)
        training.check(results)
        if victim != LEAVES:
            told = GOES_IN + SETTINGS[setting].get("overlap", 0)  # its message arrives so many steps later
            assert len(results[LEAVES]) == told, "all are in the hand-over, and repeat it"


@pytest.mark.parametrize("unlucky", [TAKES, LEAVES, STAYS])
@pytest.mark.parametrize("setting", ["sparse", "hold"])
def test_wherever_a_result_is_lost_with_a_worker_the_others_agree_on_it(setting: str, unlucky: int) -> None:
    """Some have the end of the hand-over, and some do not; some are still in the step before it."""
    calls, quiet = calls_of(setting)
    for victim in {TAKES, LEAVES, 3} - {unlucky}:
        for call in range(calls.start - 2, len(quiet.calls[unlucky])):
            training = Training(setting)
            training.check(training.run(elastic.BadLuck(of=unlucky, call=call, victim=victim)))


def test_two_that_are_lost_one_after_the_other() -> None:
    """The result is lost on one with the first of them, and the second dies a call later."""
    calls, _ = calls_of("sparse")
    for call in calls:
        training = Training("sparse", STAYS, call + 1)
        training.check(training.run(elastic.BadLuck(of=TAKES, call=call, victim=3)))
