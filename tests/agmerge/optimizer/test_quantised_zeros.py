# SPDX-License-Identifier: Apache-2.0
"""Elements without a gradient on any rank do not move, whichever quantiser sends the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import on_ranks, seeded, wrap
from torch import Tensor, nn
from torch.nn import functional as F

import sparsifiers

ROWS, USED, STEPS = 16, 9, 3


class Words(nn.Module):
    """An embedding with a padding row and rows that no batch has, a pruned Linear and a pruned convolution."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, width, padding_idx=0, dtype=dtype)
        self.linear = nn.Linear(width, 8 * 8, dtype=dtype)
        self.conv = nn.Conv2d(4, 16, 3, padding=1, dtype=dtype)
        source = torch.Generator().manual_seed(1)
        self.kept = {
            name: torch.rand(one.weight.shape, generator=source) < 0.4
            for name, one in (("linear", self.linear), ("conv", self.conv))
        }

    def forward(self, x: Tensor) -> Tensor:
        linear, conv = (getattr(self, name).weight * kept for name, kept in self.kept.items())
        seen = F.linear(self.words(x).mean(1), linear, self.linear.bias).view(-1, 4, 4, 4)
        return F.conv2d(seen, conv, self.conv.bias, padding=1).flatten(1)

    def unused(self) -> list[Tensor]:
        """Return values that have no gradient, on any rank and in any step."""
        words, kept = self.words.weight, self.kept
        rest = [getattr(self, name).weight[~one] for name, one in kept.items()]
        return [one.detach().clone() for one in (words[0], words[USED:], *rest)]


def moved(name: str, size: int, width: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[float, float]:
    """Train, and return how far elements without a gradient have moved on any rank, and how far others."""

    def body(rank: int, model: Words) -> tuple[float, float]:
        eps = 1e-4 if dtype == torch.float16 else 1e-8  # the least float16 is 6e-8
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, eps=eps)
        optimizer = wrap(model, inner, compression=name, check_every=1, **options)
        before, used = model.unused(), model.words.weight[1:USED].detach().clone()
        for step in range(STEPS):
            source = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randint(1, USED, (16, 6), generator=source)
            x[:, 4:] = 0  # padding
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
        still = max(float((a - b).abs().max()) for a, b in zip(model.unused(), before, strict=True))
        return still, float((model.words.weight[1:USED].detach() - used).abs().max())

    return max(on_ranks(size, seeded(lambda: Words(width, dtype)), body))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", sparsifiers.quantisers())
@pytest.mark.filterwarnings("ignore:AGM705")
def test_padding_unused_rows_and_pruned_weights_stay_where_they_are(name: str, size: int) -> None:
    for width in (32, 96, 100, 300) if name == "eden-2" else (100,):
        still, others = moved(name, size, width)
        assert still == 0.0 and others > 0.001, width


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_too(dtype: torch.dtype) -> None:
    for size in (2, 3):
        assert moved("eden-2", size, 100, dtype)[0] == 0.0


def test_displacements_of_what_has_no_gradient_stay_zero() -> None:
    for size in (2, 3):
        still, others = moved("eden-2", size, 100, sync="updates")
        assert still == 0.0 and others > 0.001
