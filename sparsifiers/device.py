"""The k largest magnitudes of a vector on a device, exactly, without waiting for the device.

Shapes depend on n and k alone and no value is read by the host, so the call only queues work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.magnitude import bit_view, magnitude_mask


def largest_magnitudes_on_device(vector: Tensor, k: int) -> Tensor:
    """Indices of the k largest magnitudes, int32[k], ascending; of equals the lowest index, NaN largest.

    vector: floats [n] on any device, not changed; 1 <= k <= n < 2**31. `torch.topk` gives the k-th largest
    key, but not which of its equals it takes. So the taken are counted from the left, all that are larger
    plus the first few that are equal, and the j-th index is where that count first reaches j.
    """
    keys = bit_view(vector) & magnitude_mask(vector.dtype)
    smallest = keys.topk(k, sorted=False).values.amin()
    larger = keys > smallest
    vacant = (k - larger.sum()).to(torch.int32)
    equal = (keys == smallest).cumsum(0, dtype=torch.int32)
    taken = larger.cumsum(0, dtype=torch.int32) + torch.minimum(equal, vacant)
    ranks = torch.arange(1, k + 1, dtype=torch.int32, device=vector.device)
    return torch.searchsorted(taken, ranks, out_int32=True)
