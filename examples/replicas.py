"""Compare what workers hold, and make equal what each has counted by itself."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

import agmerge


def replicas_equal(model: nn.Module) -> bool:
    """Collective. Tell whether all workers hold the same parameters and buffers, to the bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    rows = agmerge.allgather(torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)[None])
    return bool((rows == rows[0]).all())


def average_buffers(model: nn.Module) -> None:
    """Collective. Give all workers the mean of their running statistics, so that they evaluate the same model."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if buffers and agmerge.size() > 1:
        agmerge.grouped_allreduce_(buffers)
