"""Select the largest of a vector on a device: in kernels where it has them, else in torch's operations."""

from __future__ import annotations

from torch import Tensor

from sparsifiers import gpu
from sparsifiers.base import Selection
from sparsifiers.device import largest_magnitudes_on_device


def select_largest_on_device(vector: Tensor, k: int) -> Selection:
    """Return the k largest magnitudes of floats [n], 1 <= k <= n, ascending; of equals the lowest index, NaN largest.

    Nothing waits for the device. Where it has kernels, the values are those of the selection.
    """
    if not gpu.has_kernels(vector):
        return Selection(largest_magnitudes_on_device(vector, k), k)
    slots = gpu.Slots.of(k, vector.device)
    scratch = gpu.Scratch.of(vector.numel(), vector.device)
    gpu.select_largest(vector, k, slots, scratch, exact=True, counted=False, zeros=True, commit=False)
    return Selection(slots.indices, k, slots.values)
