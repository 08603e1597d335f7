# SPDX-License-Identifier: Apache-2.0
"""Collectives differentiate as Horovod 0.28.1's do; each against sums written out in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support import batch, mlp, on_ranks, seeded, sgd, wrap
from torch import Tensor, nn
from torch.nn import functional as F

import agmerge
from agmerge import testing

ROWS = (2, 0, 3, 1)  # of each rank, where lengths may differ


def given(rank: int, rows: int = 4) -> Tensor:
    source = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 3, dtype=torch.float64, generator=source).requires_grad_()


def weights(rank: int, rows: int) -> Tensor:
    """What a rank's loss multiplies a result by: its gradient."""
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(50 + rank))


def gradients(n: int, call: Callable[[Tensor, int], Tensor], rows: Callable[[int], int]) -> list[tuple[Tensor, Tensor]]:
    """Every rank's gradient, and what its loss multiplied the result by."""

    def body(rank: int) -> tuple[Tensor, Tensor]:
        tensor = given(rank, rows(rank))
        result = call(tensor, rank)
        assert result.requires_grad
        factor = weights(rank, len(result))
        (result * factor).sum().backward()
        assert tensor.grad is not None
        return tensor.grad, factor

    return testing.run(n, body)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_an_average_averages_gradients_and_a_sum_adds_them(n: int) -> None:
    for op, divisor in ((agmerge.Average, n), (agmerge.Sum, 1)):
        found = gradients(n, lambda tensor, rank, op=op: agmerge.allreduce(tensor, op=op), lambda rank: 4)
        total = sum(factor for _, factor in found) / divisor
        assert all(torch.allclose(grad, total, rtol=1e-12) for grad, _ in found)


def test_factors_scale_the_gradient_as_they_scale_the_result() -> None:
    def call(tensor: Tensor, rank: int) -> Tensor:
        return agmerge.allreduce(tensor, op=agmerge.Sum, prescale_factor=0.5, postscale_factor=3.0)

    found = gradients(2, call, lambda rank: 4)
    assert all(torch.allclose(grad, 1.5 * (found[0][1] + found[1][1])) for grad, _ in found)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_allgather_averages_the_gradients_of_a_ranks_rows(n: int) -> None:
    found = gradients(n, lambda tensor, rank: agmerge.allgather(tensor), lambda rank: ROWS[rank])
    mean = sum(factor for _, factor in found) / n
    for (grad, _), mine in zip(found, mean.split(ROWS[:n]), strict=True):
        assert grad.shape == mine.shape and torch.allclose(grad, mine, rtol=1e-12)


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_gives_the_root_the_average_and_the_others_zeros(root: int) -> None:
    found = gradients(3, lambda tensor, rank: agmerge.broadcast(tensor, root), lambda rank: 4)
    mean = sum(factor for _, factor in found) / 3
    for rank, (grad, _) in enumerate(found):
        assert torch.allclose(grad, mean if rank == root else torch.zeros_like(mean), rtol=1e-12)


@pytest.mark.parametrize("rows", [6, 7])
def test_reducescatter_gathers_gradients(rows: int) -> None:
    """Of a sum times the number of ranks: that is Horovod's."""
    for op, factor in ((agmerge.Average, 1), (agmerge.Sum, 3)):
        found = gradients(3, lambda tensor, rank, op=op: agmerge.reducescatter(tensor, op=op), lambda rank: rows)
        whole = factor * torch.cat([mine for _, mine in found])
        assert all(torch.allclose(grad, whole, rtol=1e-12) for grad, _ in found)


def test_alltoall_sends_gradients_back() -> None:
    splits = ([1, 2, 0], [0, 1, 3], [2, 0, 1])

    def body(rank: int) -> tuple[Tensor, Tensor]:
        tensor = given(rank, sum(splits[rank]))
        result, received = agmerge.alltoall(tensor, splits[rank])
        assert received.tolist() == [one[rank] for one in splits] and not received.requires_grad
        owner = torch.full((len(result), 3), 10.0 * rank, dtype=torch.float64)
        (result * owner).sum().backward()
        assert tensor.grad is not None
        return tensor.grad, torch.cat([torch.full((n, 3), 10.0 * to) for to, n in enumerate(splits[rank])])

    for grad, owners in testing.run(3, body):
        assert torch.equal(grad, owners.double())


def test_an_asynchronous_call_has_the_same_gradient() -> None:
    def body(rank: int) -> tuple[Tensor, Tensor]:
        one, two = given(rank), given(rank)
        handles = [agmerge.allreduce_async(one), agmerge.allgather_async(one)]
        with torch.no_grad():  # what counts is where the call was made
            second, first = agmerge.synchronize(handles[1]), agmerge.synchronize(handles[0])
        (first.sum() + (second**2).sum()).backward()
        (agmerge.allreduce(two).sum() + (agmerge.allgather(two) ** 2).sum()).backward()
        assert one.grad is not None and two.grad is not None
        return one.grad, two.grad

    for one, two in testing.run(2, body):
        assert torch.equal(one, two)


