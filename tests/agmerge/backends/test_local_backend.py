# SPDX-License-Identifier: Apache-2.0
"""The in-memory group: every collective against a reference, and what happens when ranks do not agree."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from agmerge import testing
from agmerge.errors import AGMergeError, CollectiveTimeout, PeerLost, RankMismatchError
from agmerge.runtime import workers

WORLDS = [1, 2, 3, 4, 5]
WAIT = 30.0  # seconds; only a failing test ever waits so long


def draw(rank: int, *shape: int) -> torch.Tensor:
    """What rank ``rank`` brings: the same at every call, and such that the order of addition shows."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator) * 10.0**rank


def rank_order_sum(size: int, *shape: int) -> torch.Tensor:
    total = draw(0, *shape)
    for rank in range(1, size):
        total = total + draw(rank, *shape)
    return total


@pytest.mark.parametrize("size", WORLDS)
def test_all_reduce_adds_in_rank_order(size: int) -> None:
    def body(rank: int) -> torch.Tensor:
        tensor = draw(rank, 7, 3)
        workers.world().all_reduce(tensor, "sum").wait(WAIT)
        return tensor

    for result in testing.run(size, body, inject=testing.jitter(size)):
        assert torch.equal(result, rank_order_sum(size, 7, 3))


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("length", [0, 1, 6])
def test_all_gather(size: int, length: int) -> None:
    def body(rank: int) -> torch.Tensor:
        out = torch.full((size * length,), torch.nan)
        workers.world().all_gather(out, draw(rank, length), "gather").wait(WAIT)
        return out

    expected = torch.cat([draw(rank, length) for rank in range(size)])
    for result in testing.run(size, body):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("size", WORLDS)
def test_all_to_all_with_uneven_splits(size: int) -> None:
    def cut(sender: int) -> list[int]:
        return [(2 * sender + receiver) % 4 for receiver in range(size)]

    def sent(sender: int) -> torch.Tensor:
        return draw(sender, sum(cut(sender)))

    def body(rank: int) -> torch.Tensor:
        expected = [cut(sender)[rank] for sender in range(size)]
        out = torch.full((sum(expected),), torch.nan)
        workers.world().all_to_all(out, sent(rank), expected, cut(rank), "exchange").wait(WAIT)
        return out

    for rank, result in enumerate(testing.run(size, body)):
        pieces = [torch.split(sent(sender), cut(sender))[rank] for sender in range(size)]
        assert torch.equal(result, torch.cat(pieces))


@pytest.mark.parametrize("size", WORLDS)
def test_reduce_scatter(size: int) -> None:
    def body(rank: int) -> torch.Tensor:
        out = torch.full((3,), torch.nan)
        workers.world().reduce_scatter(out, draw(rank, 3 * size), "scatter").wait(WAIT)
        return out

    assert torch.equal(torch.cat(testing.run(size, body)), rank_order_sum(size, 3 * size))


@pytest.mark.parametrize("size", WORLDS)
def test_broadcast_from_every_root(size: int) -> None:
    def body(rank: int) -> list[torch.Tensor]:
        tensors = [draw(rank, 2, 2) for _ in range(size)]
        for root, tensor in enumerate(tensors):
            workers.world().broadcast(tensor, root, f"from {root}").wait(WAIT)
        return tensors

    for result in testing.run(size, body):
        for root, tensor in enumerate(result):
            assert torch.equal(tensor, draw(root, 2, 2))


def test_nobody_passes_a_barrier_before_everybody_has_come() -> None:
    came: list[int] = []

    def body(rank: int) -> int:
        came.append(rank)
        workers.world().barrier("barrier").wait(WAIT)
        return len(came)

    assert testing.run(4, body, inject=testing.jitter(0)) == [4] * 4


def test_collectives_are_asynchronous_and_may_be_waited_for_in_any_order() -> None:
    started = threading.Event()

    def body(rank: int) -> tuple[list[bool], list[float]]:
        if rank == 1:
            assert started.wait(WAIT)
        tensors = [torch.tensor([float(10 * i + rank)]) for i in range(3)]
        handles = [workers.world().all_reduce(tensor, f"sum {i}") for i, tensor in enumerate(tensors)]
        done = [handle.done() for handle in handles]
        started.set()
        for handle in reversed(handles):
            handle.wait(WAIT)
        assert all(handle.done() for handle in handles)
        return done, [tensor.item() for tensor in tensors]

    (first, sums), (second, same) = testing.run(2, body)
    assert first == [False] * 3  # rank 1 had not come yet
    assert second == [True] * 3
    assert sums == same == [1.0, 21.0, 41.0]


