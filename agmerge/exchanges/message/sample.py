# SPDX-License-Identifier: Apache-2.0
"""Measure codecs on the values that training selects: the share of their energy that arrives, and the time.

The quantisation error is sent later, so the share that arrives is the share of a step's progress. It is of energies, as
in the contraction ||v - C(v)||^2 <= (1 - d) ||v||^2. Convergence with error feedback rests on that (Karimireddy et
al., "Error Feedback Fixes SignSGD", ICML 2019).
"""

from __future__ import annotations

import time
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from agmerge.exchanges.message.codec import ValueCodec, clear_behind
from agmerge.exchanges.message.scaled import BLOCK

BLOCKS = 64  # of values that are kept, about
TURNS = 3  # times that a codec is timed; the fastest counts


class Handling(NamedTuple):
    """Loss and time of a codec on one rank's values: a row of numbers to be compared between ranks."""

    energy: float  # the sum of the squares of all values
    lost: float  # the sum of the squares of the differences between values and those that are read
    encode: float  # seconds a value
    decode: float  # seconds a value


class ZeroCount:
    """Count of the coordinates that one step sends in few bits, and of those in mixed blocks.

    Mixed blocks have zeros and other values.
    """

    def __init__(self) -> None:
        self._coordinates = 0
        self._mixed: list[Tensor] = []  # int64, 0-dim: of parts of tensors

    def take(self, values: Tensor | None, numel: int, size: int) -> None:
        """Count ``values``, (numel,), in blocks of so many coordinates; None: all are zero. No device is waited for."""
        self._coordinates += numel
        if values is None:
            return
        whole = numel - numel % size
        for blocks in (values[:whole].view(-1, size), values[whole:].view(1, -1)):
            zeros = (blocks == 0).sum(dim=1)
            self._mixed.append(((zeros > 0) & (zeros < blocks.shape[1])).sum() * blocks.shape[1])

    def counts(self) -> tuple[int, int]:
        """Return the coordinates in mixed blocks, and all of them."""
        runs = groupby(self._mixed, key=lambda part: part.device)
        return sum(int(torch.stack(list(run)).sum()) for _, run in runs), self._coordinates


class ValueSample:
    """Sample of the values that one step sends, as they were before a codec rounded them.

    ``values``: their number in a step, about. Blocks at equal distances are kept, so that all tensors have a share.
    """

    def __init__(self, values: int) -> None:
        self._every = max(1, values // (BLOCK * BLOCKS))  # blocks
        self._seen = 0  # blocks
        self._whole: list[Tensor] = []  # blocks
        self._short: list[Tensor] = []  # the last block of a message, with fewer values

    def take(self, values: Tensor, count: int | Tensor) -> None:
        """Copy some of ``values``, (capacity,), of which ``count`` are in use. A device is not waited for."""
        blocks = -(-values.numel() // BLOCK)
        for block in range(-self._seen % self._every, blocks, self._every):
            start = block * BLOCK
            kept = clear_behind(values[start : start + BLOCK].float(), count - start).clone()
            (self._whole if kept.numel() == BLOCK else self._short).append(kept)
        self._seen += blocks

    def values(self) -> Tensor | None:
        """Return the sample, float32, whole blocks first; None if it is empty, or not finite."""
        runs = groupby([*self._whole, *self._short], key=lambda part: part.device)
        parts = [torch.cat(list(run)).cpu() for _, run in runs]  # one transfer, if all of them are on one device
        values = torch.cat(parts) if parts else torch.empty(0)
        return values if values.numel() and bool(values.isfinite().all()) else None


def handling(codec: ValueCodec, values: Tensor) -> Handling:
    """Return loss and time of ``codec`` on ``values``, float32 on the host, in a message of their own."""
    out = torch.empty(codec.size(values.numel()), dtype=torch.uint8)
    encode = decode = float("inf")
    read = values
    for _ in range(TURNS):
        began = time.perf_counter()
        read = codec.encode(values, out)
        encoded = time.perf_counter()
        codec.decode(out, values.numel(), values.dtype)
        encode, decode = min(encode, encoded - began), min(decode, time.perf_counter() - encoded)
    exact, count = values.double(), values.numel()
    lost = exact - read.double()
    return Handling(float(exact.dot(exact)), float(lost.dot(lost)), encode / count, decode / count)
