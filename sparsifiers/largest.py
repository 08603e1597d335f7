# SPDX-License-Identifier: Apache-2.0
"""Exact selection of the largest, `topk`: on a device in kernels or torch's operations, on the host from candidates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import gpu, kernel
from sparsifiers.base import Request, Selection, Sparsifier
from sparsifiers.candidates import Candidates
from sparsifiers.deferred import Deferred, Select
from sparsifiers.device import largest_magnitudes_on_device
from sparsifiers.exact_topk import bit_view, largest_magnitudes, magnitude_mask
from sparsifiers.rows_host import largest_in_rows_on_device


def select_largest_on_host(vector: Tensor, request: Request, search: Callable[[], NDArray[np.int32]]) -> Selection:
    """Return the k largest magnitudes of floats [n], ascending; of equals the lowest index, NaN largest.

    search: finds their positions by reading the vector; it is not asked where enough was noted when that was written.
    """
    bits, values = bit_view(vector).numpy(), None
    if isinstance(request.scratch, Candidates) and kernel.reads(bits):
        found, values = request.scratch.largest(bits, magnitude_mask(vector.dtype), request.k, search)
    else:
        found = search()
    known = None if values is None else torch.from_numpy(values).view(vector.dtype)
    return Selection(torch.from_numpy(found), request.k, known)


def select_largest_on_device(vector: Tensor, request: Request) -> Selection:
    """Return the k largest magnitudes of floats [n], 1 <= k <= n, ascending; of equals the lowest index, NaN largest.

    Nothing waits for the device.
    """
    if gpu.has_kernels(vector):
        return select_in_kernels(vector, request, exact=True)
    return Selection(largest_magnitudes_on_device(vector, request.k), request.k)


def select_rows_on_device(vector: Tensor, request: Request, turn: int) -> Selection:
    """Return the largest of each row, k in all, as `rows_host.deal` deals them; nothing waits for the device."""
    if not gpu.has_kernels(vector):
        return Selection(largest_in_rows_on_device(vector, request.k, turn, request.shapes), request.k)
    scratch = _scratch(vector, request)
    rows = scratch.row_table(request.shapes)
    return _later_or_now(vector, request, partial(gpu.select_rows, vector, rows, request.k, turn, scratch))


def select_in_kernels(vector: Tensor, request: Request, *, exact: bool) -> Selection:
    """Return k of the largest magnitudes of fp32 [n], 1 <= k <= n, ascending, with their values; nothing waits.

    exact: the k largest. Else all that are larger than the k-th by an eighth of an octave, and of those as large as it
    within that the first: for methods that estimate the k-th, which a histogram finds in one pass.
    """
    scratch = _scratch(vector, request)
    return _later_or_now(vector, request, partial(gpu.select_largest, vector, request.k, scratch, exact=exact))


def _scratch(vector: Tensor, request: Request) -> gpu.Scratch:
    """Return the scratch of the request, or a new one."""
    if request.scratch is None:
        return gpu.Scratch(vector.numel(), vector.device)
    assert isinstance(request.scratch, gpu.Scratch)  # that of the host is not given where a device selects
    return request.scratch


def _later_or_now(vector: Tensor, request: Request, select: Select) -> Selection:
    """Return the selection of `select`, deferred where the request has a scratch: it may then be made in a message."""
    deferred = Deferred(request.k, vector.device, select)
    return deferred if request.scratch is not None else Selection(deferred.indices, deferred.count, deferred.values)


# Top-k: exact selection, the reference that all other sparsifiers approximate.


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
