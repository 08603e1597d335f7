# SPDX-License-Identifier: Apache-2.0
"""Make the networks of transformers from a configuration, or from a folder of weights; nothing is downloaded."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from torch import nn


def make(model: str, config: str, weights: Path | None = None, **settings: Any) -> nn.Module:
    """Return transformers' ``model`` with random weights, by its ``config`` with ``settings``; in training mode.

    weights: a folder that ``save_pretrained`` has written, whose configuration and weights are taken; ``settings`` then
    only change what it says. Layers that the folder does not have, such as a head, begin at random.

    Raises ``ValueError`` if transformers is missing, or the folder does not hold such a model.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{model} needs transformers: pip install -r requirements-examples.txt")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported, which would ask a hub otherwise
    import transformers

    if weights is None:
        return getattr(transformers, model)(getattr(transformers, config)(**settings)).train()
    try:
        return getattr(transformers, model).from_pretrained(weights, **settings).train()
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"--weights {weights}: this is no folder of {model} that save_pretrained has written: {error}"
        ) from error


def knowing(tokens: int, model: nn.Module, weights: Path) -> nn.Module:
    """Return ``model``, which was read from ``weights``. Raises ``ValueError`` if it knows fewer than ``tokens``."""
    known = model.get_input_embeddings().num_embeddings
    if known < tokens:
        raise ValueError(
            f"--weights {weights} knows {known} tokens, and the data have {tokens}: take those it was made with"
        )
    return model