@pytest.mark.parametrize("early", [0, 1])
def test_a_result_does_not_change_when_other_ranks_go_on(early: int) -> None:
    gone_on = threading.Event()

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine, out, total = draw(rank, 4), torch.empty(8), draw(rank, 4)
        gather = workers.world().all_gather(out, mine, "gather")
        reduce = workers.world().all_reduce(total, "reduce")
        if rank == early:
            gather.wait(WAIT)
            reduce.wait(WAIT)
            mine.zero_()
            seen = out.clone(), total.clone()
            out.zero_()
            total.zero_()
            gone_on.set()
            return seen
        assert gone_on.wait(WAIT)
        gather.wait(WAIT)
        reduce.wait(WAIT)
        return out, total

    for gathered, total in testing.run(2, body):
        assert torch.equal(gathered, torch.cat([draw(0, 4), draw(1, 4)]))
        assert torch.equal(total, rank_order_sum(2, 4))


def test_a_buffer_that_is_touched_too_early_shows() -> None:
    touched = threading.Event()

    def body(rank: int) -> float:
        tensor = torch.ones(1)
        if rank == 1:
            assert touched.wait(WAIT)
        handle = workers.world().all_reduce(tensor, "sum")
        if rank == 0:
            tensor.fill_(100.0)
            touched.set()
        handle.wait(WAIT)
        return tensor.item()

    assert testing.run(2, body) == [101.0, 101.0]


def test_waiting_twice_does_not_write_twice() -> None:
    def body(rank: int) -> float:
        tensor = torch.ones(1)
        handle = workers.world().all_reduce(tensor, "sum")
        handle.wait(WAIT)
        tensor.fill_(7.0)
        handle.wait(WAIT)
        return tensor.item()

    assert testing.run(2, body) == [7.0, 7.0]


def test_a_subgroup_counts_its_ranks_in_the_order_given() -> None:
    def body(rank: int) -> tuple[int, int, list[float]] | None:
        group = workers.world().subgroup([3, 1], "pair", WAIT)
        workers.world().barrier("all four").wait(WAIT)
        if group is None:
            return None
        out = torch.empty(2)
        group.all_gather(out, torch.tensor([float(rank)]), "gather").wait(WAIT)
        return group.rank, group.size, out.tolist()

    assert testing.run(4, body) == [None, (1, 2, [3.0, 1.0]), None, (0, 2, [3.0, 1.0])]


def test_disjoint_subgroups_and_their_duplicates_do_not_meet() -> None:
    def body(rank: int) -> float:
        world = workers.world()
        halves = [world.subgroup([0, 1], "low", WAIT), world.subgroup([2, 3], "high", WAIT)]
        mine = next(half for half in halves if half is not None).duplicate("copy", WAIT)
        tensor = torch.tensor([10.0**rank])
        mine.all_reduce(tensor, "sum").wait(WAIT)
        return tensor.item()

    assert testing.run(4, body) == [11.0, 11.0, 1100.0, 1100.0]


def test_duplicates_cannot_cross() -> None:
    def body(rank: int) -> tuple[float, float, float]:
        world = workers.world()
        channels = [world, world.duplicate("a", WAIT), world.duplicate("b", WAIT)]
        tensors = [torch.tensor([float(10**i)]) for i in range(3)]
        order = [0, 1, 2] if rank == 0 else [2, 0, 1]
        handles = [channels[i].all_reduce(tensors[i], "same name") for i in order]
        for handle in handles:
            handle.wait(WAIT)
        return tensors[0].item(), tensors[1].item(), tensors[2].item()

    assert testing.run(2, body) == [(2.0, 20.0, 200.0)] * 2


def reduce(tensor: torch.Tensor, name: str = "x") -> None:
    workers.world().all_reduce(tensor, name).wait(WAIT)


OTHER_CALLS: dict[str, Callable[[], None]] = {
    "kind": lambda: workers.world().broadcast(torch.ones(4), 0, "x").wait(WAIT),
    "barrier": lambda: workers.world().barrier("x").wait(WAIT),
    "name": lambda: reduce(torch.ones(4), "y"),
    "shape": lambda: reduce(torch.ones(2, 2)),
    "dtype": lambda: reduce(torch.ones(4, dtype=torch.float64)),
}


