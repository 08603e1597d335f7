# SPDX-License-Identifier: Apache-2.0
"""What may change while every coordinate travels in few bits: compressors, plans, checkpoints, groups of workers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import agreed, digest, on_ranks, residuals, seeded, sgd, through_a_file, wrap
from support.quantised import Net, Step, assert_by_hand, exchanged, with_rest
from support.random_program import plan_for
from torch import Tensor

import agmerge
import merging
from agmerge import testing
from agmerge.planning.replanner import Decision
from agmerge.step.config import SMALL

MODEL = seeded(Net, 3)


def steps(rank: int, model: Net, optimizer: Any, numbers: Iterable[int]) -> list[Step]:
    seen = []
    for number in numbers:
        optimizer.zero_grad()
        seen.append(exchanged(model, optimizer, lambda number=number: model.loss(rank, number).backward()))
    return seen


def bits(seen: Iterable[Step]) -> list[str]:
    return [digest(update for update in step.updates.values() if update is not None) for step in seen]


def eden(model: Net, inner: torch.optim.Optimizer | None = None, **options: Any) -> agmerge.DistributedOptimizer:
    return wrap(model, inner, **{"compression": "eden", "check_every": 1, **options})


# -- what was kept by another compressor ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_a_sparsifier_has_left_goes_with_the_next_gradients_once(size: int) -> None:
    def body(rank: int, model: Net) -> list[Step]:
        optimizer = eden(model, compression="topk", density=0.05)
        steps(rank, model, optimizer, range(2))
        left = {name: rest.clone() for name, rest in residuals(optimizer).items()}
        given = {name: rest for name, rest in left.items() if not name.startswith(("only", "unused"))}
        selected = [rest for rest in given.values() if rest.numel() >= SMALL]
        assert selected and all(rest.any() for rest in selected)
        optimizer.set_compressor("eden")
        seen = steps(rank, model, optimizer, range(2, 4))
        assert not any(rest.any() for rest in residuals(optimizer).values())
        optimizer.set_compressor("topk")
        steps(rank, model, optimizer, range(4, 5))
        assert any(rest.any() for rest in residuals(optimizer).values())
        optimizer.set_compressor("none")
        steps(rank, model, optimizer, range(5, 6))
        optimizer.set_compressor("eden")
        return [with_rest(seen[0], left), *seen[1:], *steps(rank, model, optimizer, range(6, 7))]

    assert assert_by_hand(on_ranks(size, MODEL, body), "eden") >= 12


@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_a_checkpoint_of_a_sparsifier_loses_nothing(who: str) -> None:
    def body(rank: int, model: Net) -> list[Step]:
        optimizer = eden(model, sgd(model, momentum=0.0), compression="topk", density=0.05)
        steps(rank, model, optimizer, range(2))
        state, left = through_a_file(optimizer.state_dict()), dict[str, Tensor]()
        optimizer.close()
        optimizer = eden(model, sgd(model, momentum=0.0))
        if who == "all" or rank == 0:
            optimizer.load_state_dict(state)
            left = {name: rest.clone() for name, rest in residuals(optimizer).items()}
        first, *others = steps(rank, model, optimizer, range(2, 4))
        assert not any(rest.any() for rest in residuals(optimizer).values())
        return [with_rest(first, left), *others]

    assert_by_hand(on_ranks(3, MODEL, body), "eden")


# -- state ------------------------------------------------------------------------------------------------------------


def reloaded(model: Net, optimizer: Any) -> tuple[Net, Any]:
    parameters, state = through_a_file((model.state_dict(), optimizer.state_dict()))
    assert not state["agmerge"]["residuals"]
    again = seeded(Net, 4)
    again.load_state_dict(parameters)
    made = eden(again)
    made.load_state_dict(state)
    return again, made


COPIES: dict[str, Callable[[Net, Any], tuple[Net, Any]]] = {
    "a file": reloaded,
    "deepcopy": lambda model, optimizer: copy.deepcopy((model, optimizer)),
    "pickle": lambda model, optimizer: pickle.loads(pickle.dumps((model, optimizer))),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_goes_on_with_the_same_bits(way: str) -> None:
    def body(rank: int, model: Net) -> tuple[list[str], list[str]]:
        optimizer = eden(model)
        steps(rank, model, optimizer, range(2))
        agmerge.barrier()  # seeds belong to the process
        again, made = COPIES[way](model, optimizer)
        went_on = bits(steps(rank, model, optimizer, range(2, 4)))
        optimizer.close()
        return went_on, bits(steps(rank, again, made, range(2, 4)))

    ours, theirs = agreed(on_ranks(3, MODEL, body))
    assert ours == theirs and len(set(ours)) == 2


def test_rank_0_s_file_in_a_plain_optimizer_loses_nothing() -> None:
    """As scripts without agmerge save and load: the steps are the next ones, the bits of random words aside."""

    def first(rank: int, model: Net) -> tuple[Any, list[Tensor]]:
        optimizer = eden(model)
        steps(rank, model, optimizer, range(2))
        state = copy.deepcopy((model.state_dict(), optimizer.optimizer.state_dict()))
        (step,) = steps(rank, model, optimizer, range(2, 3))
        return state, [gradient for gradient in step.gradients.values() if gradient is not None]

    found = on_ranks(2, MODEL, first)

    def second(rank: int, model: Net) -> list[Tensor]:
        inner = sgd(model)
        model.load_state_dict(found[0][0][0])
        inner.load_state_dict(copy.deepcopy(found[0][0][1]))
        (step,) = steps(rank, model, eden(model, inner), range(2, 3))
        return [gradient for gradient in step.gradients.values() if gradient is not None]

    for (_, ours), theirs in zip(found, on_ranks(2, MODEL, second), strict=True):
        assert digest(ours) == digest(theirs)


# -- plans ------------------------------------------------------------------------------------------------------------


def test_another_plan_in_the_middle_changes_no_bit() -> None:
    def body(rank: int, model: Net) -> list[Step]:
        optimizer, seen = eden(model, dense_sum="ordered"), list[Step]()
        for number in range(4):
            seen += steps(rank, model, optimizer, [number])
            exchange = optimizer._reducer.exchange
            exchange.agreed.use_plan(plan_for(exchange.agreed.buffers, seed=number))
        return seen

    def plainly(rank: int, model: Net) -> list[Step]:
        return steps(rank, model, eden(model, dense_sum="ordered"), range(4))

    changing, still = on_ranks(3, MODEL, body), on_ranks(3, MODEL, plainly)
    assert bits(changing[0]) == bits(still[0])
    assert_by_hand(changing, "eden")


def test_a_saved_plan_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    def body(rank: int, model: Net, plan: Any) -> tuple[list[str], merging.Plan]:
        optimizer = eden(model, merging=plan, dense_sum="ordered")
        seen = bits(steps(rank, model, optimizer, range(3)))
        return seen, testing.inspect(optimizer).plan

    seen, plan = agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, merging.get("threshold", bytes=20_000))))
    plan.save(path)
    again, replayed = agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, path)))
    assert again == seen and replayed == plan and len(plan.counts) > 1


def test_the_planner_finds_another_plan_while_training() -> None:
    def body(rank: int, model: Net) -> list[Step]:
        optimizer = eden(model)
        seen = steps(rank, model, optimizer, range(2))
        plans = optimizer._reducer.exchange.agreed.plans
        new = plan_for(plans.buffers, seed=rank * 0 + 5)

        def found(step: int) -> Iterator[Decision]:
            del plans.after_step
            yield Decision(plan=new)

        plans.after_step = found
        seen += steps(rank, model, optimizer, range(2, 5))
        assert testing.inspect(optimizer).plan.counts == new.counts
        return seen

    assert_by_hand(on_ranks(3, MODEL, body), "eden")


# -- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sets", [[[0, 2, 4], [1, 3]], [[0, 1, 2], [3, 4]], [[0], [1, 2, 3, 4]]], ids=str)
def test_process_sets(sets: list[list[int]]) -> None:
    def body(rank: int, model: Net) -> list[Step]:
        own = next(ranks for ranks in sets if rank in ranks)
        return steps(rank, model, eden(model, process_set=own), range(2))

    found = on_ranks(5, MODEL, body)
    for ranks in sets:
        assert_by_hand([found[rank] for rank in ranks], "eden")


@pytest.mark.parametrize("size", [2, 3])
def test_who_has_no_batches_left_counts_as_zero(size: int) -> None:
    def body(rank: int, model: Net) -> tuple[list[Step], int, str]:
        optimizer = eden(model)
        seen = steps(rank, model, optimizer, range(2 + 2 * (rank == 1)))
        return seen, optimizer.join(), digest(model)

    found = on_ranks(size, MODEL, body, inject=testing.jitter(2, 2e-4))
    assert agreed([last for _, last, _ in found]) == 1
    agreed([seen for *_, seen in found])
    longest = found[1][0]
    nothing = dict.fromkeys(longest[0].gradients)
    joined = [Step(step.number, nothing, step.updates) for step in longest]
    assert_by_hand([seen + joined[len(seen) :] for seen, *_ in found], "eden")


def test_workers_of_another_number_go_on() -> None:
    """Among two messages are gathered; among three there are two phases, and a second communicator."""
    models, made = [copy.deepcopy(MODEL) for _ in range(3)], list[Any]([None] * 3)

    def first(rank: int) -> list[Step]:
        made[rank] = eden(models[rank], sgd(models[rank], momentum=0.0))
        return steps(rank, models[rank], made[rank], range(2))

    def second(rank: int) -> list[Step]:
        made[rank] = made[rank] or eden(models[rank], sgd(models[rank], momentum=0.0))
        return steps(rank, models[rank], made[rank], range(2, 4))

    assert_by_hand(testing.run(2, first), "eden")
    models[2].load_state_dict(models[0].state_dict())
    assert_by_hand(testing.run(3, second), "eden")
    agreed([digest(model) for model in models])
    assert_by_hand(testing.run(2, second), "eden")


def test_parameters_that_are_added_take_part_from_then_on() -> None:
    def body(rank: int, model: Net) -> list[Step]:
        first = [*model.words.parameters(), *model.down.parameters(), model.ten]
        known = {id(parameter) for parameter in first}
        optimizer = eden(model, torch.optim.SGD(first, lr=0.1))
        seen = steps(rank, model, optimizer, range(2))
        for step in seen:
            assert set(step.updates) == {name for name, _ in model.named_parameters()}
        optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in known], "lr": 0.02})
        model.zero_grad()
        return steps(rank, model, optimizer, range(2, 4))

    assert assert_by_hand(on_ranks(3, MODEL, body), "eden") == 10
