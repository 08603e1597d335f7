# SPDX-License-Identifier: Apache-2.0
"""Define the LSTM that models words: an embedding, layers with dropout between them, and a decoder of its own."""

from __future__ import annotations

from torch import Tensor, nn

State = tuple[Tensor, Tensor]  # hidden and cell, each [layers, batch, width]


class LSTM(nn.Module):
    """Predict the next word from a state that holds what came before (Zaremba et al., "RNN Regularization", 2014).

    The decoder's weight is not that of the embedding, as in the published runs.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, layers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the scores of the next word, [batch, length, vocabulary], and the state after the last one.

        words: int64 [batch, length]. state: the one after the words before; None: nothing came before.
        """
        out, state = self.layers(self.dropout(self.embedding(words)), state)
        return self.decoder(self.dropout(out)), state


def lstm(
    vocabulary: int = 33_278, width: int = 500, layers: int = 2, dropout: float = 0.5, *, tiny: bool = False
) -> nn.Module:
    """Return an LSTM with random weights. By default it is that of WikiText-2; ``tiny`` has width 32 and no dropout."""
    return LSTM(vocabulary, 32, 2, 0.0) if tiny else LSTM(vocabulary, width, layers, dropout)
