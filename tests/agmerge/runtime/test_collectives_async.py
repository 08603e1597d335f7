# SPDX-License-Identifier: Apache-2.0
"""Handles: several calls under way, results in any order, and what a mistake with them says."""

from __future__ import annotations

import gc

import pytest
import torch

import agmerge
from agmerge import testing
from agmerge.errors import PeerLost, RankMismatchError


def test_many_are_under_way_and_end_in_any_order() -> None:
    def body(rank: int) -> None:
        tensors = [torch.full((i + 1,), float(rank)) for i in range(6)]
        handles = [agmerge.allreduce_async(tensor, op=agmerge.Sum) for tensor in tensors]
        handles.append(agmerge.broadcast_async(torch.tensor([rank]), 1))
        handles.append(agmerge.allgather_async(torch.full((rank,), rank)))
        tensors[0].fill_(99.0)  # an all-reduce that is not in place works on a copy
        order = range(8) if rank else reversed(range(8))
        found = {i: agmerge.synchronize(handles[i]) for i in order}
        assert [found[i].tolist() for i in range(6)] == [[3.0] * (i + 1) for i in range(6)]
        assert found[6].tolist() == [1] and found[7].tolist() == [1, 2, 2]
        assert all(agmerge.poll(handle) for handle in handles)
        assert agmerge.synchronize(handles[6]) is found[6]  # asking again is allowed

    testing.run(3, body, inject=testing.jitter(1))


def test_in_place_is_in_place() -> None:
    def body(rank: int) -> None:
        plain, strided = torch.full((3,), float(rank)), torch.full((2, 3), rank, dtype=torch.int8).t()
        half = torch.full((2,), float(rank), dtype=torch.bfloat16)
        assert agmerge.synchronize(agmerge.allreduce_async_(plain, op=agmerge.Sum)) is plain
        assert agmerge.allreduce_(strided, op=agmerge.Sum) is strided
        assert agmerge.grouped_allreduce_([half], op=agmerge.Max)[0] is half
        assert plain.tolist() == [1.0] * 3 and strided.tolist() == [[1, 1]] * 3 and half.tolist() == [1.0, 1.0]
        root = torch.full((2, 2), float(rank)).t()
        assert agmerge.synchronize(agmerge.broadcast_async_(root, 1)) is root and root.sum() == 4.0
        with pytest.raises(RankMismatchError):
            agmerge.allreduce_(plain[: rank + 1])
        assert plain.tolist() == [1.0] * 3  # nothing is written before all agree

    testing.run(2, body)


def test_a_handle_is_done_when_every_rank_has_come() -> None:
    def body(rank: int) -> None:
        handle = agmerge.allreduce_async(torch.ones(2), name="loss")
        assert repr(handle).startswith("<loss, ")
        agmerge.barrier()
        assert agmerge.poll(handle) and repr(handle) == "<loss, done>"

    testing.run(2, body)


def test_a_name_that_is_under_way_is_refused() -> None:
    def body(rank: int) -> None:
        agmerge.barrier()
        handle = agmerge.allreduce_async(torch.ones(2), name="loss")
        while rank == 0 and not agmerge.poll(handle):
            pass
        if rank == 1:
            handle._handles[0].done = lambda: False  # type: ignore[method-assign]
            with pytest.raises(ValueError, match="loss: a collective of this name is already running"):
                agmerge.allreduce(torch.ones(2), name="loss")
        assert agmerge.synchronize(handle).tolist() == [1.0, 1.0]
        assert agmerge.allreduce(torch.ones(2), name="loss").tolist() == [1.0, 1.0]

    testing.run(2, body)


def test_handles_that_are_dropped_do_no_harm() -> None:
    def body(rank: int) -> float:
        for _ in range(20):
            agmerge.allreduce_async(torch.ones(4))
            agmerge.allgather_async(torch.ones(rank + 1))
        gc.collect()
        return float(agmerge.allreduce(torch.tensor([float(rank)])))

    assert testing.run(2, body) == [0.5, 0.5]


def test_ranks_that_start_different_calls_are_told_at_the_start() -> None:
    def body(rank: int) -> None:
        started = agmerge.allreduce_async(torch.ones(2))
        if rank:
            agmerge.allgather_async(torch.ones(2))
        else:
            agmerge.broadcast_async(torch.ones(2), 0)
        agmerge.synchronize(started)

    errors = testing.run(2, body, return_errors=True)
    assert [type(error) for error in errors] == [RankMismatchError] * 2
    assert "call: broadcast on rank 0; allgather on rank 1" in str(errors[0])


def test_a_rank_that_leaves_is_an_error_of_synchronize() -> None:
    def body(rank: int) -> None:
        handle = agmerge.allreduce_async(torch.ones(2), name="loss")
        agmerge.synchronize(handle)
        if rank == 0:
            agmerge.synchronize(agmerge.allreduce_async(torch.ones(2), name="again"))

    error, _ = testing.run(2, body, return_errors=True)
    assert isinstance(error, PeerLost) and "again" in str(error)


@pytest.mark.parametrize("call", [agmerge.poll, agmerge.synchronize])
@pytest.mark.parametrize("wrong", [None, 3, torch.ones(1)])
def test_what_is_no_handle(call: object, wrong: object) -> None:
    with pytest.raises(TypeError, match=": expected the result of an"):
        call(wrong)  # type: ignore[operator]
