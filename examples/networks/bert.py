"""Make BERT with a head for spans, from transformers (Devlin et al., NAACL 2019)."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from networks import pretrained

SIZES = {"bert-base": (768, 12), "bert-large": (1024, 24)}  # width and layers; a head has 64 of the width
PUBLISHED = 30_522  # word pieces of the published, uncased vocabulary


def bert(
    size: str = "bert-base", vocabulary: int = PUBLISHED, weights: Path | None = None, *, tiny: bool = False
) -> nn.Module:
    """Return a BERT that scores every token as the first and as the last one of an answer.

    size: a name in ``SIZES``. vocabulary: how many word pieces there are; the embedding has at least the published
    size, but for ``tiny``. weights: a folder that ``save_pretrained`` has written, which says all sizes; the head may
    be missing there. tiny: width 32, two layers.

    Raises ``ValueError`` if transformers is missing, if ``weights`` is no such folder or knows fewer word pieces.
    """
    if weights is not None:
        return pretrained.knowing(
            vocabulary, pretrained.make("BertForQuestionAnswering", "BertConfig", weights), weights
        )
    width, layers = (32, 2) if tiny else SIZES[size]
    return pretrained.make(
        "BertForQuestionAnswering",
        "BertConfig",
        vocab_size=vocabulary if tiny else max(vocabulary, PUBLISHED),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2 if tiny else width // 64,
        intermediate_size=4 * width,
    )
