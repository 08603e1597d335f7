"""Select the largest of a vector on a device: in kernels where it has them, else in torch's operations."""

from __future__ import annotations

from torch import Tensor

from sparsifiers import gpu
from sparsifiers.base import Selection
from sparsifiers.device import largest_magnitudes_on_device


def select_largest_on_device(vector: Tensor, k: int) -> Selection:
    """Return the k largest magnitudes of floats [n], 1 <= k <= n, ascending; of equals the lowest index, NaN largest.

    Nothing waits for the device.
    """
    if gpu.has_kernels(vector):
        return select_in_kernels(vector, k, exact=True)
    return Selection(largest_magnitudes_on_device(vector, k), k)


def select_in_kernels(vector: Tensor, k: int, *, exact: bool) -> Selection:
    """Return k of the largest magnitudes of fp32 [n], 1 <= k <= n, ascending, with their values; nothing waits.

    exact: the k largest. Else all that are larger than the k-th by an eighth of an octave, and of those as large as it
    within that the first: for methods that estimate where the k-th lies, which a histogram tells in one pass.
    """
    slots = gpu.Slots.of(k, vector.device)
    scratch = gpu.Scratch.of(vector.numel(), vector.device)
    gpu.select_largest(vector, k, slots, scratch, exact=exact, counted=False, zeros=True, commit=False)
    return Selection(slots.indices, k, slots.values)
