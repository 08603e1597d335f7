# SPDX-License-Identifier: Apache-2.0
"""What a process does alone needs none of Horovod's guards: everything is as in torch there."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from support import digest, loss_of, mlp, on_ranks, seeded, sgd, wrap
from torch import nn

import agmerge

MODEL = seeded(mlp)


@pytest.mark.parametrize("by_turns", [True, False], ids=["by turns", "both in one step"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_two_wrappers_of_one_tensor_step_as_two_optimizers_do(by_turns: bool, set_to_none: bool) -> None:
    def trained(model: nn.Module, optimizers: list[Any]) -> str:
        for step in range(8):
            for optimizer in optimizers[step % 2 :][:1] if by_turns else optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, 0, step).backward()
            for optimizer in optimizers[step % 2 :][:1] if by_turns else optimizers:
                optimizer.step()
        return digest(model)

    def body(rank: int, model: nn.Module) -> None:
        twin = copy.deepcopy(model)
        plain = [sgd(twin), torch.optim.AdamW(twin.parameters(), lr=1e-3)]
        inner = [sgd(model), torch.optim.AdamW(model.parameters(), lr=1e-3)]
        wrapped = [wrap(model, optimizer, compression="none") for optimizer in inner]
        assert trained(model, wrapped) == trained(twin, plain)

    on_ranks(1, MODEL, body)


def test_a_wrapper_that_is_left_alone_again_goes_on() -> None:
    def body(rank: int, model: nn.Module) -> None:
        twin = copy.deepcopy(model)
        plain, optimizer = sgd(twin), wrap(model, compression="none")
        other: Any = wrap(model, sgd(model), compression="none")
        other.close()
        del other
        gc.collect()
        for its_model, its_optimizer in ((model, optimizer), (twin, plain)):
            for step in range(3):
                its_optimizer.zero_grad()
                loss_of(its_model, rank, step).backward()
                its_optimizer.step()
        assert digest(model) == digest(twin)

    on_ranks(1, MODEL, body)


def test_among_several_a_second_wrapper_is_refused_as_ever() -> None:
    def body(rank: int, model: nn.Module) -> None:
        first = wrap(model)
        with pytest.raises(ValueError, match="of the other one first, or pass different"):
            wrap(model, sgd(model))
        assert first.stats()["steps"] == 0

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize(
    "options", [{"compression": "none"}, {"compression": "topk"}, {"compression": "dgc"}, {"sync": "updates"}], ids=str
)
def test_without_a_trainable_parameter_a_step_does_nothing(options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module) -> None:
        before, closures = digest(model), []
        optimizer = agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.step()
        assert optimizer.step(lambda: closures.append(1) or 3.0) == 3.0 and closures == [1]
        assert digest(model) == before
        model.requires_grad_(True)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert digest(model) != before
        model.requires_grad_(False)
        before = digest(model)
        optimizer.zero_grad()
        optimizer.step()
        assert digest(model) == before

    on_ranks(1, seeded(mlp).requires_grad_(False), body)


def test_a_plain_step_after_synchronize_is_there_without_a_trainable_parameter() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    on_ranks(1, seeded(mlp).requires_grad_(False), body)
