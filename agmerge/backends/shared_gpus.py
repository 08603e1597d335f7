# SPDX-License-Identifier: Apache-2.0
"""GPUs that several workers share. NCCL refuses two ranks on one GPU, so tensors go through the host's memory there."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch

SHARED = (
    "AGM708: {workers} workers share {gpus} on this host. NCCL needs one GPU per worker; falling back to Gloo, which "
    "copies tensors through host memory. Start one worker for each GPU."
)

_shared = False  # the same on every rank of the world; written by `settle` alone, whenever a world is joined


def settle_shared_gpus(rank: int, gather: Callable[[bytes, str], list[bytes]]) -> None:
    """Collective. Find out whether workers of this world share GPUs; rank 0 warns if so.

    ``gather``: returns every rank's text.
    """
    global _shared
    problem = why_shared([json.loads(text) for text in gather(json.dumps(visible()).encode(), "gpus")])
    _shared = bool(problem)
    if problem and rank == 0:
        warnings.warn(problem, stacklevel=2)


def gpus_are_shared() -> bool:
    """Return whether workers of this world share GPUs."""
    return _shared


def visible() -> list[str]:
    """Return the GPUs that this process sees, by names that are theirs alone; before torch 2.4 by their numbers.

    Where NCCL_HOSTID says that this process is on a host of its own, NCCL takes GPUs that others have too, and each
    host's GPUs have other names here as well.
    """
    if not torch.cuda.is_available():
        return []
    host = os.environ.get("NCCL_HOSTID", "")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    names = [getattr(one, "uuid", f"{chosen}/{number}") for number, one in enumerate(properties)]
    return [f"{host}{'/' * bool(host)}{name}" for name in names]


def why_shared(seen: Sequence[Sequence[str]]) -> str:
    """Return a warning if more workers see the same GPUs than there are of these; else "". ``seen``: by rank."""
    for gpus, workers in Counter(frozenset(gpus) for gpus in seen).items():
        if workers > len(gpus) > 0:
            return SHARED.format(workers=workers, gpus="one GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs")
    return ""
