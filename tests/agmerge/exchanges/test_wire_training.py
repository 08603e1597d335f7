# SPDX-License-Identifier: Apache-2.0
"""Wires of a few bits a value in whole trainings: replicas, and what stays is what no receiver got, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import AwkwardModel, Sent, agreed, digest, mlp, on_ranks, residuals, same_bits, seeded, train, wrap
from support.awkward_training import backward, wrapped_awkward
from torch import Tensor, nn

import agmerge
import sparsifiers
from agmerge import testing
from agmerge.backends import topology

MODEL, SMALL = seeded(AwkwardModel, 7), seeded(mlp, 3)
FEW = ["int4", "2bit", "sign"]


def assert_kept(
    step: int, wire: str, before: dict[str, Tensor], sent: dict[str, Tensor], kept: dict[str, Tensor]
) -> None:
    """Kept is what was there less what was sent, to the bit; from half of what was sent on, both add up to the bit."""
    for name, rest in kept.items():
        whole, gone = before[name], sent[name]
        assert torch.equal(rest, whole - gone), f"step {step}, {name}"
        exact = whole.abs() >= gone.abs() / 2 if wire in ("2bit", "sign") else torch.ones_like(rest, dtype=torch.bool)
        assert torch.equal((rest + gone)[exact], whole[exact]), f"step {step}, {name}"
        assert not gone[whole == 0].any(), f"step {step}, {name}: sent where nothing was"


@pytest.mark.parametrize("sparsify", ["ahead", "behind"])
@pytest.mark.parametrize("compression", sparsifiers.names())
@pytest.mark.parametrize("wire", FEW)
def test_what_receivers_did_not_get_is_kept(
    wire: str, compression: str, sparsify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_that_the_rest_is_kept(wire, compression, sparsify, 0.05, monkeypatch)


@pytest.mark.parametrize("compression", sparsifiers.names())
@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_what_receivers_did_not_get_is_kept_at_density_1(
    wire: str, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices take no bytes, whatever a sparsifier makes of this density."""
    assert f"all/{wire}" in check_that_the_rest_is_kept(wire, compression, "behind", 1.0, monkeypatch, steps=4)


def check_that_the_rest_is_kept(
    wire: str, compression: str, sparsify: str, density: float, monkeypatch: pytest.MonkeyPatch, steps: int = 5
) -> set[str]:
    """Train so many steps; return the codecs in use."""
    sent = Sent(monkeypatch)
    codecs: set[str] = set()

    def body(rank: int, model: AwkwardModel) -> list[str]:
        optimizer = wrapped_awkward(
            model, compression=compression, memory="residual", wire=wire, density=density, sparsify=sparsify
        )
        old: dict[str, Tensor] = {}
        seen = []
        for step in range(steps):
            sent.of.setdefault(rank, {}).clear()
            optimizer.zero_grad()
            backward(model, rank, step)
            gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.synchronize()
            gone = dict(sent.of[rank])
            with optimizer.skip_synchronize():
                optimizer.step()
            new = residuals(optimizer)
            before = {name: old.get(name, torch.zeros_like(rest)) for name, rest in new.items()}
            for name, one in gradient.items():
                if name in before:
                    before[name] = before[name] + one.to(before[name].dtype)
            assert_kept(step, wire, before, gone, new)
            old = new
            seen.append(digest(model))
        codecs.update(optimizer.stats()["wire"])
        return seen

    assert len(set(agreed(on_ranks(3, MODEL, body)))) == steps
    return codecs


@pytest.mark.parametrize("exchange", ["sparse", "two-level", "auto"])
@pytest.mark.parametrize("compression", sparsifiers.names())
@pytest.mark.parametrize("wire", FEW)
def test_replicas_stay_equal(wire: str, compression: str, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")
    options: dict[str, Any] = {"compression": compression, "memory": "residual", "density": 0.05}

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, wire=wire, exchange=exchange, **options)
        seen = train(model, optimizer, rank, range(6))
        assert all(rest.isfinite().all() for rest in residuals(optimizer).values())
        told = [name.split("/") for name in optimizer.stats()["wire"] if "/" in name]
        assert {value for index, value in told if index != "dense"} == {wire} or exchange == "auto"
        # What is sent whole is rounded to int8 beside these; not between nodes.
        whole = {value for index, value in told if index == "dense"}
        assert whole == (set() if exchange == "two-level" else {"int8"}) or exchange == "auto"
        return seen

    assert len(set(agreed(on_ranks(4, SMALL, body)))) == 6


