# SPDX-License-Identifier: Apache-2.0
"""Top-k: exact selection, the reference that all other sparsifiers approximate."""

from __future__ import annotations

from torch import Tensor

from sparsifiers.arguments import Request
from sparsifiers.base import Selection, Sparsifier
from sparsifiers.exact_topk import largest_magnitudes
from sparsifiers.largest import select_largest_on_device, select_largest_on_host
from sparsifiers.magnitude import bit_view, magnitude_mask


class TopK(Sparsifier):
    """Sparsifier of the k coordinates of largest magnitude.

    Of all choices of k coordinates this one has the smallest residual: ||a - sent||^2 <= (1 - k/n) ||a||^2
    (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018). count is always k. Equal
    magnitudes go to the lowest index and NaN counts as larger than inf, on every device, so the selection is
    a function of the vector's bits alone.

    Use it where the selection must be exact. On the CPU, with the compiled loops, it costs little more than
    reading the vector, and so it does on a GPU with Triton, by computation (`sparsifiers.gpu`); on other devices
    `torch.topk` dominates and a threshold estimator is cheaper. A density of 0.01 is the usual start; 0.001 needs a
    warm-up.
    """

    name = "topk"
    has_kernels = True
    takes_candidates = True

    def _select(self, vector: Tensor, request: Request) -> Selection:
        bits, mask = bit_view(vector).numpy(), magnitude_mask(vector.dtype)
        return select_largest_on_host(vector, request, lambda: largest_magnitudes(bits, mask, request.k))

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        return select_largest_on_device(vector, request)
