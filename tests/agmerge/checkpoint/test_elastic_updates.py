# SPDX-License-Identifier: Apache-2.0
"""What an elastic Horovod's ``TorchState`` does with ``sync="updates"``: newcomers, survivors, commits that differ.

Ranks are threads of two groups, one after the other; Horovod's part is played by ``_sync``: it overwrites each model
with rank 0's before our handler is asked.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import agreed, mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge
from agmerge import testing
from agmerge.checkpoint import horovod_elastic
from agmerge.checkpoint.horovod_elastic import TorchStateHandler
from agmerge.runtime import workers

CASES: dict[str, dict[str, Any]] = {
    "apply": {"density": 0.1},
    "hold": {"carry": "hold", "every": 2, "density": 0.1},
    "overlap": {"overlap": 1, "every": 2, "density": 0.1},
    "fragments": {"overlap": 1, "every": 2, "fragments": 2, "compression": "eden-2"},
    "outer": {"outer": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True), "compression": "none"},
}


@pytest.fixture(autouse=True)
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers connect in their first step, as they do in an elastic job."""
    monkeypatch.setattr(workers, "launched_elastic", lambda: True)
    monkeypatch.setattr(horovod_elastic, "prepare", lambda kind: None)  # there is no Horovod to be told


Worker = tuple[nn.Module, agmerge.DistributedOptimizer, TorchStateHandler]


def worker(model: nn.Module, **options: Any) -> Worker:
    optimizer = wrap(model, sgd(model, lr=0.05), sync="updates", check_every=1, **options)
    return model, optimizer, TorchStateHandler(optimizer)


def survivors(size: int, steps: int, **options: Any) -> list[Worker]:
    """Workers that have made ``steps`` steps, and saved the last one."""

    def body(rank: int, model: nn.Module) -> Worker:
        found = worker(model, **options)
        train(model, found[1], rank, range(steps))
        found[2].save()
        return found

    return on_ranks(size, seeded(mlp), body)


def _sync(one: Worker) -> None:
    """Do what ``TorchState.sync`` does."""
    model, _, handler = one
    agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
    handler.sync()


def moments(one: Worker) -> list[torch.Tensor]:
    inner: Any = one[1].optimizer
    return [inner.state[p]["momentum_buffer"].clone() for p in one[0].parameters()]


def own(one: Worker) -> list[torch.Tensor]:
    return [p.detach().clone() for p in one[0].parameters()]


def unsent(one: Worker) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in one[1]._reducer.replica.unsent().items()}


def to_come(workers: list[Worker], size: int) -> dict[str, torch.Tensor]:
    """Return by how much ``workers``, of ``size``, will move shared parameters: what is unsent, and what owners owe."""
    found = {name: sum(unsent(one)[name] for one in workers) / size for name in unsent(workers[0])}
    for one in workers:
        for (kind, name), owed in one[1]._reducer.exchange.agreed.current.tensors.items():
            if kind == "owed":
                found[name] = found[name] + owed.double()
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("case", CASES)
def test_survivors_keep_what_is_theirs_and_a_newcomer_has_the_shared_parameters(case: str) -> None:
    old = survivors(2, 5, **CASES[case])
    before = [(own(one), moments(one), unsent(one)) for one in old]
    base = copy.deepcopy(dict(old[0][1]._reducer.replica.shared.base))
    newcomer = seeded(mlp, seed=1)

    def body(rank: int) -> list[Any]:
        one = old[rank] if rank < 2 else worker(newcomer, **CASES[case])
        _sync(one)
        shared: Any = one[1]._reducer.replica.shared
        assert all(torch.equal(shared.base[name], base[name]) for name in base)
        assert one[1]._reducer.replica.steps == 5
        if rank < 2:
            assert same(own(one), before[rank][0]) and same(moments(one), before[rank][1])
            waiting = unsent(one)
            assert all(torch.equal(waiting[name], before[rank][2][name]) for name in waiting)
        else:
            assert same(own(one), [base[name].to(p.dtype) for name, p in one[0].named_parameters()])
            assert same(moments(one), before[0][1]) and not any(map(torch.any, unsent(one).values()))
        train(one[0], one[1], rank, range(5, 11))  # check_every=1: shared parameters are compared
        one[1].flush()
        return [tensor.tolist() for tensor in shared.base.values()]

    agreed(testing.run(3, body))


