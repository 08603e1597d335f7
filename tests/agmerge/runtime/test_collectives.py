# SPDX-License-Identifier: Apache-2.0
"""The module's own collectives: values, and errors that are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import agmerge
from agmerge import testing
from agmerge.errors import AGMergeError, PeerLost, RankMismatchError

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sum_and_average(dtype: torch.dtype, size: int) -> None:
    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tensor = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype) * (rank + 1)
        before = tensor.clone()
        total, mean = agmerge.allreduce(tensor, op=agmerge.Sum), agmerge.allreduce(tensor, name="mean")
        assert torch.equal(tensor, before)
        return tensor, total, mean

    factor = size * (size + 1) // 2
    exact = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.float64) * factor
    for _, total, mean in testing.run(size, body):
        assert total.dtype == mean.dtype == dtype
        assert torch.equal(total.double(), exact)
        if dtype in INTEGERS:
            assert torch.equal(mean.double(), (exact / size).trunc())
        else:
            assert torch.allclose(mean.double(), exact / size, rtol=2 * torch.finfo(dtype).eps)


def test_an_average_of_negative_integers_is_cut_towards_zero() -> None:
    def body(rank: int) -> list[int]:
        return agmerge.allreduce(torch.tensor([-1, -3, 3, -(2**62)]) + rank).tolist()

    # Sums are -1, -5, 7 and 1 - 2**63; a detour through floating point would lose the last one.
    assert testing.run(2, body) == [[0, -2, 3, -(2**62) + 1]] * 2


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_allreduce_of_any_shape_and_strides(shape: tuple[int, ...]) -> None:
    def body(rank: int) -> torch.Tensor:
        strided = torch.arange(6.0).reshape(2, 3).t()
        assert torch.equal(agmerge.allreduce(strided), strided)
        leaf = torch.full(shape, float(rank), requires_grad=True)
        result = agmerge.allreduce(leaf, op=agmerge.Sum)
        assert result.requires_grad and (result.data_ptr() != leaf.data_ptr() or result.numel() == 0)
        return result.detach()

    for result in testing.run(3, body):
        assert torch.equal(result, torch.full(shape, 3.0))


def test_a_sum_of_bool_is_refused() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="sum of a bool tensor is not supported"):
            agmerge.allreduce(torch.tensor([True]))

    testing.run(2, body)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("trailing", [(), (2,), (2, 0), (0, 3)])
@pytest.mark.parametrize("counts", [(1, 1), (0, 3), (0, 0), (2, 0, 1)])
def test_allgather(dtype: torch.dtype, trailing: tuple[int, ...], counts: tuple[int, ...]) -> None:
    def mine(rank: int) -> torch.Tensor:
        return torch.full((counts[rank], *trailing), rank, dtype=dtype)

    expected = torch.cat([mine(rank) for rank in range(len(counts))])
    for result in testing.run(len(counts), lambda rank: agmerge.allgather(mine(rank))):
        assert result.dtype == dtype and result.shape == expected.shape
        assert torch.equal(result, expected)


def test_allgather_of_a_transposed_tensor() -> None:
    def body(rank: int) -> torch.Tensor:
        return agmerge.allgather(torch.arange(6.0).reshape(2, 3).t() + 10 * rank)

    whole = torch.arange(6.0).reshape(2, 3).t()
    for result in testing.run(2, body):
        assert torch.equal(result, torch.cat([whole, whole + 10]))


def test_allgather_of_no_dimensions_is_refused() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=r"loss: a tensor of no dimensions .* tensor.reshape\(1\)"):
            agmerge.allgather(torch.tensor(1.0), name="loss")
        assert agmerge.allgather(torch.tensor(1.0).reshape(1)).tolist() == [1.0, 1.0]

    testing.run(2, body)


@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast(root: int) -> None:
    def body(rank: int) -> torch.Tensor:
        mine = torch.arange(6.0).reshape(2, 3).t() + 10 * rank
        result = agmerge.broadcast(mine, root)
        assert torch.equal(mine, torch.arange(6.0).reshape(2, 3).t() + 10 * rank)
        return result

    for result in testing.run(3, body):
        assert torch.equal(result, torch.arange(6.0).reshape(2, 3).t() + 10 * root)


def test_broadcast_object() -> None:
    objects = [{"rank": rank, "nested": [torch.full((rank,), 1.0), None]} for rank in range(3)]

    def body(rank: int) -> object:
        received = agmerge.broadcast_object(objects[rank], root_rank=2)
        assert (received is objects[rank]) is (rank == 2)
        assert agmerge.broadcast_object(None) is None
        return received

    for received in testing.run(3, body):
        assert isinstance(received, dict) and received["rank"] == 2
        assert torch.equal(received["nested"][0], torch.ones(2)) and received["nested"][1] is None


def test_an_object_that_does_not_pickle_is_an_error_on_every_rank() -> None:
    def body(rank: int) -> None:
        agmerge.broadcast_object(lambda: None, root_rank=1, name="hook")

    errors = testing.run(3, body, return_errors=True)
    assert [type(error) for error in errors] == [AGMergeError] * 3
    assert {str(error) for error in errors} == {"AGM304: hook: the object of rank 1 cannot be pickled"}
    assert errors[1].__cause__ is not None and errors[0].__cause__ is None


@pytest.mark.parametrize("root", [-1, 2, 100])
def test_a_root_that_does_not_exist(root: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: agmerge.broadcast(torch.ones(1), root),
        lambda: agmerge.broadcast_object(1, root),
        lambda: agmerge.broadcast_parameters([torch.ones(1)], root),
        lambda: agmerge.broadcast_optimizer_state(torch.optim.SGD([torch.ones(1)], lr=1.0), root),
    ]

    def body(rank: int) -> list[tuple[str, str, int]]:
        for call in calls:
            with pytest.raises(ValueError, match=f"root_rank={root}: there are 2 ranks, 0 to 1"):
                call()
        return testing.calls()

    assert testing.run(2, body) == [[], []]  # nobody waits for anybody


MISTAKES: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "op": (
        lambda: agmerge.allreduce(torch.ones(2)),
        lambda: agmerge.allreduce(torch.ones(2), op=agmerge.Sum),
        "op: average on rank 0; sum on rank 1",
    ),
    "shape": (
        lambda: agmerge.allreduce(torch.ones(2, 3)),
        lambda: agmerge.allreduce(torch.ones(3, 2)),
        r"tensor: float32\[2, 3\] on rank 0; float32\[3, 2\] on rank 1",
    ),
    "trailing": (
        lambda: agmerge.allgather(torch.ones(2, 3)),
        lambda: agmerge.allgather(torch.ones(2, 4)),
        r"trailing dimensions: \[3\] on rank 0; \[4\] on rank 1",
    ),
    "dtype": (
        lambda: agmerge.allgather(torch.ones(2)),
        lambda: agmerge.allgather(torch.ones(2).half()),
        "dtype: torch.float32 on rank 0; torch.float16 on rank 1",
    ),
    "root": (
        lambda: agmerge.broadcast(torch.ones(2), 0),
        lambda: agmerge.broadcast(torch.ones(2), 1),
        "root_rank: 0 on rank 0; 1 on rank 1",
    ),
    "root of an object": (
        lambda: agmerge.broadcast_object("a", 0),
        lambda: agmerge.broadcast_object("b", 1),
        "root_rank: 0 on rank 0; 1 on rank 1",
    ),
    "call": (
        lambda: agmerge.allreduce(torch.ones(2), name="x"),
        lambda: agmerge.allgather(torch.ones(2), name="x"),
        "call: allreduce on rank 0; allgather on rank 1",
    ),
    "name": (
        lambda: agmerge.allreduce(torch.ones(2), name="x"),
        lambda: agmerge.allreduce(torch.ones(2), name="y"),
        "name: x on rank 0; y on rank 1",
    ),
    "barrier": (
        lambda: agmerge.barrier(),
        lambda: agmerge.broadcast_object(1),
        "call: barrier on rank 0; broadcast_object on rank 1",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mismatched_calls_are_the_same_error_on_every_rank(mistake: str) -> None:
    first, second, text = MISTAKES[mistake]
    errors = testing.run(2, lambda rank: (second if rank else first)(), return_errors=True)
    assert [type(error) for error in errors] == [RankMismatchError] * 2
    with pytest.raises(RankMismatchError, match=text):
        raise errors[0]
    assert str(errors[0]) == str(errors[1])


def test_barrier_waits_for_everybody() -> None:
    came: list[int] = []

    def body(rank: int) -> int:
        came.append(rank)
        agmerge.barrier()
        return len(came)

    assert testing.run(3, body, inject=testing.jitter(3)) == [3, 3, 3]


def test_a_rank_that_has_left_is_named() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            agmerge.allreduce(torch.ones(1), name="loss")

    error, _ = testing.run(2, body, return_errors=True)
    assert isinstance(error, PeerLost)
    assert "loss" in str(error) and "rank 1 has already returned" in str(error)


def test_an_operation_that_is_none() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="allreduce: op must be .*Average, Sum, Min, Max or Product, got 'mean'"):
            agmerge.allreduce(torch.ones(1), op="mean")

    testing.run(1, body)


def test_without_init_every_call_says_what_to_do() -> None:
    calls: list[Callable[[], object]] = [
        lambda: agmerge.allreduce(torch.ones(1)),
        lambda: agmerge.allgather(torch.ones(1)),
        lambda: agmerge.broadcast(torch.ones(1), 0),
        lambda: agmerge.broadcast_object(1),
        lambda: agmerge.broadcast_parameters([torch.ones(1)]),
        agmerge.barrier,
        agmerge.rank,
        agmerge.size,
        agmerge.local_rank,
        agmerge.local_size,
        agmerge.backend_name,
    ]
    for call in calls:
        with pytest.raises(AGMergeError, match=r"(?m)^AGM001: .* use agmerge\.init\(\)\.$"):
            call()


def test_a_flag_does_not_pass_for_a_name() -> None:
    def body(rank: int) -> None:
        with pytest.raises(TypeError, match="allgather: name must be a string, got False"):
            agmerge.allgather(torch.ones(2), False)  # type: ignore[arg-type]

    testing.run(1, body)


@pytest.mark.parametrize("call", ["broadcast_parameters", "broadcast_", "allreduce_"])
def test_a_tensor_that_one_rank_alone_cannot_write_to_is_an_error_on_all(call: str) -> None:
    """A buffer that was expanded has several elements in one place. Asked before anything is sent."""

    def body(rank: int) -> str:
        tensor = torch.ones(1).expand(8) if rank == 1 else torch.arange(8.0)
        with pytest.raises(agmerge.RankMismatchError, match="expanded.*clone") as caught:
            if call == "broadcast_parameters":
                agmerge.broadcast_parameters({"table": tensor})
            else:
                getattr(agmerge, call)(tensor, *([0] if call == "broadcast_" else []))
        return str(caught.value)

    said = testing.run(2, body)
    assert said[0] == said[1] and "on rank 1" in said[0]


def test_the_root_may_have_an_expanded_tensor() -> None:
    """It is only read."""

    def body(rank: int) -> bool:
        tensor = torch.ones(1).expand(8) if rank == 0 else torch.arange(8.0)
        agmerge.broadcast_parameters({"table": tensor})
        return torch.equal(tensor, torch.ones(8))

    assert testing.run(2, body) == [True, True]