@pytest.mark.parametrize("wire", ["int8", "auto"])
@pytest.mark.parametrize("exchange", ["oktopk", "masked"])
def test_bytes_of_several_rounds_are_told_by_codec(exchange: str, wire: str) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, wire=wire, exchange=exchange, compression="topk", density=0.05)
        train(model, optimizer, rank, range(3))
        return optimizer.stats()

    for stats in on_ranks(3, SMALL, body):
        found = stats["wire"]
        assert sum(found.values()) == stats["bytes_sent"] and found["header"] > 0
        values = {name.split("/")[1]: size for name, size in found.items() if "/" in name and "dense/" not in name}
        if exchange == "masked":
            assert found["votes"] > 0
        if exchange == "oktopk" or wire == "int8":
            (codec,) = values
            assert codec == ("int8" if wire == "int8" else "fp32") and values[codec] > 0
        else:
            assert not values and found["plain"] > found["votes"]  # sums at the mask


@pytest.mark.parametrize("wire", FEW)
def test_momentum_before_selection_goes_with_them(wire: str) -> None:
    """compression="dgc" by default: the momentum of what is sent is cleared."""

    def body(rank: int, model: nn.Module) -> list[str]:
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return train(model, wrap(model, inner, compression="dgc", density=0.05, wire=wire), rank, range(8))

    assert len(set(agreed(on_ranks(3, SMALL, body)))) == 8


@pytest.mark.parametrize("wire", ["2bit", "sign"])
def test_rows_without_a_gradient_are_not_touched(wire: str) -> None:
    """Fewer elements are there than are selected, as with an embedding; a sign would make something of nothing."""

    def body(rank: int, model: nn.Module) -> tuple[Tensor, Tensor]:
        layer = seeded_embedding()
        optimizer = wrap(layer, torch.optim.SGD(layer.parameters(), lr=0.1), compression="topk", density=0.1, wire=wire)
        first = layer.weight.detach().clone()
        for _ in range(5):
            optimizer.zero_grad()
            layer(torch.tensor([3, 5 + rank, 3])).square().sum().backward()
            optimizer.step()
        return first, layer.weight.detach()

    for first, last in on_ranks(2, SMALL, body):
        touched = (first != last).any(dim=1).nonzero().view(-1).tolist()
        assert touched == [3, 5, 6]
        assert same_bits(first[:3], last[:3])


def seeded_embedding() -> nn.Embedding:
    """An embedding that is the same on all ranks, whichever thread makes it."""
    layer = nn.Embedding(100, 32)
    values = torch.randn(100, 32, generator=torch.Generator().manual_seed(0))
    layer.weight.data.copy_(values)
    return layer


# -- what is zero on all ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["gradients", "updates"])
@pytest.mark.parametrize("exchange", ["sparse", "oktopk"])
@pytest.mark.parametrize("wire", ["auto", "fp16", "int8", *FEW])
def test_adam_moves_no_weight_without_a_gradient(wire: str, exchange: str, sync: str) -> None:
    """Pruned ones, where fewer gradients are not zero than a message has slots; small tensors are sent whole."""
    shapes = {"matrix": (40, 64), "long": (1030,), "bias": (40,)}
    source = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}
    in_use = {name: torch.rand(shape, generator=source) < 0.04 for name, shape in shapes.items()}

    def body(rank: int) -> dict[str, Tensor]:
        weights = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
        inner = torch.optim.AdamW(weights.values(), lr=0.01, weight_decay=0.0)
        optimizer = agmerge.DistributedOptimizer(
            inner, list(weights.items()), compression="topk", density=0.1, wire=wire, exchange=exchange, sync=sync
        )
        for step in range(3):
            optimizer.zero_grad()
            drawn = torch.Generator().manual_seed(10 * step + rank)
            given = [torch.randn(shape, generator=drawn) * in_use[name] for name, shape in shapes.items()]
            torch.stack([(p * g).sum() for p, g in zip(weights.values(), given, strict=True)]).sum().backward()
            optimizer.step()
        return {name: p.detach() - start[name] for name, p in weights.items()}

    for moved in testing.run(2, body):
        for name, displacement in moved.items():
            assert not displacement[~in_use[name]].any()
            assert displacement[in_use[name]].any()
