# SPDX-License-Identifier: Apache-2.0
"""Select by an estimated threshold: a sample to fit, a count that decides, exact selection where it fails.

An estimator is a pure function (x, wanted) -> eta on tensors: x float32 [m] >= 0 are sampled magnitudes in units of a
power of two, sorted once so that each count is a binary search; wanted (0-dim) is how many of them should reach the
threshold eta (0-dim). It reads no value on the host and has no shape that depends on data, so the same code serves
all devices. It only starts the search: with any estimate, 0.8 k to k indices are selected.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import gpu
from sparsifiers.arguments import Request
from sparsifiers.base import Selection
from sparsifiers.device import bracket, keys_of, take
from sparsifiers.estimator_sample import Sample, normalised, strided
from sparsifiers.exact_topk import largest_magnitudes, scan
from sparsifiers.largest import select_in_kernels
from sparsifiers.magnitude import INTEGERS, bit_view, magnitude_mask
from sparsifiers.stateful import Keyed
from sparsifiers.threshold_correction import above, reaching

SAMPLES = 1 << 16  # elements, at least
REACHED = 256  # sampled elements above the threshold, at least: their count is then right to 6 %
LEAST = 0.8  # of k: fewer are selected only where there are fewer non-zeros
MOST = 4.0  # of k: carrying more through the scan costs more than selecting exactly


class Estimated(Keyed):
    """Sparsifier of the coordinates that reach an estimated threshold: a subclass writes `_estimate`.

    On the CPU the vector is read once where the sample bears the estimate out; where more than k are found they are
    cut to the k largest, and fewer than `least` of k are replaced by the exact k. On a device the estimate starts a
    bisection for the k-th largest key, and count is always k; with kernels (`sparsifiers.gpu`) a histogram finds it.
    """

    has_kernels = True
    least: float = LEAST  # the smallest fraction of k that is sent, where there are as many non-zeros

    @abstractmethod
    def _estimate(self, sample: Sample, request: Request) -> Tensor:
        """Return eta, 0-dim, in units of the sample; it may recall and keep numbers of request.key."""

    def start(self, vector: Tensor, request: Request) -> tuple[Tensor, Sample]:
        """Return the threshold before any count, fp64 0-dim, and the sample it was fitted to; for inspection too.

        It is 0, which selects all non-zeros, where no more than the wanted elements of the sample are non-zero.
        """
        size = max(SAMPLES, math.ceil(REACHED * vector.numel() / request.k))
        sample = normalised(strided(vector, size, request), request.k / vector.numel())
        eta = self._estimate(sample, request)
        zero = torch.zeros_like(eta)
        eta = torch.where(above(sample.x, zero) <= sample.wanted, zero, eta)
        return eta.double() * sample.unit, sample

    def _select(self, vector: Tensor, request: Request) -> Selection:
        k = request.k
        tau, sample = self.start(vector, request)
        bits, mask, floor = bit_view(vector).numpy(), magnitude_mask(vector.dtype), int(key_floor(tau, vector.dtype))
        enough = False
        if floor == 0 or self._borne_out(tau / sample.unit, sample):
            indices = scan(bits, mask, k, floor)
            # All non-zeros are enough, except for a method that promises k.
            enough = len(indices) >= self.least * k or (floor == 0 and self.least < 1.0)
        return padded(indices if enough else largest_magnitudes(bits, mask, k), k)

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        """Select k on any device, by a histogram or by bisection from the estimate; no value is read by the host."""
        if gpu.has_kernels(vector):
            return select_in_kernels(vector, request, exact=False)
        keys, start = keys_of(vector), key_floor(self.start(vector, request)[0], vector.dtype)
        return Selection(take(keys, *bracket(keys, request.k, vector.dtype, start=start), request.k)[0], request.k)

    def _borne_out(self, eta: Tensor, sample: Sample) -> bool:
        # A threshold that is off in the sample is off in the vector: better not to scan with it at all.
        reached, wanted = int(reaching(sample.x, eta.float())), float(sample.wanted)
        return self.least * wanted <= reached <= MOST * wanted


def key_floor(tau: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the key, 0-dim int64, that exactly the elements of `dtype` with |a| >= tau exceed; at least 0.

    tau: 0-dim fp64, which is rounded up to `dtype`. So zeros are never selected, while NaN and inf always are.
    """
    tau = tau.clamp(min=0.0, max=torch.inf)
    rounded = tau.to(dtype)
    key = rounded.view(INTEGERS[dtype]).to(torch.int64)
    return (key - (rounded.double() >= tau).to(torch.int64)).clamp(min=0)


def padded(indices: NDArray[np.signedinteger[Any]], k: int) -> Selection:
    """Return at most k indices, ascending, as a Selection with k entries; it owns the array if there are k."""
    slots = indices if len(indices) == k else np.zeros(k, dtype=np.int32)
    slots[: len(indices)] = indices
    return Selection(torch.from_numpy(slots), len(indices))


def number(owner: str, option: str, value: object) -> float:
    """Return the value of an option as a Python float. TypeError if it is no number; owner: named in the error."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {option} must be a number, got {value!r}")
    return float(value)
