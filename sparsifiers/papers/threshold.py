# SPDX-License-Identifier: Apache-2.0
"""Select by a fixed threshold, or by one that follows k by its last count."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsifiers import gpu
from sparsifiers.base import Request, Selection
from sparsifiers.estimated import Keyed, key_floor, number, padded, reuse_threshold
from sparsifiers.largest import (
    bit_view,
    bracket,
    key_from,
    keys_of,
    magnitude_mask,
    scan,
    select_in_kernels,
    take,
)


class Threshold(Keyed):
    """Sparsifier of the coordinates of magnitude tau or more, at most k of them.

    With tau, a fixed threshold (Strom, "Scalable distributed DNN training using commodity GPU cloud
    computing", Interspeech 2015): nothing below tau is sent, more than k are cut to the k largest, and
    nothing at all may be sent. It must suit the scale of the gradients, which changes during training: too
    low a tau is topk, too high a one sends nothing and delays everything.

    Without tau (the default), tau follows k, per key (`estimated.reuse_threshold`): while the last one lets 0.8 k
    to 1.25 k elements through it is used again, cut to k and nudged; outside that band the exact k are
    selected in the same call and the smallest of them is the next threshold. A steady gradient costs one pass
    and no sample: the cheapest method that keeps to k. On a device the last threshold starts a bisection,
    and count is k.

    tau: None, or a finite number above 0.
    """

    name = "threshold"

    def __init__(self, density: float = 0.01, tau: float | None = None) -> None:
        super().__init__(density)
        self.tau = None if tau is None else number("threshold", "tau", tau)
        if self.tau is not None and not 0.0 < self.tau < math.inf:
            raise ValueError(f"threshold: tau must be finite and above 0, or None to follow k, got {tau!r}")
        self.has_kernels = self.tau is None

    def options(self) -> dict[str, object]:
        return {"tau": self.tau}

    def _select(self, vector: Tensor, request: Request) -> Selection:
        if self.tau is not None:
            bits, floor = bit_view(vector).numpy(), key_from(self.tau, vector.dtype) - 1
            return padded(scan(bits, magnitude_mask(vector.dtype), request.k, floor), request.k)
        kept = self._recall(request.key, vector.numel())
        reused = reuse_threshold(vector, request.k, None if kept is None else float(kept[0]))
        if reused.threshold is not None:
            self._keep(request.key, vector.numel(), reused.threshold)
        return padded(reused.indices, request.k)

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        """Select on any device; no value is read by the host. count is a tensor where tau is given, else k."""
        k, n, dtype = request.k, vector.numel(), vector.dtype
        if self.has_kernels and gpu.has_kernels(vector):
            return select_in_kernels(vector, request, exact=False)
        keys = keys_of(vector)
        if self.tau is not None:
            floor = key_floor(_on_device(self.tau, vector.device), dtype)
            return Selection(*take(keys, *bracket(keys, k, dtype, floor=floor), k))
        kept = self._recall(request.key, n)
        start = None if kept is None else key_floor(_on_device(kept[0], vector.device), dtype)
        low, high = bracket(keys, k, dtype, start=start)
        self._keep(request.key, n, (low + 1).to(keys.dtype).view(dtype).double().nan_to_num(nan=torch.inf))
        return Selection(take(keys, low, high, k)[0], k)


def _on_device(tau: float | Tensor, device: torch.device) -> Tensor:
    """Return a threshold, from the host or from a device, as 0-dim fp64 on this device."""
    if isinstance(tau, Tensor):
        return tau.to(device)
    return torch.full((), tau, dtype=torch.float64, device=device)
