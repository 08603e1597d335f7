# SPDX-License-Identifier: Apache-2.0
"""What Horovod scripts call beside the optimizer: every kind of collective, its values, and what a wrong use says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import agmerge
from agmerge import testing
from agmerge.errors import AGMergeError, RankMismatchError

OPS = {"min": agmerge.Min, "max": agmerge.Max, "product": agmerge.Product}
KINDS = [torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_minimum_maximum_and_product(op: str, dtype: torch.dtype) -> None:
    rows = torch.tensor([[1, 7, 3], [4, 2, 3], [2, 5, 2]]).to(dtype)
    expected = {"min": rows.amin(0), "max": rows.amax(0), "product": torch.tensor([8, 70, 18]).to(dtype)}[op]
    for found in testing.run(3, lambda rank: agmerge.allreduce(rows[rank], op=OPS[op])):
        assert found.dtype == dtype and torch.equal(found, expected)


def test_horovods_arguments_by_position_and_by_keyword() -> None:
    def body(rank: int) -> None:
        tensor = torch.tensor([1.0, 2.0]) * (rank + 1)
        assert agmerge.allreduce(tensor, False).tolist() == [3.0, 6.0]
        assert agmerge.allreduce(tensor, True, "loss").tolist() == [1.5, 3.0]
        assert agmerge.allreduce(tensor, average=False, name="loss").tolist() == [3.0, 6.0]
        assert agmerge.allreduce_(tensor.clone(), None, "loss", agmerge.Sum).tolist() == [3.0, 6.0]
        assert agmerge.allreduce(tensor, None, "loss", agmerge.Compression.fp16, agmerge.Max).tolist() == [2.0, 4.0]
        assert agmerge.barrier(None) is None

    testing.run(2, body)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.float32], ids=str)
def test_factors_before_and_after(dtype: torch.dtype) -> None:
    """Integers are scaled in double precision and cut, before the sum and after it: as in Horovod."""

    def body(rank: int) -> tuple[Tensor, Tensor]:
        tensor = torch.tensor([-7, 5, 9]).to(dtype)
        before = agmerge.allreduce(tensor, op=agmerge.Sum, prescale_factor=0.3)
        return before, agmerge.allreduce(tensor, op=agmerge.Average, postscale_factor=0.3)

    exact = torch.tensor([-7, 5, 9]).double()
    factor = exact.new_tensor(0.3).to(torch.float64 if dtype == torch.int32 else torch.float32).double()
    for before, after in testing.run(2, body):
        assert torch.equal(before, (exact * factor).to(dtype) * 2)
        assert torch.allclose(after.double(), (exact * factor).to(dtype).double(), rtol=2e-3)


@pytest.mark.parametrize("rows", [0, 2, 4, 7])
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_reducescatter(rows: int, dtype: torch.dtype) -> None:
    def body(rank: int) -> tuple[Tensor, Tensor]:
        tensor = (torch.arange(rows * 2).reshape(rows, 2) * (rank + 1)).to(dtype)
        return agmerge.reducescatter(tensor, op=agmerge.Sum), agmerge.reducescatter(tensor)

    found = testing.run(3, body)
    whole = torch.arange(rows * 2).reshape(rows, 2)
    assert [len(total) for total, _ in found] == [rows // 3 + (rank < rows % 3) for rank in range(3)]
    assert torch.equal(torch.cat([total for total, _ in found]), (whole * 6).to(dtype))
    assert torch.allclose(torch.cat([mean for _, mean in found]), (whole * 2).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32], ids=str)
def test_alltoall(dtype: torch.dtype) -> None:
    def body(rank: int) -> None:
        tensor = torch.arange(6).reshape(6, 1).repeat(1, 2).to(dtype)
        equal = agmerge.alltoall(tensor)
        assert isinstance(equal, Tensor) and torch.equal(equal, tensor[2 * rank : 2 * rank + 2].repeat(3, 1))
        splits = torch.tensor([[6, 0, 0], [0, 0, 6], [1, 2, 3]][rank])
        rows, received = agmerge.alltoall(tensor, splits)
        assert received.dtype == splits.dtype and received.tolist() == [[6, 0, 1], [0, 0, 2], [0, 6, 3]][rank]
        assert len(rows) == int(received.sum()) and rows.shape[1:] == (2,)
        again, counts = agmerge.synchronize(agmerge.alltoall_async(tensor, splits.tolist()))
        assert torch.equal(again, rows) and torch.equal(counts.long(), received)

    testing.run(3, body)


def test_groups_of_tensors() -> None:
    def body(rank: int) -> None:
        tensors = [torch.full((2,), float(rank)), torch.full((3, 1), rank, dtype=torch.int64)]
        first, second = agmerge.grouped_allreduce(tensors, op=agmerge.Sum)
        assert first.tolist() == [1.0, 1.0] and second.tolist() == [[1]] * 3
        both = agmerge.grouped_allgather(tensors, name="both")
        assert both[0].tolist() == [0.0, 0.0, 1.0, 1.0] and both[1].shape == (6, 1)
        handle = agmerge.grouped_reducescatter_async(tensors, op=agmerge.Sum)
        assert [len(one) for one in agmerge.synchronize(handle)] == [1, 2 - rank]
        handle = agmerge.grouped_allreduce_async_(tensors)
        assert agmerge.synchronize(handle)[0] is tensors[0] and tensors[0].tolist() == [0.5, 0.5]

    testing.run(2, body)


def test_objects() -> None:
    def body(rank: int) -> list[Any]:
        return agmerge.allgather_object({"rank": rank, "more": "x" * rank})

    assert testing.run(3, body) == [[{"rank": rank, "more": "x" * rank} for rank in range(3)]] * 3

    def fails(rank: int) -> None:
        agmerge.allgather_object(lambda: None if rank else 1, name="hook")

    errors = testing.run(2, fails, return_errors=True)
    assert {str(error) for error in errors} == {"AGM304: hook: the object of rank 0 cannot be pickled"}


def test_sparse_tensors_have_a_call_of_their_own() -> None:
    def body(rank: int) -> Tensor:
        dense = torch.zeros(4, 2)
        dense[rank : rank + 2] = rank + 1.0
        return agmerge.sparse_allreduce_async(dense.to_sparse(1), "rows")().to_dense()

    for found in testing.run(2, body):
        assert found.tolist() == [[0.5] * 2, [1.5] * 2, [1.0] * 2, [0.0] * 2]


@pytest.mark.parametrize("name, dtype", [("none", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_casts_in_horovods_form(name: str, dtype: torch.dtype) -> None:
    compression, tensor = agmerge.Compression[name], torch.tensor([1.0, -2.5])
    packed, context = compression.compress(tensor)
    assert packed.dtype == dtype
    back = compression.decompress(packed, context)
    assert back.dtype == torch.float32 and torch.equal(back, tensor)
    for other in (torch.int32, torch.uint8, torch.complex64):
        packed, context = compression.compress(tensor.to(other))
        assert packed.dtype == compression.decompress(packed, context).dtype == other


def test_a_cast_of_what_travels() -> None:
    def body(rank: int) -> list[str]:
        tensor = torch.full((3,), 0.1, requires_grad=True)
        total = agmerge.allreduce(tensor, op=agmerge.Sum, compression=agmerge.Compression.bf16)
        assert total.dtype == torch.float32 and torch.equal(total, torch.full((3,), 0.1).bfloat16().float() * 2)
        total.sum().backward()
        return [size for kind, _, size in testing.calls() if kind == "all_reduce"]

    assert testing.run(2, body) == [[6, 6]] * 2


# -- some of the ranks --------------------------------------------------------------------------------------------


def test_collectives_of_some_ranks() -> None:
    def body(rank: int) -> list[Any]:
        even, odd = agmerge.add_process_set([2, 0]), agmerge.add_process_set(agmerge.ProcessSet([1, 3]))
        mine = odd if rank % 2 else even
        assert (mine.size(), mine.rank(), mine.included()) == (2, rank // 2, True) and even.ranks == [0, 2]
        tensor = torch.tensor([float(rank)], requires_grad=True)
        total = agmerge.allreduce(tensor, op=agmerge.Sum, process_set=mine)
        total.backward()
        assert tensor.grad is not None and tensor.grad.item() == 2.0
        found = [
            total.item(),
            agmerge.allgather(tensor.detach(), process_set=mine.ranks).tolist(),
            agmerge.broadcast(tensor.detach(), mine.ranks[1], process_set=mine).item(),
            agmerge.broadcast_object(rank, mine.ranks[0], process_set=mine),
            agmerge.alltoall(torch.tensor([rank, 10 * rank]), process_set=mine).tolist(),
            agmerge.reducescatter(torch.tensor([1.0, 2.0]), op=agmerge.Sum, process_set=mine).tolist(),
            agmerge.allgather_object(rank, process_set=mine),
        ]
        agmerge.barrier(mine)
        assert agmerge.allreduce(torch.ones(1), op=agmerge.Sum, process_set=agmerge.global_process_set).item() == 4.0
        assert agmerge.allreduce(torch.ones(1), op=agmerge.Sum, process_set=range(4)).item() == 4.0
        assert agmerge.remove_process_set(even) and agmerge.remove_process_set(odd)
        assert not agmerge.remove_process_set(odd) and not agmerge.remove_process_set(agmerge.global_process_set)
        with pytest.raises(ValueError, match=r"process_set=\[.*\] is unknown. Call add_process_set"):
            agmerge.allreduce(tensor, process_set=mine)
        agmerge.add_process_set(even)  # and again
        return found

    found = testing.run(4, body)
    assert found[0] == [2.0, [0.0, 2.0], 2.0, 0, [0, 2], [2.0], [0, 2]]
    assert found[3] == [4.0, [1.0, 3.0], 3.0, 1, [10, 30], [4.0], [1, 3]]


def test_mistakes_with_process_sets() -> None:
    def body(rank: int) -> None:
        mine = agmerge.add_process_set([1])
        if rank == 0:
            with pytest.raises(ValueError, match=r"loss: process_set=\[1\] does not contain this rank, 0"):
                agmerge.allreduce(torch.ones(1), name="loss", process_set=mine)
        else:
            with pytest.raises(ValueError, match=r"root_rank=0: the process set has ranks \[1\]"):
                agmerge.broadcast(torch.ones(1), 0, process_set=mine)
        with pytest.raises(ValueError, match=": a process set of these ranks already exists"):
            agmerge.add_process_set([1])
        with pytest.raises(ValueError, match=r"ProcessSet\(\[0, 2\]\): ranks must be in 0 to 1"):
            agmerge.add_process_set([0, 2])
        with pytest.raises(TypeError, match=": expected a process set, a list of ranks, or"):
            agmerge.allreduce(torch.ones(1), process_set=1)
        with pytest.raises(RankMismatchError, match=r"ranks: \[0\] on rank 0; \[0, 1\] on rank 1"):
            agmerge.add_process_set([0, 1][: rank + 1])

    testing.run(2, body)


# -- join ---------------------------------------------------------------------------------------------------------


def test_join_stands_in_with_zeros_and_says_who_was_last() -> None:
    def body(rank: int) -> tuple[list[float], int]:
        seen = []
        for step in range(rank + 1):
            seen.append(float(agmerge.allreduce(torch.tensor([6.0 + step]), name="loss")))
            handle = agmerge.grouped_allreduce_async([torch.ones(2), torch.ones(1, dtype=torch.int8)], op=agmerge.Sum)
            seen += [float(one[0]) for one in agmerge.synchronize(handle)]
        return seen, agmerge.join()

    found = testing.run(3, body)
    assert [last for _, last in found] == [2, 2, 2]
    assert found[2][0] == pytest.approx([6.0, 3.0, 3.0, 14 / 3, 2.0, 2.0, 8 / 3, 1.0, 1.0])
    assert found[0][0] == found[2][0][:3] and found[1][0] == found[2][0][:6]


@pytest.mark.parametrize(
    "call", [lambda: agmerge.allgather(torch.ones(2)), lambda: agmerge.allreduce(torch.ones(1), op=agmerge.Max)]
)
def test_what_cannot_go_on_without_a_rank_that_has_joined(call: Callable[[], object]) -> None:
    def body(rank: int) -> int:
        if rank:
            with pytest.raises(AGMergeError, match=r"AGM121.*rank 0 "):
                call()
        return agmerge.join()

    assert testing.run(2, body) == [1, 1]


# -- wrong uses ---------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no gradient": (lambda: agmerge.allreduce(None), TypeError, "allreduce: the tensor is None .* with zeros if"),
    "a number": (lambda: agmerge.allreduce(1.0), TypeError, "expected a tensor, got float. Use torch.tensor"),
    "a string": (lambda: agmerge.broadcast("x", 0), TypeError, "expected a tensor, got str.* broadcast_object"),
    "a list": (lambda: agmerge.allreduce([torch.ones(1)]), TypeError, "got list. Use grouped_"),
    "no list": (lambda: agmerge.grouped_allreduce(torch.ones(2)), TypeError, "expected a list of tensors, got Tensor"),
    "an empty list": (lambda: agmerge.grouped_allgather([]), ValueError, "the list of tensors is empty"),
    "None in a list": (lambda: agmerge.grouped_allreduce([None]), TypeError, "the tensor is None"),
    "sparse": (
        lambda: agmerge.allreduce(torch.eye(2).to_sparse()),
        ValueError,
        r"layout torch.sparse_coo.* Pass tensor.to_dense\(\), or use sparse_allreduce_async",
    ),
    "dense": (
        lambda: agmerge.sparse_allreduce_async(torch.eye(2), "x"),
        TypeError,
        ": expected a tensor of layout torch",
    ),
    "op and average": (
        lambda: agmerge.allreduce(torch.ones(1), average=False, op=agmerge.Sum),
        ValueError,
        "The op parameter supersedes average",
    ),
    "a name by position": (lambda: agmerge.allreduce(torch.ones(1), "loss"), TypeError, "name= by keyword"),
    "no op": (lambda: agmerge.allreduce(torch.ones(1), op=7), ValueError, "op must be agmerge.Average, Sum, Min"),
    "adasum": (lambda: agmerge.allreduce(torch.ones(1), op=agmerge.Adasum), AGMergeError, "AGM303"),
    "scattered maximum": (
        lambda: agmerge.reducescatter(torch.ones(2), op=agmerge.Max),
        ValueError,
        "op must be agmerge.Average or agmerge.Sum, got max",
    ),
    "maximum of complex": (
        lambda: agmerge.allreduce(torch.ones(1, dtype=torch.complex64), op=agmerge.Max),
        ValueError,
        "max of torch.complex64 is not supported",
    ),
    "sum of float8": (
        lambda: agmerge.allreduce(torch.ones(1).to(torch.float8_e4m3fn)),
        ValueError,
        "average of torch.float8_e4m3fn is not supported. Convert",
    ),
    "factor": (
        lambda: agmerge.allreduce(torch.ones(1), prescale_factor="2x"),
        TypeError,
        "prescale_factor must be a number, got '2x'",
    ),
    "compression": (
        lambda: agmerge.allreduce(torch.ones(1), compression="fp16"),
        TypeError,
        "compression must be agmerge.Compression.none",
    ),
    "no rows": (lambda: agmerge.reducescatter(torch.tensor(1.0)), ValueError, "no dimensions has no rows"),
    "rows that do not divide": (
        lambda: agmerge.alltoall(torch.ones(3)),
        ValueError,
        "3, must be divisible by the number of ranks, 2",
    ),
    "splits": (
        lambda: agmerge.alltoall(torch.ones(3), [1, 1]),
        ValueError,
        "splits .* must be 2 numbers whose sum is 3",
    ),
    "splits of floats": (
        lambda: agmerge.alltoall(torch.ones(2), torch.ones(2)),
        ValueError,
        "splits must be integers in one dimension",
    ),
    "splits below 0": (lambda: agmerge.alltoall(torch.ones(2), [3, -1]), ValueError, "splits must be integers >= 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_use_says_what_to_do_and_sends_nothing(wrong: str) -> None:
    call, kind, text = WRONG[wrong]

    def body(rank: int) -> list[tuple[str, str, int]]:
        with pytest.raises(kind, match=text):
            call()
        return testing.calls()

    assert testing.run(2, body) == [[], []]
