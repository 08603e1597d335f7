# SPDX-License-Identifier: Apache-2.0
"""Large dense segments are summed where they lie: the bits and the conservation of those that are copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Parts, digest, on_ranks, residuals, seeded, sgd, wrap

import merging
from agmerge import testing
from agmerge.exchanges import dense

PARTS = seeded(Parts)
WHOLE = merging.Plan((8,), dense=(True,))  # everything in one dense merge buffer, also of the sparse tensor class


def plain(rank: int, model: Parts, **options: Any) -> list[str]:
    optimizer, seen = wrap(model, sgd(model, weight_decay=0.01), **options), []
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # else gradients are accumulated into the last update
        model.loss(rank, step, "ab" if (step + rank) % 3 else "a").backward()
        optimizer.step()
        seen += [digest(model), digest(residuals(optimizer).values())]
    return seen


def thawed(rank: int, model: Parts, **options: Any) -> list[str]:
    """A round that all ranks discard and repeat, with gradients that its messages have left as they were."""
    model.b.requires_grad_(False)
    optimizer, seen = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options), []
    for step in range(5):
        model.b.requires_grad_(step >= 2)
        optimizer.zero_grad(set_to_none=step != 3)
        model.loss(rank, step, "ab").backward()
        optimizer.step()
        seen += [digest(model), digest(residuals(optimizer).values())]
    return seen


def swapped(rank: int, model: Parts, **options: Any) -> list[str]:
    """What topk has not sent is sent by ``none``, in the next step."""
    optimizer, seen = wrap(model, **{**options, "compression": "topk", "merging": "single"}), []
    for step in range(4):
        if step == 2:
            optimizer.set_compressor("none")
        optimizer.zero_grad()
        model.loss(rank, step, "ab").backward()
        optimizer.step()
        seen += [digest(model), digest(residuals(optimizer).values())]
    assert all(not kept.any() for kept in residuals(optimizer).values())
    return seen


@pytest.mark.parametrize("body", [plain, thawed, swapped])
@pytest.mark.parametrize(
    "options",
    [{"compression": "none"}, {"compression": "topk", "merging": WHOLE, "exchange": "auto"}],
    ids=["none", "a dense merge buffer of topk"],
)
def test_the_bits_are_those_of_copied_segments(
    body: Callable[..., list[str]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if body is thawed and "merging" in options:
        options = {**options, "merging": "layerwise"}  # a plan is for all tensors there are
    names = set()

    def run(rank: int, model: Parts) -> list[str]:
        found = body(rank, model, **options)
        names.update(name for _, name, _ in testing.calls())
        return found

    copied = on_ranks(2, copy.deepcopy(PARTS), run)
    assert not any("/dense " in name for name in names)
    monkeypatch.setattr(dense, "LARGE", 64)
    assert on_ranks(2, copy.deepcopy(PARTS), run) == copied
    if body is not thawed or options["compression"] == "none":
        assert any("/dense " in name for name in names)
