# SPDX-License-Identifier: Apache-2.0
"""Deep gradient compression: the threshold of a sample, corrected by the number of elements above it."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import gpu
from sparsifiers.base import Request, Selection, Sparsifier
from sparsifiers.estimated import LEAST, key_floor, number, padded, strided
from sparsifiers.largest import (
    INTEGERS,
    bit_view,
    bracket,
    keys_of,
    largest_magnitudes,
    magnitude_mask,
    scan,
    select_in_kernels,
    select_largest_on_host,
    take,
)

REACHED = 32  # sampled elements among the k largest, at least; the authors' code has 2
TURNS, LOWER, RAISE, BAND = 10, 0.8, 1.3, (0.8, 1.3)  # the authors' factor loop; the band is in parts of k


def sample_rank(sampled: int, density: float, margin: bool) -> int:
    """Return which of `sampled` elements, counted from the largest, is the threshold, in [1, sampled].

    density: k / n; margin: go low enough that the k largest reach it, but for 3 calls in 100,000. The paper's rank is
    p = sampled * density. The sample holds about p of the k largest, with a standard deviation below sqrt(p); the
    margin is four of these.
    """
    expected = sampled * density
    return min(sampled, math.ceil(expected + 4 * math.sqrt(expected) + 1 if margin else expected))


def ranked(keys: Tensor, rank: int) -> Tensor:
    """Return the rank-th largest of `keys`, int[m] on any device, 0-dim; 1 <= rank <= m."""
    if keys.device.type == "cpu":  # several times as fast as torch.topk there
        place = len(keys) - rank
        return torch.tensor(int(np.partition(keys.numpy(), place)[place]))
    return keys.topk(rank, sorted=False).values.amin()


class DGC(Sparsifier):
    """Sparsifier of the k largest coordinates, found through the threshold of a small sample.

    Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression", ICLR 2018, section 5: sample
    0.1 to 1 % of the elements, take the sample's top-k threshold, then select hierarchically, top-k among the
    candidates, where there are too many. Momentum correction, masking and clipping belong to the
    memory `dgc`, the warm-up to the training loop.

    mode "exact" (the default): the sample's rank has a margin, so that the candidates hold the k largest; the
    exact top-k among them is sent, count is k, and an unlucky sample costs a second pass only.
    mode "paper": the threshold without a margin, multiplied by 0.8 or 1.3 at most ten times while the count
    is outside [0.8, 1.3] k, then cut to the k largest. A threshold of zero is left at once, all non-zeros
    being candidates. It is there for comparisons: dearer, and no better.

    sample_ratio: fraction of the vector to sample, in (0, 1]; at least 32 of the k largest are expected in it.
    """

    name = "dgc"
    memory = "dgc"

    def __init__(self, density: float = 0.01, sample_ratio: float = 0.01, mode: str = "exact") -> None:
        super().__init__(density)
        self.sample_ratio, self.mode = number("dgc", "sample_ratio", sample_ratio), mode
        if not 0.0 < self.sample_ratio <= 1.0:
            raise ValueError(f"dgc: sample_ratio must be in (0, 1], got {sample_ratio!r}. The authors use 0.01.")
        if mode not in ("exact", "paper"):
            raise ValueError(f"dgc: mode must be 'exact' or 'paper', got {mode!r}")
        self.has_kernels = self.takes_candidates = mode == "exact"

    def options(self) -> dict[str, object]:
        return {"sample_ratio": self.sample_ratio, "mode": self.mode}

    def _threshold(self, vector: Tensor, request: Request) -> Tensor:
        """Return the key of the sample's threshold, 0-dim, on the device of the vector."""
        k, n = request.k, vector.numel()
        size = max(math.ceil(self.sample_ratio * n), math.ceil(REACHED * n / k))
        sample = keys_of(strided(vector, size, request))
        return ranked(sample, sample_rank(len(sample), k / n, margin=self.mode == "exact"))

    def _select(self, vector: Tensor, request: Request) -> Selection:
        k = request.k
        if self.mode == "paper":
            return padded(_factor_loop(vector, self._threshold(vector, request), k), k)
        bits, mask = bit_view(vector).numpy(), magnitude_mask(vector.dtype)

        def search() -> NDArray[np.int32]:
            indices = scan(bits, mask, k, int(self._threshold(vector, request)) - 1)
            return indices if len(indices) == k else largest_magnitudes(bits, mask, k)

        return select_largest_on_host(vector, request, search)

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        """Select on any device; no value is read by the host. count is a tensor in mode "paper", else k."""
        if self.has_kernels and gpu.has_kernels(vector):
            return select_in_kernels(vector, request, exact=True)
        keys, dtype, k = keys_of(vector), vector.dtype, request.k
        key = self._threshold(vector, request)
        if self.mode == "exact":
            every = magnitude_mask(dtype).bit_length()  # halvings that leave a single key
            return Selection(take(keys, *bracket(keys, k, dtype, start=key, iterations=every), k)[0], k)
        tau = _magnitude(key, dtype)
        for _ in range(TURNS):
            count = torch.count_nonzero(keys > key_floor(tau, dtype))
            factor = torch.where(count < BAND[0] * k, LOWER, torch.where(count > BAND[1] * k, RAISE, 1.0))
            tau = factor * tau
        floor = key_floor(tau, dtype)
        floor = torch.where(torch.count_nonzero(keys > floor) < LEAST * k, torch.zeros_like(floor), floor)
        return Selection(*take(keys, *bracket(keys, k, dtype, floor=floor), k))


def _factor_loop(vector: Tensor, key: Tensor, k: int) -> NDArray[np.int32]:
    """Return the selection of the authors' loop, from the threshold with this key on: int32[at most k], ascending."""
    bits, mask, dtype = bit_view(vector).numpy(), magnitude_mask(vector.dtype), vector.dtype
    tau, most = _magnitude(key, dtype), math.floor(BAND[1] * k)
    count = floor = 0
    for _ in range(TURNS + 1):
        floor = int(key_floor(tau, dtype))
        count = len(scan(bits, mask, min(len(bits), most + 1), floor))
        if count > most:
            tau = RAISE * tau
        elif count < BAND[0] * k and floor > 0:
            tau = LOWER * tau
        else:
            break
    return scan(bits, mask, k, 0 if count < LEAST * k else floor)


def _magnitude(key: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the magnitude that has this key, 0-dim fp64; inf for a NaN's."""
    return key.to(INTEGERS[dtype]).view(dtype).double().nan_to_num(nan=torch.inf)
