# SPDX-License-Identifier: Apache-2.0
"""Others than the optimizer can build on :class:`GradientExchange`: each of them here is a script of some lines."""

from __future__ import annotations

import copy

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, seeded, sgd, wrap
from support.gradient_exchange import Table, connected, drawn, stepped
from torch import Tensor, nn

from agmerge import testing

MODEL = seeded(mlp)
SPARSE = {"compression": "topk", "density": 0.05}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["none", "topk"])
def test_local_steps_exchange_displacements(options: dict[str, object]) -> None:
    """Every rank makes four SGD steps of its own; what ranks have in common moves by the mean of their ways."""

    def body(rank: int, model: nn.Module) -> tuple[str, float, dict[str, Tensor], dict[str, Tensor]]:
        shared = {name: tensor.clone() for name, tensor in parameters(model).items()}
        start = {name: tensor.clone() for name, tensor in shared.items()}
        gone = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}  # by this rank, all in all
        exchange, inner = connected(Table(shared), **options), sgd(model)
        for outer in range(5):
            for step in range(4):
                inner.zero_grad()
                backward(model, rank, 4 * outer + step)
                inner.step()
            way = {name: shared[name] - tensor for name, tensor in parameters(model).items()}
            for name, update in stepped(exchange, way).items():
                gone[name] += way[name]
                parameters(model)[name].copy_(shared[name].sub_(update))
        owed = {
            name: gone[name] - exchange.agreed.current.residuals().get(name, 0) for name in shared
        }  # what others have heard of
        moved = {name: start[name] - shared[name] for name in shared}
        return (
            digest(model),
            sum(float(r.abs().sum()) for r in exchange.agreed.current.residuals().values()),
            owed,
            moved,
        )

    seen = on_ranks(3, MODEL, body)
    agreed([digests for digests, *_ in seen])
    for _, residual, _, moved in seen:
        assert (residual > 0) == bool(options)
        for name in moved:  # error feedback: all ways have arrived, but for what is still kept
            mean = sum(owed[name] for _, _, owed, _ in seen) / 3
            torch.testing.assert_close(moved[name], mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["none", "topk"])
def test_buckets_of_gradients_can_be_handed_over_one_by_one(options: dict[str, object]) -> None:
    """As a hook of DistributedDataParallel gets them, last layers first. The optimizer's own hooks come to the same."""
    buckets = [["4.bias", "4.weight"], ["2.bias", "2.weight", "0.bias"], ["0.weight"]]

    def hook(rank: int, model: nn.Module) -> str:
        exchange, inner = connected(Table(parameters(model)), merging="single", **options), sgd(model)
        by_name = dict(model.named_parameters())
        for step in range(5):
            inner.zero_grad()
            backward(model, rank, step)
            flat = [torch.cat([by_name[name].grad.view(-1) for name in bucket]) for bucket in buckets]
            views = {}
            for bucket, buffer in zip(buckets, flat, strict=True):
                parts = buffer.split([by_name[name].numel() for name in bucket])
                for name, part in zip(bucket, parts, strict=True):
                    views[name] = part.view_as(by_name[name])
                    exchange.ready(name, views[name])
            for name, update in exchange.finish().updates.items():
                by_name[name].grad.copy_(views[name].copy_(update))
            exchange.commit()
            inner.step()
        return digest(model)

    def optimizer(rank: int, model: nn.Module) -> str:
        inner = sgd(model)
        wrapped = wrap(model, inner, **{"compression": "none", "merging": "single", **options})
        for step in range(5):
            wrapped.zero_grad()
            backward(model, rank, step)
            wrapped.step()
        return digest(model)

    assert agreed(on_ranks(2, MODEL, hook)) == agreed(on_ranks(2, MODEL, optimizer))


def test_two_exchanges_live_side_by_side() -> None:
    """Their messages are under way at the same time; each comes to what it does alone."""
    of_factors, of_rest = {"p": (48, 4), "q": (32, 4)}, {"bias": (48,), "embedding": (100, 32)}
    as_they_are = {"dense_sum": "ordered"}

    def alone(rank: int, shapes: dict[str, tuple[int, ...]], options: dict[str, object]) -> list[str]:
        exchange = connected(Table(drawn(0, 0, shapes)), **options)
        return [digest(stepped(exchange, drawn(rank, step, shapes)).values()) for step in range(4)]

    def together(rank: int) -> tuple[list[str], list[str]]:
        first = connected(Table(drawn(0, 0, of_factors)), **as_they_are)
        second = connected(Table(drawn(0, 0, of_rest)), **SPARSE)
        digests: tuple[list[str], list[str]] = ([], [])
        for step in range(4):
            p, rest = drawn(rank, step, of_factors), drawn(rank, step, of_rest)
            first.ready("p", p["p"])
            second.ready("bias", rest["bias"])
            first.ready("q", p["q"])
            second.ready("embedding", rest["embedding"])
            later, sooner = second.finish(), first.finish()
            digests[0].append(digest(sooner.updates.values()))
            digests[1].append(digest(later.updates.values()))
            first.commit()
            second.commit()
        return digests

    expected = tuple(
        agreed(testing.run(2, lambda rank, shapes=shapes, options=options: alone(rank, shapes, options)))
        for shapes, options in ((of_factors, as_they_are), (of_rest, SPARSE))
    )
    assert agreed(testing.run(2, together)) == expected


def test_what_comes_of_one_round_may_decide_what_the_next_one_sends() -> None:
    """Two exchanges a step, one after the other, as a factorisation makes them: P = M Q, then Q = M' P."""
    factors = drawn(0, 0, {"left": (24, 2), "right": (2, 16)})
    exact = factors["left"] @ factors["right"]

    def body(rank: int) -> Tensor:
        p, q = connected(Table({"p": torch.zeros(24, 2)})), connected(Table({"q": torch.zeros(16, 2)}))
        matrix, factor = exact * (rank + 1), torch.eye(16, 2)
        for _ in range(2):
            mean = stepped(p, {"p": matrix @ factor})["p"]
            left = torch.linalg.qr(mean).Q
            factor = stepped(q, {"q": matrix.T @ left})["q"]
        return left @ factor.T

    approximations = testing.run(2, body)
    agreed([digest([approximation]) for approximation in approximations])
    torch.testing.assert_close(approximations[0], exact * 1.5)


def test_the_tensors_of_an_exchange_are_not_touched() -> None:
    """Neither those of the table nor those that are handed over."""

    def body(rank: int) -> None:
        table = Table(drawn(5, 5, {"a": (40, 30), "b": (7,)}))
        exchange, before = connected(table, **SPARSE), copy.deepcopy(table.tensors)
        for step in range(3):
            given = drawn(rank, step, {"a": (40, 30), "b": (7,)})
            kept = copy.deepcopy(given)
            stepped(exchange, given)
            assert digest(given.values()) == digest(kept.values())
        assert digest(table.tensors.values()) == digest(before.values())

    testing.run(2, body)
