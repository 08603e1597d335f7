# SPDX-License-Identifier: Apache-2.0
"""Momentum correction inside the exchange, against plain momentum SGD. Against the paper: test_references.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, seeded, train, wrap
from torch import Tensor, nn

import agmerge
import sparsifiers

MODEL = seeded(mlp)
LR = 0.05


def plain(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, **options)


def dgc(**options: Any) -> sparsifiers.Memory:
    return sparsifiers.memory("dgc", **options)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def averaged(size: int, steps: int, **options: Any) -> Tensor:
    """The parameters after plain SGD on the average gradient of all ranks."""
    model = copy.deepcopy(MODEL)
    optimizer = plain(model, **options)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model, rank, step) for rank in range(size)).div(size).backward()  # type: ignore[union-attr]
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("nesterov", [False, True])
def test_at_density_one_without_masking_it_is_momentum_sgd(nesterov: bool) -> None:
    """Sparse and dense tensors alike: the momentum of what is sent whole is applied to the average."""

    def body(rank: int, model: nn.Module) -> Tensor:
        memory = dgc(momentum=0.9, nesterov=nesterov, masking=False)
        optimizer = wrap(model, plain(model), compression="dgc", density=1.0, memory=memory)
        train(model, optimizer, rank, range(8))
        return flat(model)

    for found in on_ranks(2, MODEL, body):
        torch.testing.assert_close(found, averaged(2, 8, momentum=0.9, nesterov=nesterov), rtol=1e-4, atol=1e-6)


def test_what_is_sent_whole_has_the_momentum_of_plain_sgd() -> None:
    def body(rank: int, model: nn.Module) -> Tensor:
        optimizer = wrap(model, plain(model), compression="dgc", dense=[".*"])
        train(model, optimizer, rank, range(8))
        return flat(model)

    for found in on_ranks(2, MODEL, body):
        torch.testing.assert_close(found, averaged(2, 8, momentum=0.9), rtol=1e-4, atol=1e-6)


def test_a_discarded_step_leaves_the_momentum_as_it_was() -> None:
    def body(rank: int, model: nn.Module) -> bool:
        optimizer = wrap(model, plain(model), compression="dgc", density=0.05)
        train(model, optimizer, rank, range(3))
        before = digest(optimizer.state_dict()["agmerge"]["momenta"].values())
        loss_of(model, rank, 9).backward()
        optimizer.synchronize()
        return digest(optimizer.state_dict()["agmerge"]["momenta"].values()) == before

    assert agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("compression", ["dgc", "adtopk", "threshold", "sidco-gp"])
def test_a_resumed_run_has_the_same_bits(compression: str) -> None:
    """Momenta, thresholds and stages are in the checkpoint."""

    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        other = copy.deepcopy(model)
        one = wrap(model, plain(model), compression=compression, density=0.05)
        train(model, one, rank, range(7))
        saved = copy.deepcopy((model.state_dict(), one.state_dict()))
        train(model, one, rank, range(7, 14))
        two = wrap(other, plain(other), compression=compression, density=0.05)
        train(other, two, rank, range(30, 33))  # to have something to forget
        other.load_state_dict(saved[0])
        two.load_state_dict(saved[1])
        train(other, two, rank, range(7, 14))
        return digest(model), digest(other)

    first, second = agreed(on_ranks(2, MODEL, body))
    assert first == second


def test_an_optimizer_with_momentum_of_its_own_is_refused() -> None:
    """One that no memory can apply in its place, or one that the memory says too."""

    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match="AdamW has its own"):
            wrap(model, torch.optim.AdamW(model.parameters()), compression="dgc", memory="dgc")
        wrap(model, torch.optim.AdamW(model.parameters()), compression="dgc", memory="residual").close()
        optimizer = wrap(model, plain(model, momentum=0.9), compression="topk")
        with pytest.raises(ValueError, match="momentum=0.9 too. Set momentum in one place"):
            optimizer.set_compressor("dgc", memory=dgc(momentum=0.9))
        train(model, optimizer, rank, range(2))  # as it was

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 1.0}, r"'dgc': momentum must be in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, "momentum must"),
        ({"clipping": 0.0}, "clipping"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dgc(**options)
    assert agmerge.is_initialized() is False
