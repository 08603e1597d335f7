# SPDX-License-Identifier: Apache-2.0
"""Compare what workers hold, and let them share for a while what each has counted by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def averaged_buffers(model: nn.Module) -> Iterator[None]:
    """Collective. Let all workers have, inside, the mean of their running statistics: to evaluate the same model.

    What is counted in integers is rank 0's. Afterwards each has its own again, so that evaluating changes nothing of a
    training.
    """
    buffers = list(model.buffers())
    own = [buffer.clone() for buffer in buffers]
    if statistics := [buffer for buffer in buffers if buffer.is_floating_point()]:
        agmerge.grouped_allreduce_(statistics)
    if counts := [buffer for buffer in buffers if not buffer.is_floating_point()]:
        agmerge.broadcast_parameters([(str(number), count) for number, count in enumerate(counts)], root_rank=0)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, own, strict=True):
            buffer.copy_(value)
