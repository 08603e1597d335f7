# SPDX-License-Identifier: Apache-2.0
"""Input of planners: the tensors with their times and loads, and the costs that all ranks have measured."""

from __future__ import annotations

import math

import numpy as np
import torch

import merging
from agmerge.backends.handshake import gather_bytes
from agmerge.exchanges.low_rank.exchange import WIRES
from agmerge.exchanges.message.format import slot_bytes
from agmerge.metrics.step_times import Seconds
from agmerge.planning.cost_probe import MeasuredCosts, measured_class
from agmerge.step.importance import Energies
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Slot, TensorClass
from merging import Measurements
from sparsifiers import Compressor, Kind, Quantiser
from sparsifiers.quantising.blocks import block_size, blocks_in

LOW_RANK, BY_NAME = "low rank", "by name"  # a fact of measurements, and its value where tensors have different ranks


def gather_seconds(buffers: MergeBuffers, *columns: Seconds) -> list[Seconds]:
    """Collective. Return every rank's ``columns``, float64 of shape (k,): one array (W, k) for each of them.

    Every rank passes as many numbers, seconds or others that are compared between ranks.
    """
    data = np.concatenate(columns).astype(np.float64).tobytes()
    rows = np.array(
        [np.frombuffer(row) for row in gather_bytes(buffers.comm, data, "times", buffers.config.guards.timeout)]
    )
    return np.split(rows, np.cumsum([len(column) for column in columns])[:-1], axis=1)


def number_of_rank_0(buffers: MergeBuffers, number: int) -> int:
    """Collective. Return rank 0's ``number`` on every rank."""
    cell = torch.tensor([int(number)], dtype=torch.int64)
    buffers.comm.broadcast(cell, 0, "finding").wait(buffers.config.guards.timeout)
    return int(cell)


def measurements(buffers: MergeBuffers, step: int, ready: Seconds, costs: MeasuredCosts) -> Measurements:
    """Collective. Return all that planning needs; the same on every rank but for rounding: rank 0's counts.

    Args:

        step: the one to come.
        ready: when each tensor is ready, on the slowest rank, in seconds since the first; (n,), in the plan's order.
        costs: of selection and exchanges.
    """
    config = buffers.config
    return Measurements(
        profile=profile(buffers, ready, step, residual_energy(buffers)),
        **costs._asdict(),
        modes=config.modes,
        workers=buffers.comm.size,
        facts=(
            ("backend", buffers.comm.name),
            ("compressor", repr(config.compression.compressor)),
            *_low_rank_facts(config.compression.compressor),
            ("step", str(step)),
            ("torch", torch.__version__),
        ),
    )


def _low_rank_facts(compressor: Compressor) -> tuple[tuple[str, str], ...]:
    """Return the rank of all factors as a fact, or that it differs from tensor to tensor; empty where none are sent."""
    low_rank = compressor.part(Kind.LOW_RANK)
    if low_rank is None or low_rank.rank is None:
        return ()
    alike = compressor is low_rank and isinstance(low_rank.rank, int)
    return ((LOW_RANK, str(low_rank.rank) if alike else BY_NAME),)


def residual_energy(buffers: MergeBuffers) -> Energies | None:
    """Collective. Return the squared L2 norm of each tensor's residual, (n,), the mean over ranks: its noise.

    None where there are no residuals, or one is not finite.
    """
    residuals: dict[str, torch.Tensor] = {}
    if buffers.config.compression.compressor.compresses:
        residuals = {name: tensor for (kind, name), tensor in buffers.flat.state().items() if kind == "residual"}
    norms = [
        float(torch.linalg.vector_norm(residuals[slot.name])) if slot.name in residuals else 0.0
        for slot in buffers.layout.slots
    ]
    mean = gather_seconds(buffers, np.square(norms))[0].mean(axis=0)
    return mean if np.isfinite(mean).all() and mean.any() else None


def profile(
    buffers: MergeBuffers,
    ready: Seconds,
    step: int,
    noise: Energies | None = None,
    codec: str | None = None,
    quantiser: Quantiser | None = None,
) -> merging.Profile:
    """Return the tensors that take part as planners see them.

    A load is in elements of the timed class: selected ones with index and value as they are sent, or those of factors.
    Other tensors count by their bytes.

    Args:

        buffers: the merge buffers in use.
        ready: when each tensor is ready, in seconds since the first, never falling; (n,).
        step: its density counts.
        noise: energy that selection leaves behind, (n,); None: not known.
        codec: of selected values; None: the one in use.
        quantiser: of quantised tensors; None: the one in use.
    """
    codec = buffers.wire if codec is None else codec
    names, numel, work, load = [], [], [], []
    timed = measured_class(buffers.layout)
    unit = bytes_of_element(buffers, timed, step, codec, quantiser) if timed.kind is not Kind.DENSE else 0.0
    for slot in buffers.layout.slots:
        names.append(slot.name)
        numel.append(slot.numel)
        work.append(slot.numel if slot.tensor_class.kind is not Kind.DENSE else 0)
        sent = _elements_sent(buffers, slot, step)
        same = not unit or (slot.tensor_class.kind is timed.kind and slot.tensor_class.dtype == timed.dtype)
        size = 0.0 if same else bytes_of_element(buffers, slot.tensor_class, step, codec, quantiser)
        load.append(sent if same else math.ceil(sent * size / unit))
    return merging.Profile(names, numel, np.diff(ready, prepend=0.0), work=work, load=load, noise=noise)


def _elements_sent(buffers: MergeBuffers, slot: Slot, step: int) -> int:
    """Return how many elements a step sends of a tensor: selected ones, those of its factors, or all of them."""
    if slot.tensor_class.sparse:
        return min(buffers.budgets.of_tensor(slot, step), slot.numel)
    if slot.tensor_class.kind is Kind.LOW_RANK and buffers.flat.bases is not None:
        return buffers.flat.bases.elements(slot)
    return slot.numel


def bytes_of_element(
    buffers: MergeBuffers, tensor_class: TensorClass, step: int, codec: str, quantiser: Quantiser | None = None
) -> float:
    """Return the bytes of a sent element in a message, about: with its index, where it was selected.

    ``quantiser``: of quantised tensors; None: the one in use.
    """
    quantiser = buffers.quantiser if quantiser is None else quantiser
    if tensor_class.kind is Kind.QUANTISED and quantiser is not None:
        return bytes_of_quantised(buffers, tensor_class, quantiser)
    if not tensor_class.sparse:
        dtype = WIRES.get(codec) if tensor_class.kind is Kind.LOW_RANK else None
        return (dtype or tensor_class.dtype).itemsize
    length = buffers.layout.lengths[tensor_class]
    count = sum(
        buffers.budgets.of_tensor(slot, step) for slot in buffers.layout.slots if slot.tensor_class == tensor_class
    )
    return slot_bytes(length, min(count, length), tensor_class.dtype, codec)


def bytes_of_quantised(buffers: MergeBuffers, tensor_class: TensorClass, quantiser: Quantiser) -> float:
    """Return the bytes of an element of a tensor class in a message of this quantiser, scales included."""
    slots = [slot for slot in buffers.layout.slots if slot.tensor_class == tensor_class]
    sizes = [(slot.numel, block_size(slot.shape)) for slot in slots]
    taken = sum(blocks_in(numel, size) * quantiser.record_bytes(size) for numel, size in sizes)
    return taken / max(1, sum(numel for numel, _ in sizes))
