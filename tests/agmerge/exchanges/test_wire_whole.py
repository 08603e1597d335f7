# SPDX-License-Identifier: Apache-2.0
"""Small tensors that are sent whole beside what is selected: rounded as the wire says, and nothing of it is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Sent, agreed, backward, digest, mlp, on_ranks, same_bits, seeded, sgd, wrap
from torch import Tensor, nn

import agmerge
from agmerge.exchanges.message.scaled import WHOLE

MODEL = seeded(mlp, 3)
WHOLES = {name for name, parameter in MODEL.named_parameters() if parameter.dim() == 1 or parameter.numel() < 1024}


def roundings(optimizer: agmerge.DistributedOptimizer) -> dict[str, Tensor]:
    """Return what rounding has left of tensors that are sent whole, by name, as a checkpoint would hold it."""
    residuals = optimizer.state_dict()["agmerge"]["residuals"]
    return {name: residuals[name] for name in WHOLES if name in residuals}


@pytest.mark.parametrize("compression", ["topk", "dgc"])
@pytest.mark.parametrize("wire", list(WHOLE))
def test_what_is_rounded_off_is_kept_to_the_bit(wire: str, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up what was kept and the gradient: that is what is sent and what is kept. Momentum is of averages."""
    sent = Sent(monkeypatch)

    def body(rank: int, model: nn.Module) -> list[str]:
        options: dict[str, Any] = {"compression": compression, "wire": wire, "exchange": "sparse", "density": 0.05}
        optimizer = wrap(model, sgd(model), **options)
        old: dict[str, Tensor] = {}
        seen = []
        for step in range(4):
            sent.of.setdefault(rank, {}).clear()
            optimizer.zero_grad()
            backward(model, rank, step)
            gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            new = roundings(optimizer)
            assert set(new) == WHOLES
            there = {name: gradient[name] + old[name] if old else gradient[name] for name in new}
            largest = max(float(whole.abs().max()) for whole in there.values())  # blocks know no tensors
            for name, kept in new.items():
                assert same_bits(kept, there[name] - sent.of[rank][name]), f"step {step}, {name}"
                assert kept.abs().max() <= largest / 250, f"step {step}, {name}: {WHOLE[wire]}"
            assert any(kept.any() for kept in new.values())
            old = new
            seen.append(digest(model))
        assert f"dense/{WHOLE[wire]}" in optimizer.stats()["wire"]
        return seen

    assert len(set(agreed(on_ranks(3, MODEL, body)))) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"wire": "fp32"},
        {"wire": "int8", "dense": sorted(WHOLES)},
        {"wire": "int8", "dense_sum": "ordered"},
        {"wire": "int8", "exchange": "oktopk"},
        {"wire": "int8", "memory": "none"},
    ],
    ids=str,
)
def test_nothing_is_rounded_where_that_was_not_asked_for(options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, **{"compression": "topk", "exchange": "sparse", "density": 0.05, **options})
        for step in range(2):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        assert not any(tensor.any() for tensor in roundings(optimizer).values())
        assert not [name for name in optimizer.stats()["wire"] if name.startswith("dense/")]

    on_ranks(2, MODEL, body)


def test_it_is_sent_once_nothing_is_rounded_any_more() -> None:
    """With another compressor, which sends all there is, what was rounded off comes with the next update."""

    def body(rank: int, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        optimizer = wrap(model, sgd(model, momentum=0.0), compression="topk", wire="int8", exchange="sparse")
        optimizer.zero_grad()
        backward(model, rank, 0)
        optimizer.step()
        kept = {name: tensor.clone() for name, tensor in roundings(optimizer).items()}
        optimizer.set_compressor("none")
        optimizer.zero_grad()
        (0.0 * sum(p.sum() for p in model.parameters())).backward()
        optimizer.synchronize()
        update = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with optimizer.skip_synchronize():
            optimizer.step()
        assert not any(tensor.any() for tensor in roundings(optimizer).values())
        return kept, update

    found = on_ranks(2, MODEL, body)
    for name in WHOLES:
        mean = sum(kept[name] for kept, _ in found) / 2
        assert mean.abs().max() > 0
        assert torch.allclose(found[0][1][name], mean, rtol=1e-5, atol=0.0), name
