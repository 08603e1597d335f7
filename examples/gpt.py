# SPDX-License-Identifier: Apache-2.0
"""Define a small GPT, and the text that it learns: the source of Python's standard library, a byte a token."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 128  # what is not ASCII reads as "?"
NOT_OURS = {"site-packages", "dist-packages", "test", "tests"}


@functools.lru_cache(1)
def corpus(size: int = 3_000_000) -> tuple[Tensor, Tensor]:
    """Return nine tenths and the last tenth of the first ``size`` bytes of the sorted sources, as int64."""
    root, text = Path(sysconfig.get_path("stdlib")), bytearray()
    for path in sorted(root.rglob("*.py")):
        if not NOT_OURS & set(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= size:
            break
    tokens = torch.frombuffer(text[:size], dtype=torch.uint8).long()
    tokens[tokens >= VOCABULARY] = ord("?")
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the pieces of ``text`` that begin at ``starts``, and what comes next at each place: [pieces, length]."""
    rows = text[starts[:, None] + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def unigram_loss(train: Tensor, held_out: Tensor) -> float:
    """Return the loss, in nats a token, of a model that knows how frequent tokens are, and nothing else."""
    counts = torch.bincount(train, minlength=VOCABULARY).double() + 1
    return -(counts / counts.sum()).log()[held_out].mean().item()


class Block(nn.Module):
    """Add attention to what came before, then a layer of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Predict the next token: 0.82 million parameters by default, the embeddings shared with the output."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_the_sum = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if into_the_sum else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next token: [batch, length, VOCABULARY]."""
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross entropy in nats a token."""
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())
