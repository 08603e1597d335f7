# SPDX-License-Identifier: Apache-2.0
"""Find the k largest magnitudes of a vector on a device, without waiting for the device.

Shapes depend on n and k alone and no value is read by the host, so a call only queues work. The k-th largest
key comes from `torch.topk`, exactly, or from `bracket`: halving an interval of keys, one counting pass each,
which costs the same for every k and gains from an estimate of where the k-th key lies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.exact_topk import bit_view, magnitude_mask

ITERATIONS = 18  # of the 31 that fp32 needs: an interval of 2**13 keys is left, 0.1 % in magnitude


def keys_of(vector: Tensor) -> Tensor:
    """Return the magnitudes of floats [n] as integers [n] of the same width; see `exact_topk.bit_view`."""
    return bit_view(vector) & magnitude_mask(vector.dtype)


def largest_magnitudes_on_device(vector: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest magnitudes, int32[k], ascending; of equals the lowest index, NaN largest.

    vector: floats [n] on any device, not changed; 1 <= k <= n < 2**31.
    """
    keys = keys_of(vector)
    smallest = keys.topk(k, sorted=False).values.amin()
    return take(keys, smallest - 1, smallest, k)[0]


def bracket(
    keys: Tensor,
    k: int,
    dtype: torch.dtype,
    *,
    start: Tensor | None = None,
    floor: Tensor | None = None,
    iterations: int = ITERATIONS,
) -> tuple[Tensor, Tensor]:
    """Return an interval of keys (low, high] that holds the k-th largest, as 0-dim int64 tensors.

    keys: int[n], the keys of floats of `dtype`. start: a guess of the k-th key, 0-dim, or None. floor: only keys
    above it, 0-dim, are of interest; None: all. iterations: halvings, one counting pass over the keys each.

    Fewer than k keys exceed high; at least k exceed low unless low is the floor: where fewer than k exceed that, low
    and high meet at it. Two probes a quarter of an octave to either side of `start` come first. They are ordinary steps
    of the bisection, so each narrows the interval whether the guess was right or not, and after a right one 18 steps
    leave 2e-6 in magnitude.
    """
    low = torch.full((), -1, dtype=torch.int64, device=keys.device) if floor is None else floor.to(torch.int64)
    high = torch.full((), magnitude_mask(dtype), dtype=torch.int64, device=keys.device)
    spread = int(0.25 / torch.finfo(dtype).eps)
    for turn in range(iterations if start is None else iterations + 2):
        if start is not None and turn < 2:
            probe = start.to(torch.int64) + (-spread, spread)[turn]
        else:
            probe = (low >> 1) + (high >> 1) + (low & high & 1)  # the sum itself would overflow for fp64
        probe = torch.minimum(torch.maximum(probe, low), high)
        enough = torch.count_nonzero(keys > probe) >= k
        low, high = torch.where(enough, probe, low), torch.where(enough, high, probe)
    return low, high


def take(keys: Tensor, low: Tensor, high: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Take the keys above `high` and, up to k in all, those in (low, high] of lowest index.

    keys: int[n], of which at most k exceed high; low, high: 0-dim. Returns the indices int32[k], ascending, and how
    many of them count, 0-dim int32; later slots hold index n - 1. The taken are counted from the left, and the j-th
    index is where that count first reaches j: a compaction of a shape that is known beforehand.
    """
    larger = keys > high
    vacant = (k - torch.count_nonzero(larger)).to(torch.int32)
    equal = ((keys > low) & ~larger).cumsum(0, dtype=torch.int32)
    taken = larger.cumsum(0, dtype=torch.int32) + torch.minimum(equal, vacant)
    ranks = torch.arange(1, k + 1, dtype=torch.int32, device=keys.device)
    indices = torch.searchsorted(taken, ranks, out_int32=True)
    return indices.clamp_(max=len(keys) - 1), taken[-1].clone()