def test_a_group_has_the_gradients_of_its_members() -> None:
    def body(rank: int) -> list[Tensor | None]:
        tensors = [given(rank, 2), given(rank + 10, 3)]
        first, second = agmerge.grouped_allreduce(tensors, op=agmerge.Sum)
        (first * 2 + second[:2] * 3).sum().backward()
        return [tensor.grad for tensor in tensors]

    for first, second in testing.run(2, body):
        assert first is not None and second is not None
        assert torch.equal(first, torch.full((2, 3), 4.0).double())
        assert second.tolist() == [[6.0] * 3, [6.0] * 3, [0.0] * 3]


def test_a_gradient_of_a_gradient() -> None:
    def body(rank: int) -> Tensor:
        tensor = given(rank)
        (first,) = torch.autograd.grad(
            (agmerge.allreduce(tensor, op=agmerge.Sum) ** 3).sum(), tensor, create_graph=True
        )
        (second,) = torch.autograd.grad(first.sum(), tensor)
        return second

    total = given(0).detach() + given(1).detach()
    for second in testing.run(2, body):
        assert torch.allclose(second, 4 * 6 * total)


def test_nothing_is_recorded_where_no_gradient_is_wanted() -> None:
    def body(rank: int) -> None:
        tensor = given(rank)
        with torch.no_grad():
            assert not agmerge.allreduce(tensor).requires_grad
        assert not agmerge.allgather(tensor.detach()).requires_grad
        assert not agmerge.allreduce(torch.tensor([rank])).requires_grad

    testing.run(2, body)


def test_the_gradient_of_a_maximum_is_refused_and_its_value_is_not() -> None:
    def body(rank: int) -> None:
        largest = agmerge.allreduce(given(rank), name="loss", op=agmerge.Max)
        with pytest.raises(agmerge.AGMergeError, match="loss: op=max is not differentiable. Pass tensor.detach()"):
            largest.sum().backward()

    testing.run(2, body)


def test_writing_over_a_part_of_a_graph_is_refused() -> None:
    def body(rank: int) -> None:
        leaf = given(rank)
        for call, instead in ((agmerge.allreduce_, "allreduce"), (agmerge.allreduce_async_, "allreduce_async")):
            with pytest.raises(ValueError, match=f"in place does not support. Use {instead}, or pass tensor.detach"):
                call(leaf * 2)  # type: ignore[operator]
        with pytest.raises(ValueError, match="broadcast_: .*Use broadcast, or pass tensor.detach"):
            agmerge.broadcast_(leaf * 2, 0)
        assert agmerge.broadcast_(leaf, 0) is leaf and torch.equal(leaf, given(0))  # a parameter may be set

    testing.run(2, body)


def test_what_was_overwritten_and_saved_for_backward_is_noticed() -> None:
    def body(rank: int) -> None:
        kept, weight = torch.ones(2), torch.ones(2, requires_grad=True)
        product = (weight * kept).sum()
        agmerge.allreduce_(kept, op=agmerge.Sum)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    testing.run(2, body)


# -- a contrastive loss, against one process on the joint batch ---------------------------------------------------


def contrastive(z: Tensor, others: Tensor, first: int) -> Tensor:
    """Every row of ``z`` is its own class among the rows of ``others``, where it stands from ``first`` on."""
    return F.cross_entropy(z @ others.t(), torch.arange(first, first + len(z)))


def compare(n: int, loss: Callable[[Tensor, int], Tensor], joint: Callable[[list[Tensor]], Tensor], op: object) -> None:
    """A step with ``loss`` of every rank's embeddings against one with ``joint`` of all of them."""
    start = seeded(mlp).double()
    single = copy.deepcopy(start)
    joint([single(batch(rank, 0)[0].double()) for rank in range(n)]).backward()
    sgd(single).step()

    def body(rank: int, model: nn.Module) -> list[Tensor]:
        optimizer = wrap(model, compression="none", op=op)
        loss(model(batch(rank, 0)[0].double()), rank).backward()
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    for parameters in on_ranks(n, start, body):
        for p, expected in zip(parameters, single.parameters(), strict=True):
            assert torch.allclose(p, expected, rtol=1e-9, atol=1e-12)


def test_a_loss_of_the_joint_batch_on_every_rank_and_a_local_term() -> None:
    """Every rank computes the same loss of all embeddings: it counts once, beside the sum of the local terms."""

    def loss(z: Tensor, rank: int) -> Tensor:
        everyone = agmerge.allgather(z)
        return contrastive(everyone, everyone, 0) + (z**2).sum()

    def joint(zs: list[Tensor]) -> Tensor:
        everyone = torch.cat(zs)
        return contrastive(everyone, everyone, 0) + (everyone**2).sum()

    compare(3, loss, joint, agmerge.Sum)


def test_a_loss_of_own_rows_against_all_rows() -> None:
    """The mean over ranks of their losses, by the recipe of docs/from_horovod.md."""

    def loss(z: Tensor, rank: int) -> Tensor:
        everyone = agmerge.allgather(z)
        everyone = agmerge.size() * everyone - (agmerge.size() - 1) * everyone.detach()
        return contrastive(z, everyone, len(z) * rank) + (z**2).mean()

    def joint(zs: list[Tensor]) -> Tensor:
        everyone, n = torch.cat(zs), len(zs[0])
        losses = [contrastive(z, everyone, n * rank) + (z**2).mean() for rank, z in enumerate(zs)]
        return torch.stack(losses).mean()

    compare(3, loss, joint, agmerge.Average)
