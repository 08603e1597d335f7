# SPDX-License-Identifier: Apache-2.0
"""Costs of codings here: of value codecs of selections, and of quantisers of whole tensors.

A *coding* is one of either, by name. Their processor time is measured on made-up values, between steps. No coding but
the one in use is probed: measurements are converted. Zeros that take bits of a quantiser are counted in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

import merging
import sparsifiers
from agmerge.exchanges.message.scaled import ValueCodec, value_codec
from agmerge.planning.cost_probe import measured_class
from agmerge.planning.measuring import bytes_of_element, gather_seconds
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import TensorClass
from merging import Curve, Measurements
from merging.plan import Elements
from sparsifiers import Kind
from sparsifiers.quantising.draws import Draws

SIZE = 256  # coordinates of a block
BLOCKS = 256  # timed
TURNS = 3  # times; the fastest counts
Work = Callable[[], object]
FAR = 1 << 31  # elements: where a curve of one point has another one


@dataclass(frozen=True)
class Coding:
    """Costs of a coding, on the slowest rank."""

    name: str
    size: float = 1.0  # bytes of an element in a message, with its index, or with scales
    encode: float = 0.0  # seconds an element
    decode: float = 0.0  # seconds an element


def measure_codings(buffers: MergeBuffers, names: Iterable[str], step: int) -> dict[str, Coding]:
    """Collective. Return the codings of these names, equal on every rank. Takes milliseconds, between steps.

    ``step``: the one to come; its density counts.
    """
    tensor_class = measured_class(buffers.layout)
    quantises = tensor_class.kind is Kind.QUANTISED
    made = {name: sparsifiers.quantiser(name) if quantises else None for name in names}
    own = np.array([_seconds(name, quantiser, tensor_class) for name, quantiser in made.items()])
    encode, decode = (column.max(axis=0) for column in gather_seconds(buffers, *own.T))
    return {
        name: Coding(
            name,
            bytes_of_element(buffers, tensor_class, step, name, quantiser),
            float(encode[i]),
            float(decode[i]),
        )
        for i, (name, quantiser) in enumerate(made.items())
    }


def _seconds(name: str, quantiser: sparsifiers.Quantiser | None, tensor_class: TensorClass) -> tuple[float, float]:
    """Return the seconds an element to encode and to decode, on this rank. ``quantiser``: None: a value codec."""
    device = tensor_class.device
    values = torch.linspace(-1.0, 1.0, BLOCKS * SIZE, device=device)
    if quantiser is not None:
        encode, decode = _of_quantiser(quantiser, values)
    else:
        encode, decode = _of_codec(value_codec(name, tensor_class.dtype), values.to(tensor_class.dtype))
    best = [float("inf")] * 2
    for _ in range(TURNS):
        began = _now(device)
        encode()
        encoded = _now(device)
        decode()
        best = [min(best[0], encoded - began), min(best[1], _now(device) - encoded)]
    return best[0] / values.numel(), best[1] / values.numel()


def _of_quantiser(quantiser: sparsifiers.Quantiser, values: Tensor) -> tuple[Work, Work]:
    """Return what encodes ``values``, and what decodes them."""
    out = torch.empty(BLOCKS * quantiser.record_bytes(SIZE), dtype=torch.uint8, device=values.device)
    return (
        lambda: quantiser.encode(values, SIZE, Draws(0), out),
        lambda: quantiser.decode_sum([out], [Draws(0)], SIZE, 1.0, values),
    )


def _of_codec(codec: ValueCodec, values: Tensor) -> tuple[Work, Work]:
    """Return what encodes ``values``, and what decodes them."""
    out = torch.empty(codec.size(values.numel()), dtype=torch.uint8, device=values.device)
    return lambda: codec.encode(values, out), lambda: codec.decode(out, values.numel(), values.dtype)


def _now(device: torch.device) -> float:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)  # between steps: nothing else runs
    return time.perf_counter()


# What is measured in one coding, as it would be in another one.


def in_coding(
    measured: Measurements, load: Elements, now: Coding, other: Coding, workers: int, *, quantises: bool
) -> Measurements:
    """Return measurements made in the coding ``now`` as they would be in ``other``.

    An exchange takes as long as one of as many bytes took, plus the difference in decoding. Selections are encoded with
    their message, and those of all ranks are decoded. Of quantised tensors a rank encodes its own, where others select,
    and a share of their mean; it decodes as many elements as it has.

    Args:

        measured: in ``now``.
        load: (n,), of :func:`agmerge.planning.measuring.profile` for the other coding.
        now, other: of :func:`measure_codings`.
        workers: the number of ranks that exchange messages.
        quantises: these are quantisers, else value codecs.
    """
    encode, decode = other.encode - now.encode, other.decode - now.decode
    reading = decode + encode / workers if quantises else workers * decode
    sparsify, message = measured.sparsify, measured.message
    if quantises:
        sparsify = None if sparsify is None else tilted(sparsify, encode)
    else:
        message = None if message is None else tilted(message, encode)
    return replace(
        measured,
        profile=merging.Profile(**{**measured.profile.plain(), "load": load}),
        sparsify=sparsify,
        exchange=tilted(stretched(measured.exchange, now.size / other.size), reading),
        message=message,
    )


def stretched(curve: Curve, factor: float) -> Curve:
    """Return the curve over ``factor`` times as many elements."""
    points: dict[int, float] = {}
    for elements, seconds in zip(curve.elements, curve.seconds, strict=True):
        points[round(elements * factor)] = seconds
    return Curve(tuple(points), tuple(points.values()))


def tilted(curve: Curve, slope: float) -> Curve:
    """Return the curve with ``slope`` seconds more for each element; it still does not fall, nor below 0."""
    if slope == 0.0:
        return curve
    at = curve.elements if len(curve.elements) > 1 else (*curve.elements, FAR)
    seconds = np.maximum.accumulate(np.maximum(0.0, curve(np.array(at)) + slope * np.array(at)))
    return Curve(at, tuple(seconds.tolist()))


# Zeros beside other values.

FEW_BITS = 2  # a quantiser of so many or fewer is left out if zeros take one of them from more than:
MIXED = 1 / 8  # of the quantised coordinates


def loses_by_zeros(name: str) -> bool:
    """Return whether a quantiser has too few bits for blocks that mix zeros and other values."""
    quantiser = sparsifiers.quantiser(name)
    return quantiser.masks_zeros and quantiser.bits <= FEW_BITS


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

    def begin_step(self, is_wanted: bool) -> None:
        """Count the zeros of the step to come, if that is wanted. It costs one pass over gradients."""
        self._is_on = is_wanted
        if is_wanted:
            self._buffers.store.start_zeros()

    def share(self) -> float:
        """Collective. Return the share of all ranks' coordinates in mixed blocks: the same on every rank."""
        mixed, coordinates = gather_seconds(self._buffers, *np.array([self._last], dtype=float).T)
        return float(mixed.sum() / max(coordinates.sum(), 1.0))