@pytest.mark.parametrize("difference", OTHER_CALLS)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_different_calls_are_the_same_error_on_every_rank(difference: str, odd: int) -> None:
    def body(rank: int) -> None:
        if rank == odd:
            OTHER_CALLS[difference]()
        else:
            reduce(torch.ones(4))

    errors = testing.run(3, body, return_errors=True)
    assert [type(error) for error in errors] == [RankMismatchError] * 3
    assert len({str(error) for error in errors}) == 1
    assert len({id(error) for error in errors}) == 3  # a traceback belongs to one thread
    for rank in range(3):
        said = f"rank {rank}: all_reduce 'x' torch.float32 [4]"
        assert (said in str(errors[0])) is (rank != odd)


def test_pieces_that_do_not_fit_are_the_same_error_on_every_rank() -> None:
    def body(rank: int) -> None:
        expected = [1, 1, 2] if rank == 1 else [1, 1, 1]
        out, tensor = torch.empty(sum(expected)), torch.ones(3)
        workers.world().all_to_all(out, tensor, expected, [1, 1, 1], "exchange").wait(WAIT)

    errors = testing.run(3, body, return_errors=True)
    assert [type(error) for error in errors] == [RankMismatchError] * 3
    (text,) = {str(error) for error in errors}
    assert "rank 1 expected pieces of [1, 1, 2]" in text and "got [1, 1, 1]" in text


@pytest.mark.parametrize("root", [-1, 2])
def test_a_root_that_does_not_exist_is_the_same_error_on_every_rank(root: int) -> None:
    def body(rank: int) -> None:
        workers.world().broadcast(torch.ones(1), root, "x").wait(WAIT)

    errors = testing.run(2, body, return_errors=True)
    assert [type(error) for error in errors] == [AGMergeError] * 2
    (text,) = {str(error) for error in errors}
    assert f"there is no rank {root}" in text


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
def test_a_rank_that_has_left_is_named_on_the_others(size: int, raises: bool) -> None:
    def body(rank: int) -> None:
        reduce(torch.ones(1), "first")
        if rank == 1:
            if raises:
                raise KeyError("out of data")
            return
        reduce(torch.ones(1), "second")

    errors = testing.run(size, body, return_errors=True)
    left = errors.pop(1)
    assert isinstance(left, KeyError) if raises else left is None
    for error in errors:
        assert type(error) is PeerLost
        why = "raised KeyError: 'out of data'" if raises else "has already returned"
        assert f"second: rank 1 {why}" in str(error)


def test_a_deadline_names_the_ranks_that_did_not_come() -> None:
    started, given_up = threading.Barrier(2), threading.Barrier(4)

    def body(rank: int) -> None:
        try:
            if rank in (0, 2):
                handle = workers.world().all_reduce(torch.ones(1), "gradients")
                started.wait(WAIT)
                handle.wait(0.05)
        finally:
            given_up.wait(WAIT)  # until then nobody has left

    errors = testing.run(4, body, return_errors=True)
    assert errors[1] is errors[3] is None
    for error in (errors[0], errors[2]):
        assert type(error) is CollectiveTimeout
        assert str(error) == "AGM201: gradients: no answer from ranks [1, 3] within 0.05 s"


def test_what_other_backends_would_refuse_is_refused() -> None:
    def body(rank: int) -> None:
        world, flat = workers.world(), torch.ones(4)
        with pytest.raises(ValueError, match="must be contiguous"):
            world.all_reduce(torch.ones(4, 4).t(), "x")
        with pytest.raises(ValueError, match="8 contiguous elements of torch.float32"):
            world.all_gather(torch.empty(7), flat, "x")
        with pytest.raises(ValueError, match="contiguous elements of torch.float32"):
            world.all_gather(torch.empty(8, dtype=torch.float64), flat, "x")
        with pytest.raises(ValueError, match="3, must be divisible by the number of ranks, 2"):
            world.reduce_scatter(torch.empty(1), torch.ones(3), "x")
        with pytest.raises(ValueError, match="into 2 pieces"):
            world.all_to_all(torch.empty(4), flat, [4], [4], "x")
        with pytest.raises(ValueError, match="into 2 pieces"):
            world.all_to_all(torch.empty(4), flat, [2, 2], [1, 2], "x")
        world.duplicate("copy", WAIT).close()
        world.barrier("closing a duplicate leaves the original open").wait(WAIT)
        copy = world.duplicate("copy", WAIT)
        copy.close()
        with pytest.raises(AGMergeError, match="closed"):
            copy.barrier("x")

    testing.run(2, body)
