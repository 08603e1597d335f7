# SPDX-License-Identifier: Apache-2.0
"""Costs of codings here: of value codecs of selections, and of quantisers of whole tensors.

A *coding* is one of either, by name. Their processor time is measured on made-up values, between steps. No coding but
the one in use is probed: measurements are converted. Zeros that take bits of a quantiser are counted in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

import merging
import sparsifiers
from agmerge.exchanges.message.scaled import value_codec
from agmerge.planning.cost_probe import gather_seconds, measured_class, now
from agmerge.planning.measuring import bytes_of_element
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
    encode, decode = (column.max(axis=0).tolist() for column in gather_seconds(buffers, *own.T))
    sizes = [bytes_of_element(buffers, tensor_class, step, *each) for each in made.items()]
    return {name: Coding(name, *costs) for name, *costs in zip(made, sizes, encode, decode, strict=True)}


def _seconds(name: str, quantiser: sparsifiers.Quantiser | None, tensor_class: TensorClass) -> tuple[float, float]:
    """Return the seconds an element to encode and to decode, on this rank. ``quantiser``: None: a value codec."""
    device, numel = tensor_class.device, BLOCKS * SIZE
    encode, decode = _works(name, quantiser, torch.linspace(-1.0, 1.0, numel, device=device), tensor_class.dtype)
    best = [float("inf")] * 2
    for _ in range(TURNS):
        began = now(device)
        encode()
        encoded = now(device)
        decode()
        best = [min(best[0], encoded - began), min(best[1], now(device) - encoded)]
    return best[0] / numel, best[1] / numel


def _works(name: str, quantiser: sparsifiers.Quantiser | None, values: Tensor, dtype: torch.dtype) -> tuple[Work, Work]:
    """Return what encodes ``values``, and what decodes them. ``dtype``: of selected values."""
    if quantiser is not None:
        out = torch.empty(BLOCKS * quantiser.record_bytes(SIZE), dtype=torch.uint8, device=values.device)
        return (
            lambda: quantiser.encode(values, SIZE, Draws(0), out),
            lambda: quantiser.decode_sum([out], [Draws(0)], SIZE, 1.0, values),
        )
    codec, selected = value_codec(name, dtype), values.to(dtype)
    out = torch.empty(codec.size(values.numel()), dtype=torch.uint8, device=values.device)
    return lambda: codec.encode(selected, out), lambda: codec.decode(out, values.numel(), dtype)


# What is measured in one coding, as it would be in another one.


def in_coding(
    measured: Measurements, load: Elements, now: Coding, other: Coding, workers: int, *, quantises: bool
) -> Measurements:
    """Return measurements made in the coding ``now`` as they would be in ``other``.

    An exchange takes as long as one of as many bytes took, plus the difference in decoding. Selections are encoded with
    their message, and those of all ranks are decoded. Of quantised tensors a rank encodes its own, where others select,
    and a share of their mean; it decodes as many elements as it has.

    ``load``: (n,), of :func:`agmerge.planning.measuring.profile` for the other coding. ``quantises``: these are
    quantisers, else value codecs.
    """
    encode, decode = other.encode - now.encode, other.decode - now.decode
    sparsify, message = measured.sparsify, measured.message
    if quantises:
        reading, sparsify = decode + encode / workers, tilted(sparsify, encode)
    else:
        reading, message = workers * decode, tilted(message, encode)
    factor, exchange = now.size / other.size, measured.exchange
    points = {
        round(elements * factor): took for elements, took in zip(exchange.elements, exchange.seconds, strict=True)
    }
    profile = merging.Profile(**{**measured.profile.plain(), "load": load})
    stretched = tilted(Curve(tuple(points), tuple(points.values())), reading)
    assert stretched is not None
    return replace(measured, profile=profile, sparsify=sparsify, exchange=stretched, message=message)


def tilted(curve: Curve | None, slope: float) -> Curve | None:
    """Return the curve with ``slope`` seconds more for each element; it still does not fall, nor below 0."""
    if curve is None or slope == 0.0:
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
