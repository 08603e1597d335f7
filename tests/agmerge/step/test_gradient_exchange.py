# SPDX-License-Identifier: Apache-2.0
"""The seam between a round and whoever has tensors to combine: no optimizer, no hooks, no ``p.grad``.

What comes out is compared to the bit with :class:`BruteForce`, which has all ranks in numpy.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from support import agreed, digest, same_bits
from support.gradient_exchange import (
    SHAPES,
    SPARSE,
    BruteForce,
    config_of,
    connected,
    copied,
    drawn,
    mean_in_rank_order,
    stepped,
    table,
    updates_of,
)
from torch import Tensor

import agmerge
from agmerge import testing
from agmerge.runtime import workers
from agmerge.step.agreed_state import CarriedState
from agmerge.step.gradient_exchange import GradientExchange

ANYWHERE = {"default": {}, "merged": {"merging": "threshold"}, "ordered": {"dense_sum": "ordered"}}


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array, np.float32).tobytes()


def same_as(tensor: Tensor | None, array: np.ndarray) -> bool:
    return tensor is not None and tuple(tensor.shape) == array.shape and bits(tensor.numpy()) == bits(array)


# -- what comes out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [agmerge.Average, agmerge.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_without_compression_updates_are_the_sum_in_rank_order(size: int, op: Any) -> None:
    def body(rank: int) -> list[dict[str, Tensor | None]]:
        exchange = connected(table(), dense_sum="ordered", op=op)
        return [stepped(exchange, drawn(rank, step)) for step in range(3)]

    for updates in testing.run(size, body):
        for step, update in enumerate(updates):
            for name in SHAPES:
                tensors = [drawn(rank, step)[name] for rank in range(size)]
                assert same_as(update[name], mean_in_rank_order(tensors, summed=op is agmerge.Sum))


@pytest.mark.parametrize("size", [2, 3])
def test_topk_sends_and_keeps_what_brute_force_does(size: int) -> None:
    """Conservation to the bit, per rank: what is kept and what was sent are what there was."""

    def body(rank: int) -> list[tuple[dict[str, Tensor | None], dict[str, Tensor]]]:
        exchange = connected(table(), **SPARSE)
        return [
            (stepped(exchange, drawn(rank, step)), copied(exchange.agreed.current.residuals())) for step in range(6)
        ]

    seen, oracle = testing.run(size, body), BruteForce(size, 0.05)
    for step in range(6):
        updates = oracle.step([drawn(rank, step) for rank in range(size)])
        for rank in range(size):
            update, residuals = seen[rank][step]
            for name in SHAPES:
                assert same_as(update[name], updates[name]), (step, rank, name)
                assert same_as(residuals[name], oracle.residuals[rank][name]), (step, rank, name)


@pytest.mark.parametrize("options", ANYWHERE.values(), ids=ANYWHERE)
@pytest.mark.parametrize("compression", ["adtopk", "dgc", "fp16", "redsync", "threshold"])
def test_nothing_is_lost_on_any_rank(compression: str, options: dict[str, Any]) -> None:
    """Tensors are whole numbers and the mean over two ranks is exact, so all sums are, whatever was selected."""
    whole_numbers = {"compression": compression, "memory": "residual", "dense": [], **options}

    def body(rank: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor | None]]]:
        exchange, seen, before = connected(table(), **whole_numbers), [], {}
        for step in range(4):
            tensors = {name: (8 * tensor).round() for name, tensor in drawn(rank, step).items()}
            there = {name: before.get(name, 0) + tensor for name, tensor in tensors.items()}
            updates = stepped(exchange, tensors)
            before = copied(exchange.agreed.current.residuals())
            seen.append((there, before, updates))
        return seen

    for both in zip(*testing.run(2, body), strict=True):
        for name in SHAPES:
            sent = [there[name] - residuals[name] for there, residuals, _ in both]  # of each rank
            for _, _, updates in both:
                assert torch.equal(2 * updates[name], sent[0] + sent[1])


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["none", "topk"])
def test_ranks_hand_over_in_orders_of_their_own(options: dict[str, Any]) -> None:
    def body(rank: int, shuffles: bool) -> list[str]:
        exchange, digests = connected(table(), dense_sum="ordered", **options), []
        for step in range(5):
            tensors = list(drawn(rank, step).items())
            if shuffles:
                random.Random(10 * step + rank).shuffle(tensors)
            updates = stepped(exchange, dict(tensors))
            digests.append(digest(updates[name] for name in SHAPES))
        return digests

    in_order = agreed(testing.run(3, lambda rank: body(rank, False)))
    assert agreed(testing.run(3, lambda rank: body(rank, True))) == in_order


def test_tensors_that_a_rank_has_not_count_as_zeros_and_their_residuals_go_on() -> None:
    """Rank 0 has "b" in even steps, rank 1 never; "c" is of nobody after the first step, "small" of nobody at all."""

    def tensors(rank: int, step: int) -> dict[str, Tensor]:
        there = {"a", "b"} if rank == step % 2 == 0 else {"a"}
        return {name: tensor for name, tensor in drawn(rank, step).items() if name in there or (name, step) == ("c", 0)}

    def body(rank: int) -> list[dict[str, Tensor | None]]:
        exchange, seen = connected(table(), **SPARSE), []
        for step in range(4):
            missing = {"b": None} if rank else {}  # handed over as missing, or not at all
            seen.append(stepped(exchange, {**tensors(rank, step), **missing}))
        return seen

    seen = testing.run(2, body)
    oracle = BruteForce(2, 0.05)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(4):
        expected = oracle.step([{**zeros, **tensors(rank, step)} for rank in range(2)])
        for updates in (seen[0][step], seen[1][step]):
            assert updates["small"] is None
            assert all(same_as(updates[name], expected[name]) for name in "abc"), step


def test_where_nobody_has_anything_there_is_no_update() -> None:
    def body(rank: int) -> tuple[list[Tensor | None], list[bool], list[Tensor | None]]:
        exchange = connected(table())
        combined = exchange.finish(lambda name: None)
        nothing, used = list(combined.updates.values()), list(combined.used)
        exchange.commit()
        return nothing, used, list(stepped(exchange, {name: None for name in SHAPES}).values())

    assert agreed(testing.run(2, body)) == ([None] * 4, [False] * 4, [None] * 4)


def test_unused_tensors_are_zero_where_the_config_has_it_so() -> None:
    def body(rank: int) -> bool:
        updates = stepped(connected(table(), unused="zero"), {})
        return all(update is not None and not update.any() for update in updates.values())

    assert agreed(testing.run(2, body))


def test_tensors_that_were_not_handed_over_are_asked_for_once_each() -> None:
    def body(rank: int) -> tuple[list[str], str]:
        exchange, asked = connected(table(), **SPARSE), []
        for step in range(2):
            tensors = drawn(rank, step)
            exchange.ready("b", tensors.pop("b"))

            def late(name: str, tensors: dict[str, Tensor] = tensors) -> Tensor:
                asked.append(name)
                return tensors[name]

            update = digest(exchange.finish(late).updates.values())
            exchange.commit()
        return sorted(asked), update

    asked, _ = agreed(testing.run(2, body))
    assert asked == sorted(2 * ["a", "c", "small"])


# -- what is kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["topk", "adtopk", "fp16"])
def test_a_step_that_is_discarded_leaves_nothing(compression: str) -> None:
    def body(rank: int) -> None:
        exchange = connected(table(), compression=compression, density=0.05, dense=[])
        twin = connected(table(), compression=compression, density=0.05, dense=[])
        for step in range(3):
            stepped(exchange, drawn(rank, step))
            stepped(twin, drawn(rank, step))
        before, steps = copied(exchange.agreed.current.residuals()), exchange.agreed.steps
        for name, tensor in drawn(rank, 77).items():
            exchange.ready(name, tensor)
        exchange.finish()
        exchange.discard()
        after = exchange.agreed.current.residuals()
        assert (
            exchange.agreed.steps == steps and before.keys() == after.keys() and any(t.any() for t in before.values())
        )
        assert all(same_bits(before[name], after[name]) for name in before)
        updates, expected = (stepped(either, drawn(rank, 3)) for either in (exchange, twin))
        assert digest(updates.values()) == digest(expected.values())

    testing.run(2, body)


# -- what is not finite ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("options", [{}, SPARSE], ids=["none", "topk"])
def test_what_is_not_finite_raises_on_all_ranks_and_the_next_step_works(options: dict[str, Any], bad: float) -> None:
    def body(rank: int) -> tuple[str, str, str]:
        exchange, twin = connected(table(), **options), connected(table(), **options)
        for step in range(2):
            stepped(exchange, drawn(rank, step))
            stepped(twin, drawn(rank, step))
        before = digest(exchange.agreed.current.residuals().values())
        tensors = drawn(rank, 2)
        if rank == 1:
            tensors["c"][3, 4] = bad
        with pytest.raises(agmerge.NonFiniteError) as raised:
            stepped(exchange, tensors)
        exchange.discard()
        assert not exchange.fault and digest(exchange.agreed.current.residuals().values()) == before
        updates, expected = (stepped(either, drawn(rank, 3)) for either in (exchange, twin))
        return str(raised.value), digest(updates.values()), digest(expected.values())

    text, updates, expected = agreed(testing.run(3, body))
    assert "rank 1: 'c'" in text and updates == expected


def test_a_step_that_is_skipped_comes_to_infinities_everywhere() -> None:
    def body(rank: int) -> tuple[bool, bool]:
        exchange = connected(table(), nonfinite="skip", **SPARSE)
        tensors = drawn(rank, 0)
        tensors["a"][0, 0] = torch.inf if rank == 0 else 0.0
        for name, tensor in tensors.items():
            exchange.ready(name, tensor)
        combined = exchange.finish()
        return combined.skipped, all(bool(update.isinf().all()) for update in updates_of(combined).values())

    assert agreed(testing.run(2, body)) == (True, True)


# -- an exchange that has ended -----------------------------------------------------------------------------------


def test_after_an_error_on_the_way_nothing_is_exchanged_any_more() -> None:
    def body(rank: int) -> str:
        exchange = connected(table())
        with pytest.raises(RuntimeError, match="no such tensor"):
            exchange.finish(lambda name: (_ for _ in ()).throw(RuntimeError("no such tensor")))
        assert exchange.fault
        for call in (exchange.finish, lambda: exchange.ready("a", None)):
            with pytest.raises(agmerge.AGMergeError, match="AGM124: .*no such tensor"):
                call()
        exchange.leave()
        assert not exchange.fault
        return "gone on"

    assert agreed(testing.run(2, body)) == "gone on"


def test_an_exchange_that_was_closed_says_so() -> None:
    def body(rank: int) -> None:
        exchange = connected(table())
        stepped(exchange, drawn(rank, 0))
        exchange.close()
        with pytest.raises(agmerge.AGMergeError, match="AGM123"):
            exchange.finish()

    testing.run(2, body)


@pytest.mark.parametrize("shard", [None, (0, 2)], ids=["whole tensors", "of another place"])
def test_what_was_loaded_before_a_group_is_known_is_kept_where_it_is_of_the_same_shard(
    shard: tuple[int, int] | None,
) -> None:
    def body(rank: int) -> tuple[bool, list[tuple[str, str]]]:
        exchange = GradientExchange(table(), config_of(**SPARSE))
        loaded = CarriedState(tensors={("residual", "small"): torch.ones(7)}, origin=(rank, 2))
        exchange.restore(loaded, 3, shard)
        keeps = exchange.connect(workers.world(), workers.world())
        return keeps, list(exchange.agreed.carried.tensors)

    for keeps, kept in testing.run(2, body):
        assert keeps is (shard is None) and kept == ([("residual", "small")] if shard is None else [])