@pytest.mark.parametrize("size", [2, 4])
def test_deaths_and_an_arrival_with_a_fragment_under_way(size: int) -> None:
    """All but two workers die, the others go on, and one more comes, each time with a fragment that has not arrived.

    It counts once: what survivors had not sent is what shared parameters move by, once everything is given out.
    """
    old = survivors(size, 5, **CASES["fragments"])
    assert all(one[1]._reducer._receive_at is not None for one in old)
    base = copy.deepcopy(dict(old[0][1]._reducer.replica.shared.base))
    left = to_come(old[:2], size)
    newcomer = worker(seeded(mlp, seed=1), **CASES["fragments"])

    def given_out(one: Worker, expected: dict[str, torch.Tensor]) -> None:
        one[1].consolidate()
        for name, p in one[0].named_parameters():
            torch.testing.assert_close(p.detach().double(), expected[name], rtol=0, atol=1e-6)

    def go_on(rank: int) -> None:
        _sync(old[rank])
        given_out(old[rank], {name: base[name].double() - left[name] for name in base})
        train(old[rank][0], old[rank][1], rank, range(5, 10))
        old[rank][2].save()

    testing.run(2, go_on)
    before, left = copy.deepcopy(dict(old[0][1]._reducer.replica.shared.base)), to_come(old[:2], 2)
    assert all(one[1]._reducer._receive_at is not None for one in old[:2])
    grown = {name: tensor.double() - left[name] for name, tensor in before.items()}
    assert any(tensor.any() for tensor in left.values())

    def grow(rank: int) -> list[list[float]]:
        one = old[rank] if rank < 2 else newcomer
        _sync(one)
        given_out(one, grown)
        train(one[0], one[1], rank, range(10, 14))  # check_every=1: shared parameters are compared
        one[1].consolidate()
        return [p.tolist() for p in one[0].parameters()]

    agreed(testing.run(3, grow))


@pytest.mark.parametrize("behind", [0, 1])
def test_a_worker_that_is_a_commit_behind_keeps_how_far_it_was_ahead(behind: int) -> None:
    """One has saved step 5, the other has lost it: shared parameters are rank 0's."""

    def body(rank: int, model: nn.Module) -> Worker:
        one = worker(model, density=0.1)
        train(model, one[1], rank, range(4))
        one[2].save()
        train(model, one[1], rank, range(4, 5))
        if rank != behind:
            one[2].save()
        return one

    old = on_ranks(2, seeded(mlp), body)

    def after(rank: int) -> list[list[float]]:
        one = old[rank]
        one[2].restore()
        waiting = unsent(one)
        _sync(one)
        for name, tensor in unsent(one).items():
            torch.testing.assert_close(tensor, waiting[name], rtol=0, atol=1e-6)
        assert one[1]._reducer.replica.steps == (4 if behind == 0 else 5)
        train(one[0], one[1], rank, range(5, 8))
        return [tensor.tolist() for tensor in one[1]._reducer.replica.shared.base.values()]

    agreed(testing.run(2, after))


def test_steps_that_were_not_saved_are_refused_on_every_rank() -> None:
    old = survivors(2, 3, density=0.1)

    def body(rank: int) -> str:
        if rank == 1:
            old[1][1]._reducer.replica.own_steps.made()
        with pytest.raises(ValueError, match=r"rank 1, 1 steps after the last commit.*state.commit\(\)") as raised:
            _sync(old[rank])
        return str(raised.value)

    agreed(testing.run(2, body))


def test_at_the_start_all_take_what_rank_0_has() -> None:
    def body(rank: int) -> list[str]:
        one = worker(seeded_of[rank], density=0.1)
        _sync(one)
        return train(one[0], one[1], rank, range(1))

    seeded_of = [seeded(mlp, seed=rank) for rank in range(2)]
    testing.run(2, body)
