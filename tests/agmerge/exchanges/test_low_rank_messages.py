# SPDX-License-Identifier: Apache-2.0
"""What travels: as many bytes and collectives as the formulas say, and what comes of it whatever the plan."""

from __future__ import annotations

import math

import pytest
import torch
from support import digest, random_plan
from support.low_rank_steps import (
    CONTROL,
    LEFT,
    MATRICES,
    NAMES,
    SHAPES,
    Step,
    accumulated,
    distance,
    drawn,
    made,
    mean,
    opened,
    steps_of,
)
from torch import Tensor

import merging
from agmerge import testing

both = pytest.mark.parametrize("name", NAMES)
PLANS = ("layerwise", "single", "threshold", merging.Plan((2, 3)), merging.Plan((1, 1, 3)), random_plan(1, len(SHAPES)))
Call = tuple[str, str, int]


def single(rank: int, step: int) -> dict[str, Tensor]:
    return drawn(rank, step, torch.float32)


def lengths(tensor: str) -> tuple[int, int]:
    """The elements of a tensor's left and right factors of one row."""
    return SHAPES[tensor][0], math.prod(SHAPES[tensor][1:])


def calls_of(name: str, size: int, steps: int, **options: object) -> tuple[list[list[Call]], list[Step], list[int]]:
    """The collectives of each step on rank 0, what the step was, and the bytes in its totals, step by step."""

    def body(rank: int) -> tuple[list[list[Call]], list[Step], list[int]]:
        exchange = opened({tensor: torch.zeros(shape) for tensor, shape in SHAPES.items()}, name, **options)
        exchange.agree()
        calls, seen, totals, known = [], [], [0], len(testing.calls())
        for step in range(steps):
            seen.append(made(exchange, single(rank, step)))
            calls.append(testing.calls()[known:])
            known = len(testing.calls())
            totals.append(exchange.agreed.totals.bytes_sent)
        return calls, seen, totals

    return testing.run(size, body)[0]


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize(("wire", "itemsize"), [("auto", 4), ("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_powersgd_sends_both_factors_and_what_is_no_matrix(rank: int, wire: str, itemsize: int) -> None:
    """``rank * sum(n + m)`` elements and the others whole, with the control numbers behind them."""
    calls, _, totals = calls_of("powersgd", 2, 4, rank=rank, wire=wire, merging="single")
    factors = rank * sum(sum(lengths(tensor)) for tensor in MATRICES)
    control = CONTROL + len(MATRICES)
    sent = [math.prod(SHAPES["bias"]) * 4, factors * itemsize]
    if wire == "auto":  # one message
        control_bytes = (control + 1) * 4
        assert [len(of_step) for of_step in calls] == [2] * 4
    else:  # what is sent whole is not cast, and has a message of its own, padded to whole shards
        control_bytes = (
            control * itemsize + sum(size for kind, name, size in calls[0] if name == "buffer 0.1") - sent[0]
        )
        assert control_bytes <= control * itemsize + (CONTROL + 3) * 4
        assert [len(of_step) for of_step in calls] == [3] * 4
    for step, of_step in enumerate(calls):
        assert {kind for kind, *_ in of_step} == {"all_reduce"}
        assert sum(size for *_, size in of_step) == sum(sent) + control_bytes == totals[step + 1] - totals[step]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_acpsgd_sends_one_factor_in_turn_and_half_of_both_on_an_average(rank: int) -> None:
    calls, seen, totals = calls_of("acpsgd", 2, 7, rank=rank, merging="single")
    whole, control = math.prod(SHAPES["bias"]), CONTROL + len(SHAPES)
    factors = rank * sum(sum(lengths(tensor)) for tensor in MATRICES)
    assert [len(of_step) for of_step in calls] == [2, 1, 1, 1, 1, 1, 1]
    assert sum(size for *_, size in calls[0]) == (factors + whole + control) * 4
    for step in range(1, 7):
        left = [tensor for tensor in MATRICES if seen[step].bases[tensor][0] == LEFT]  # sent, and the basis now
        elements = rank * sum(lengths(tensor)[0 if tensor in left else 1] for tensor in MATRICES)
        ((kind, _, size),) = calls[step]
        assert (kind, size) == ("all_reduce", (elements + whole + control) * 4)
        assert totals[step + 1] - totals[step] == size
    two = sum(size for of_step in calls[1:3] for *_, size in of_step)
    assert two == (factors + 2 * whole + 2 * control) * 4


@both
@pytest.mark.parametrize("merging", ["layerwise", "single", merging.Plan((2, 3))], ids=["layerwise", "single", "2 3"])
def test_each_merge_buffer_makes_its_collectives_in_plan_order(name: str, merging: object) -> None:
    """One a round: two for both factors, one for one, or for what is sent whole alone."""
    calls, _, _ = calls_of(name, 2, 3, merging=merging)
    counts = {"layerwise": [1] * 5, "single": [5]}.get(str(merging), [2, 3])
    names = list(SHAPES)
    buffers = [[names.pop(0) for _ in range(count)] for count in counts]
    of_matrices = [number for number, buffer in enumerate(buffers) if set(buffer) & set(MATRICES)]
    for step, of_step in enumerate(calls):
        first = [f"buffer {number}" for number in range(len(buffers))]
        second = [f"buffer {number}/second" for number in of_matrices] if name == "powersgd" or step == 0 else []
        assert [call_name for _, call_name, _ in of_step] == first + second


def test_bytes_are_counted_for_the_whole_of_a_sum_in_rank_order() -> None:
    """Shards go around once more; nothing rides."""
    calls, _, totals = calls_of("powersgd", 2, 2, merging="single", dense_sum="ordered")
    assert {kind for kind, *_ in calls[1]} == {"all_to_all", "all_gather"}
    assert sum(size for *_, size in calls[1]) == totals[2] - totals[1]


# -- plans ------------------------------------------------------------------------------------------------------------


def digests(seen: list[Step]) -> list[str]:
    return [
        digest(
            [one.update(tensor) for tensor in SHAPES]
            + [one.residuals[tensor] for tensor in MATRICES]
            + [one.bases[tensor][1] for tensor in MATRICES]
        )
        for one in seen
    ]


@both
@pytest.mark.parametrize("size", [2, 3])
def test_in_rank_order_a_plan_changes_no_bit(name: str, size: int) -> None:
    found = [
        [digests(of_rank) for of_rank in steps_of(size, single, 5, compression=name, merging=plan, dense_sum="ordered")]
        for plan in PLANS
    ]
    assert all(of_plan == found[0] for of_plan in found)


@both
def test_the_order_of_readiness_changes_no_bit(name: str) -> None:
    def body(rank: int, backwards: bool) -> list[str]:
        exchange = opened({tensor: torch.zeros(shape) for tensor, shape in SHAPES.items()}, name)
        seen = []
        for step in range(4):
            gradients = single(rank, step)
            order = reversed(gradients) if backwards and step > 0 and rank == 1 else iter(gradients)
            seen.append(made(exchange, {tensor: gradients[tensor] for tensor in order}))
        return digests(seen)

    assert testing.run(2, lambda rank: body(rank, False)) == testing.run(2, lambda rank: body(rank, True))


# -- merge buffers that go whole --------------------------------------------------------------------------------------


@both
def test_a_merge_buffer_that_is_planned_dense_takes_what_is_left_along(name: str) -> None:
    """And keeps its bases for later: then steps go on with them."""
    names = tuple(SHAPES)
    plans = {dense: merging.Plan((2, 3), names=names, dense=(dense, False)) for dense in (False, True)}

    def body(rank: int) -> list[Step]:
        tensors = {tensor: torch.zeros(shape) for tensor, shape in SHAPES.items()}
        exchange = opened(tensors, name, rank=2, merging=plans[False], exchange="auto")
        seen = []
        for step in range(7):
            seen.append(made(exchange, single(rank, step)))
            exchange.agreed.use_plan(plans[step + 1 in (2, 3)])
        return seen

    seen = testing.run(2, body)
    for step in range(7):
        for tensor in SHAPES:
            before = mean([accumulated(of_rank, step, tensor) for of_rank in seen])
            after = mean([of_rank[step].residuals.get(tensor, torch.zeros_like(before)) for of_rank in seen])
            whole = step in (2, 3) and tensor in names[:2]
            assert distance(seen[0][step].update(tensor) + after, before) < 1e-6
            assert tensor == "bias" or bool(after.any()) != whole
    for tensor in names[:2]:
        assert digest([seen[0][1].bases[tensor][1]]) == digest([seen[0][3].bases[tensor][1]])


@both
def test_all_that_is_left_can_be_sent_whole_at_once(name: str) -> None:
    def body(rank: int) -> tuple[list[Step], Step, Step]:
        exchange = opened({tensor: torch.zeros(shape) for tensor, shape in SHAPES.items()}, name, rank=2)
        seen = [made(exchange, single(rank, step)) for step in range(3)]
        with exchange.sending_whole():
            rest = made(exchange, dict.fromkeys(SHAPES))
        return seen, rest, made(exchange, single(rank, 3))

    found = testing.run(2, body)
    for tensor in MATRICES:
        left = mean([seen[-1].residuals[tensor] for seen, *_ in found])
        assert distance(found[0][1].update(tensor), left) < 1e-6
        for seen, rest, later in found:
            assert not rest.residuals[tensor].any() and later.residuals[tensor].any()
            assert digest([rest.bases[tensor][1]]) == digest([seen[-1].bases[tensor][1]])
