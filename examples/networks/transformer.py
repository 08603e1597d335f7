# SPDX-License-Identifier: Apache-2.0
"""Define the Transformer that models words: the encoder of torch, which sees nothing of what comes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Transformer(nn.Module):
    """Predict the next word by attention to those before it (Vaswani et al., NeurIPS 2017).

    Layers have norms behind their sums and are as wide inside as outside, as in the published run; the decoder's weight
    is not that of the embedding.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, width, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, vocabulary)
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor, state: None = None) -> tuple[Tensor, None]:
        """Return the scores of the next word, [batch, length, vocabulary], and no state: each piece stands alone.

        words: int64 [batch, length].
        """
        length, width = words.shape[1], self.embedding.embedding_dim
        x = self.embedding(words) * math.sqrt(width) + places(length, width, words.device)
        mask = nn.Transformer.generate_square_subsequent_mask(length, words.device)
        return self.decoder(self.layers(self.dropout(x), mask, is_causal=True)), None


def places(length: int, width: int, device: torch.device) -> Tensor:
    """Return sines and cosines of each place, by turns, [length, width]: waves of 1 to 10,000 times 2 pi places."""
    rates = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000) / width))
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


def transformer(
    vocabulary: int = 33_278,
    width: int = 400,
    layers: int = 8,
    heads: int = 10,
    dropout: float = 0.5,
    *,
    tiny: bool = False,
) -> nn.Module:
    """Return a Transformer with random weights. By default it is that of WikiText-2; ``tiny`` has width 32."""
    return Transformer(vocabulary, 32, 2, 2, 0.0) if tiny else Transformer(vocabulary, width, layers, heads, dropout)
