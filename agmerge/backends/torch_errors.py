# SPDX-License-Identifier: Apache-2.0
"""Turn errors of torch.distributed into ours, where they tell of other ranks; those of this rank alone stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agmerge.errors import CollectiveTimeout, PeerLost

# Errors of this rank's device, and of its calls; torch before 2.8 has no class for what a kernel did wrong.
OF_THIS_RANK = tuple(getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name))
OF_THIS_RANK_WORDS = ("invalid usage", "ncclinvalidargument", "cuda error", "cuda failure", "cuda driver error")


@contextmanager
def translated(name: str, within: str = "") -> Iterator[None]:
    """Turn the errors of torch.distributed into ours, also those of the calls that only hand a tensor in.

    ``name``: of the collective. ``within``: how long was waited, in words. Gloo's errors have no class of their own,
    so each ``RuntimeError`` is one of a connection but for those that are known to be of this rank.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, OF_THIS_RANK) or any(words in text.lower() for words in OF_THIS_RANK_WORDS):
            raise  # no other rank has left
        if "imed out" in text or "imeout" in text:
            raise CollectiveTimeout(f"AGM201: {name}: no answer from all ranks{within}", text) from error
        raise PeerLost(f"AGM206: {name}: the connection to another rank broke", text) from error
