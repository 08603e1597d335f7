# SPDX-License-Identifier: Apache-2.0
"""Make GPT-2 in its published sizes, from transformers (Radford et al., "Unsupervised Multitask Learners", 2019)."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from networks import pretrained

SIZES = {"gpt2": (768, 12), "gpt2-medium": (1024, 24), "gpt2-large": (1280, 36)}  # width, layers; 64 of a width a head
PUBLISHED = 50_257  # tokens of the published vocabulary


def gpt2(
    size: str = "gpt2", vocabulary: int = PUBLISHED, weights: Path | None = None, *, tiny: bool = False
) -> nn.Module:
    """Return a GPT-2 whose embedding is shared with the output.

    size: a name in ``SIZES``. vocabulary: how many tokens there are; the embedding has at least the published size,
    so that the number of parameters is the published one with any text, but for ``tiny``. weights: a folder that
    ``save_pretrained`` has written, which says all sizes. tiny: width 32, two layers.

    Raises ``ValueError`` if transformers is missing, if ``weights`` is no such folder or knows fewer tokens.
    """
    if weights is not None:
        return pretrained.knowing(vocabulary, pretrained.make("GPT2LMHeadModel", "GPT2Config", weights), weights)
    width, layers = (32, 2) if tiny else SIZES[size]
    return pretrained.make(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=vocabulary if tiny else max(vocabulary, PUBLISHED),
        n_embd=width,
        n_layer=layers,
        n_head=2 if tiny else width // 64,
        bos_token_id=None,  # those of the published model may be outside of the vocabulary, and nothing reads them here
        eos_token_id=None,
    )
