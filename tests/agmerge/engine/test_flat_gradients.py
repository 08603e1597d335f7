# SPDX-License-Identifier: Apache-2.0
"""Gradients that are parts of one flat buffer share a version: what backward writes to one changes no other."""

from __future__ import annotations

import copy

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, seeded, sgd, wrap
from torch import nn

import agmerge

MODEL = seeded(mlp)


def flattened(model: nn.Module, *, detached: bool) -> torch.Tensor:
    """Make every ``p.grad`` a part of one flat buffer, as scripts do that clip or log it in one call."""
    sizes = [p.numel() for p in model.parameters()]
    flat = torch.zeros(sum(sizes))
    for parameter, part in zip(model.parameters(), flat.split(sizes), strict=True):
        view = part.view_as(parameter)
        parameter.grad = view.detach() if detached else view
    return flat


@pytest.mark.parametrize("detached", [False, True], ids=["views", "detached views"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_flat_buffer_of_gradients_is_no_change(size: int, detached: bool) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression="none")
        for step in range(4):
            flattened(model, detached=detached)
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, rank, step).backward()
            optimizer.step()
        return digest(model)

    found = agreed(on_ranks(size, MODEL, body))
    if size == 1:
        twin = copy.deepcopy(MODEL)
        plain = sgd(twin)
        for step in range(4):
            plain.zero_grad()
            loss_of(twin, 0, step).backward()
            plain.step()
        assert found == digest(twin)


def test_clipping_parts_of_a_flat_buffer_is_found_as_ever() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, compression="none")
        flattened(model, detached=False)
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, rank, 0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        with pytest.raises(agmerge.AGMergeError, match=r"AGM103: .* gradients of '0\.weight', "):
            optimizer.step()

    on_ranks(2, MODEL, body)
