# SPDX-License-Identifier: Apache-2.0
"""Measure costs of quantisers here: processor time, and zeros that take bits. Convert measurements to another one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

import sparsifiers
from agmerge.planning.codec_choice import stretched, tilted
from agmerge.planning.cost_probe import measured_class
from agmerge.planning.measuring import bytes_of_quantised, gather_seconds, profile
from agmerge.step.merge_buffers import MergeBuffers
from merging import Measurements
from sparsifiers.quantising.draws import Draws

SIZE = 256  # coordinates of a block
BLOCKS = 256  # timed
TURNS = 3  # times; the fastest counts


@dataclass(frozen=True)
class Speed:
    """Costs of a quantiser, on the slowest rank."""

    name: str
    size: float  # bytes of an element in a message, scales included
    encode: float  # seconds an element
    decode: float  # seconds an element


def measure_quantisers(buffers: MergeBuffers, names: Iterable[str]) -> dict[str, Speed]:
    """Collective. Return the costs of quantisers of these names, equal on every rank. Milliseconds, between steps."""
    tensor_class = measured_class(buffers.layout)
    made = {name: sparsifiers.quantiser(name) for name in names}
    own = np.array([_seconds(quantiser, tensor_class.device) for quantiser in made.values()])
    encode, decode = (column.max(axis=0) for column in gather_seconds(buffers, *own.T))
    return {
        name: Speed(name, bytes_of_quantised(buffers, tensor_class, quantiser), float(encode[i]), float(decode[i]))
        for i, (name, quantiser) in enumerate(made.items())
    }


class CountedZeros:
    """Count of zeros beside other values, in what the last step before planning has sent or could send in few bits."""

    def __init__(self, buffers: MergeBuffers) -> None:
        self._buffers = buffers
        self._is_on = False  # the step to come is counted
        self._last = (0, 0)  # coordinates in mixed blocks, and all, of this rank

    def end_step(self) -> None:
        """Take the count of a step that has ended. If it has sent nothing, the count before stays."""
        if self._is_on:
            counts = self._buffers.store.end_zeros()
            self._last = counts if counts[1] else self._last

    def begin_step(self, step: int, is_wanted: bool) -> None:
        """Count the zeros of ``step``, the one to come, if that is wanted. It costs one pass over gradients."""
        self._is_on = is_wanted
        if is_wanted:
            self._buffers.store.start_zeros()

    def share(self) -> float:
        """Collective. Return the share of all ranks' coordinates in mixed blocks: the same on every rank."""
        mixed, coordinates = gather_seconds(self._buffers, *np.array([self._last], dtype=float).T)
        return float(mixed.sum() / max(coordinates.sum(), 1.0))


def _seconds(quantiser: sparsifiers.Quantiser, device: torch.device) -> tuple[float, float]:
    """Return the seconds an element to encode and to decode, on this rank."""
    values = torch.linspace(-1.0, 1.0, BLOCKS * SIZE, device=device)
    out = torch.empty(BLOCKS * quantiser.record_bytes(SIZE), dtype=torch.uint8, device=device)
    encode = decode = float("inf")
    for _ in range(TURNS):
        began = _now(device)
        quantiser.encode(values, SIZE, Draws(0), out)
        encoded = _now(device)
        quantiser.decode_sum([out], [Draws(0)], SIZE, 1.0, values)
        encode, decode = min(encode, encoded - began), min(decode, _now(device) - encoded)
    return encode / values.numel(), decode / values.numel()


def _now(device: torch.device) -> float:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)  # between steps: nothing else runs
    return time.perf_counter()


def in_quantiser(measured: Measurements, buffers: MergeBuffers, step: int, now: Speed, other: Speed) -> Measurements:
    """Return measurements made with the quantiser ``now`` as they would be with ``other``.

    An exchange takes as long as one of as many bytes took. A rank encodes its gradients, and a share of their mean; it
    decodes as many elements as it has, before the second phase.

    Args:

        measured: with ``now``.
        buffers: of the training.
        step: the one to come.
        now, other: of :func:`measure_quantisers`.
    """
    if now.name == other.name:
        return measured
    ready = measured.profile.backward.cumsum()
    load = profile(buffers, ready, step, quantiser=sparsifiers.quantiser(other.name)).load
    more = other.decode - now.decode + (other.encode - now.encode) / buffers.across.size
    exchange = tilted(stretched(measured.exchange, now.size / other.size), more)
    sparsify = measured.sparsify
    return replace(
        measured,
        profile=type(measured.profile)(**{**measured.profile.plain(), "load": load}),
        exchange=exchange,
        sparsify=None if sparsify is None else tilted(sparsify, other.encode - now.encode),
    )
