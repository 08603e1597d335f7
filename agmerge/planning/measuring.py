"""Put together what plans are made from: the tensors with their times and loads, and what all ranks have measured."""

from __future__ import annotations

import math

import numpy as np
import torch

import merging
from agmerge.backends.handshake import gather_bytes
from agmerge.exchanges.message.format import slot_bytes
from agmerge.metrics.step_times import Seconds
from agmerge.planning.cost_probe import MeasuredCosts
from agmerge.step.importance import Energies
from agmerge.step.merge_buffers import MergeBuffers
from merging import Measurements


def gather_seconds(buffers: MergeBuffers, *columns: Seconds) -> list[Seconds]:
    """Collective. Return every rank's ``columns``, float64 of shape (k,): one array (W, k) for each of them.

    Every rank hands in as many numbers, seconds or others that are compared between ranks.
    """
    data = np.concatenate(columns).astype(np.float64).tobytes()
    rows = np.array([np.frombuffer(row) for row in gather_bytes(buffers.comm, data, "times", buffers.config.timeout)])
    return np.split(rows, np.cumsum([len(column) for column in columns])[:-1], axis=1)


def measurements(buffers: MergeBuffers, step: int, ready: Seconds, costs: MeasuredCosts) -> Measurements:
    """Collective. Return all that planning needs; the same on every rank but for rounding: rank 0's counts.

    Args:
        step: the one to come.
        ready: when each tensor is ready, on the slowest rank, in seconds since the first; (n,), in the plan's order.
        costs: what selection and exchanges take.
    """
    config = buffers.config
    return Measurements(
        profile=profile(buffers, ready, step, residual_energy(buffers)),
        **costs._asdict(),
        modes=config.modes,
        workers=buffers.comm.size,
        facts=(
            ("backend", buffers.comm.name),
            ("compressor", repr(config.compressor)),
            ("step", str(step)),
            ("torch", torch.__version__),
        ),
    )


def residual_energy(buffers: MergeBuffers) -> Energies | None:
    """Collective. Return the squared L2 norm of each tensor's residual, (n,), the mean over ranks: its noise.

    None where nothing is kept, or a residual is not finite.
    """
    residuals: dict[str, torch.Tensor] = {}
    if buffers.config.compressor.selects:
        residuals = {name: tensor for (kind, name), tensor in buffers.state().items() if kind == "residual"}
    norms = [
        float(torch.linalg.vector_norm(residuals[slot.name])) if slot.name in residuals else 0.0
        for slot in buffers.layout.slots
    ]
    mean = gather_seconds(buffers, np.square(norms))[0].mean(axis=0)
    return mean if np.isfinite(mean).all() and mean.any() else None


def profile(buffers: MergeBuffers, ready: Seconds, step: int, noise: Energies | None = None) -> merging.Profile:
    """Return the tensors that take part as planners see them.

    A load is in selected elements, index and value as they are sent; an element that is sent whole has no index, and
    counts by its bytes.

    Args:
        ready: when each tensor is ready, in seconds since the first, never falling; (n,).
        step: whose density counts.
        noise: energy that selection leaves behind, (n,); None: not known.
    """
    names, numel, work, load = [], [], [], []
    selects = any(lane.sparse for lane in buffers.arenas)
    unit = _bytes_of_selected_element(buffers, step) if selects else 0.0
    for slot in buffers.layout.slots:
        sparse = slot.lane.sparse and selects
        names.append(slot.name)
        numel.append(slot.numel)
        work.append(slot.numel if sparse else 0)
        whole = math.ceil(slot.numel * slot.lane.dtype.itemsize / unit) if selects else slot.numel
        load.append(min(buffers.tensor_budget(slot, step), slot.numel) if sparse else whole)
    return merging.Profile(names, numel, np.diff(ready, prepend=0.0), work=work, load=load, noise=noise)


def _bytes_of_selected_element(buffers: MergeBuffers, step: int) -> float:
    """Return what a selected element of the largest sparse lane takes in a message, index and value, about."""
    lane, length = max(
        ((lane, length) for lane, length in buffers.layout.lengths.items() if lane.sparse), key=lambda pair: pair[1]
    )
    count = sum(buffers.tensor_budget(slot, step) for slot in buffers.layout.slots if slot.lane == lane)
    return slot_bytes(length, min(count, length), lane.dtype, buffers.config.wire)
