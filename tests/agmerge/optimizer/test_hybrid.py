# SPDX-License-Identifier: Apache-2.0
"""Dense segments ride in the sparse message or go by an all-reduce of their own: the result is the same elementwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, assert_near, gradients, loss_of, mlp, on_ranks, residuals, seeded, wrap
from torch import Tensor, nn

from agmerge.exchanges import DenseExchange, routing

MODEL = seeded(mlp)
RIDES, WALKS = 10**9, -1  # bytes that may ride


def updates(
    size: int, most: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Every rank's updates and residuals of a few steps without learning, so that all steps are comparable; and by
    name the magnitudes of all gradients together, of which they are sums."""
    monkeypatch.setattr(routing, "RIDE", most)

    def body(rank: int, model: nn.Module) -> tuple[bool, dict[str, Tensor], dict[str, Tensor]]:
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), compression="topk", density=0.1, **options)
        found: dict[str, Tensor] = {}
        given = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            given = {name: given[name] + p.grad.abs() for name, p in model.named_parameters()}  # type: ignore[union-attr]
            optimizer.synchronize()
            found |= {f"{step} {name}": one for name, one in gradients(model).items() if one is not None}
            with optimizer.skip_synchronize():
                optimizer.step()
        session = optimizer._reducer.exchange.agreed.buffers
        assert session is not None
        alone = any(isinstance(route.exchange, DenseExchange) for buffer in session.messages for route in buffer)
        return alone, found | residuals(optimizer), given

    found = on_ranks(size, MODEL, body)
    assert agreed([alone for alone, *_ in found]) is (most == WALKS)
    return [one for _, one, _ in found], {name: sum(given[name] for *_, given in found) for name in found[0][2]}


@pytest.mark.parametrize("sparsify", ["ahead", "behind"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_riding_or_not_the_update_of_every_element_is_the_same(
    size: int, sparsify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, as long as 1/W is exact: riding ones are scaled before they are added, the others after it. The sum
    of those that do not ride is in rank order, for a native one may add in any."""
    riding, magnitudes = updates(size, RIDES, monkeypatch, sparsify=sparsify)
    alone, _ = updates(size, WALKS, monkeypatch, sparsify=sparsify, dense_sum="ordered" if size > 2 else "native")
    for one, other in zip(riding, alone, strict=True):
        # Small tensors have a residual where they may be rounded: riding, and not with sums in rank order.
        more = one.keys() - other.keys()
        assert other.keys() <= one.keys() and len(other) > 4 * 6
        assert all(one[name].numel() < 1024 and not one[name].any() for name in more)
        for name, value in ((name, value) for name, value in one.items() if name not in more):
            if size == 3 and name[0].isdigit() and " " in name:
                assert_near(value, other[name], magnitudes[name.partition(" ")[2]])
            else:
                assert torch.equal(value, other[name]), name
            is_exact = " " not in name and value.numel() < 1024  # the residual of a small tensor
            assert value.any() or "weight" not in name or is_exact
