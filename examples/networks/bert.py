# SPDX-License-Identifier: Apache-2.0
"""Make BERT with a head for spans, from transformers (Devlin et al., NAACL 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from networks import pretrained
from networks.bert_checkpoint import Checkpoint

SIZES = {"bert-base": (768, 12), "bert-large": (1024, 24)}  # width and layers; a head has 64 of the width
PUBLISHED = 30_522  # word pieces of the published, uncased vocabulary
TINY = (32, 2)
ALIKE = {  # in both sizes, by their names in a file of a configuration
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
}


def bert(
    size: str = "bert-base",
    vocabulary: int = PUBLISHED,
    weights: Path | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    tiny: bool = False,
) -> nn.Module:
    """Return a BERT that scores every token as the first and as the last one of an answer.

    Args:
        size: a name in ``SIZES``.
        vocabulary: how many word pieces there are; the embedding has at least the published size, but for ``tiny``.
        weights: a folder that ``save_pretrained`` has written, which says all sizes; the head may be missing there.
        checkpoint: a file of NVIDIA's, of this ``size``; it says how many rows the embedding has.
        tiny: width 32, two layers.

    Raises ``ValueError`` if transformers is missing, if ``weights`` is no such folder or ``checkpoint`` of another
    size, or if either knows fewer word pieces.
    """
    if weights is not None and checkpoint is not None:
        raise ValueError("--weights and --init_checkpoint both say what to begin with: give one of them")
    if weights is not None:
        return pretrained.knowing(
            vocabulary, pretrained.make("BertForQuestionAnswering", "BertConfig", weights), weights
        )
    width, layers = TINY if tiny else SIZES[size]
    pieces = vocabulary if tiny else max(vocabulary, PUBLISHED)
    if checkpoint is not None:
        check(checkpoint, (width, layers), vocabulary)
        pieces = checkpoint.pieces
    made = pretrained.make(
        "BertForQuestionAnswering",
        "BertConfig",
        vocab_size=pieces,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2 if tiny else width // 64,
        intermediate_size=4 * width,
    )
    if checkpoint is not None:
        checkpoint.load(made)
    return made


def check(checkpoint: Checkpoint, sizes: tuple[int, int], vocabulary: int) -> None:
    """Raise ``ValueError`` if the checkpoint has not these ``sizes``, width and layers, or too few word pieces."""
    where, found = f"--init_checkpoint {checkpoint.path}", checkpoint.sizes
    if found != sizes:
        others = [name for name, other in SIZES.items() if other == found]
        hint = f": take the job {others[0]}-squad" if others else ""
        raise ValueError(
            f"{where} has width {found[0]} and {found[1]} layers, and the network {sizes[0]} and {sizes[1]}{hint}"
        )
    if checkpoint.pieces < vocabulary:
        raise ValueError(
            f"{where} knows {checkpoint.pieces} word pieces, and the vocabulary has {vocabulary}: "
            "give the one it was made with, --vocab_file FILE"
        )


def named(config: Mapping[str, Any]) -> str:
    """Return the size, a name in ``SIZES``, that a published configuration describes.

    Entries that make no network, such as a version, may be anything. Raises ``ValueError`` with what is another here.
    """
    width, layers = (config.get(key) for key in ("hidden_size", "num_hidden_layers"))
    size = next((name for name, sizes in SIZES.items() if sizes == (width, layers)), None)
    if size is None:
        here = " or ".join(f"{name} of {sizes[0]} and {sizes[1]}" for name, sizes in SIZES.items())
        raise ValueError(f"it has width {width} and {layers} layers; here is {here}")
    ours = {**ALIKE, "num_attention_heads": width // 64, "intermediate_size": 4 * width}
    other = [
        f"{key} {config[key]!r} ({size} has {value!r})"
        for key, value in ours.items()
        if config.get(key, value) != value
    ]
    pieces = config.get("vocab_size", PUBLISHED)
    if pieces not in range(PUBLISHED, PUBLISHED + -PUBLISHED % 8 + 1):  # filled up to a multiple of 8, or not
        other.append(f"vocab_size {pieces!r} ({size} has {PUBLISHED})")
    if other:
        raise ValueError("it has " + ", ".join(other))
    return size
