# SPDX-License-Identifier: Apache-2.0
"""ADTopk: each row of each tensor sends in turn, beside the largest of all.

Ming, Hu, Zhou, Zheng and Feng, "ADTopk: All-Dimension Top-k Compression for High-Performance Data-Parallel DNN
Training", HPDC'24. Global top-k leaves whole rows (output channels, neurons) without an update for many steps;
rows alone keep far less of the gradient. From the paper: rows as dimensions, the longer axis as the searched
one, interleaving, reuse of the threshold. Ours: exactly k in all, dealt to the rows in turn (`rows.deal`), the
reuse rule (`estimated.reuse_threshold`), and floor-and-fill.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sparsifiers import estimated, gpu
from sparsifiers.base import Request, Selection, Sparsifier
from sparsifiers.estimated import Keyed, padded
from sparsifiers.largest import bit_view, later_or_now, magnitude_mask, scratch_of, select_largest_on_device
from sparsifiers.rows import matrices
from sparsifiers.rows_search import (
    largest_in_rows,
    largest_in_rows_on_device,
    maxima_and_largest,
    maxima_and_largest_on_device,
)


class AdTopKRow(Sparsifier):
    """Sparsifier of the largest of each row, as many of each row as of any other.

    count is always k. Each tensor of the vector sends its share of k, rounded up or down, and its rows are dealt
    these in turn: so rows too many for k are served, too. See `rows.deal` for how soon.

    Alone it sends little of a gradient with rows of different scale (8 % of the energy where topk sends 45 %,
    measured with log-normal rows at 1 %): it is the half of `adtopk` that covers, and is there to measure that.
    It needs shapes: without them the vector is one row, and this is topk.
    """

    name = "adtopk-row"
    has_kernels = True

    def _select(self, vector: Tensor, request: Request) -> Selection:
        return _row_wise(vector, request, request.step)

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        return select_rows_on_device(vector, request, request.step)


class AdTopK(Keyed):
    """Sparsifier of the largest of each row at even steps, and the largest of all at odd steps.

    As wide as `adtopk-row`, nearly as deep as topk. Even steps send exactly k. Odd steps
    send 0.8 k to k on the CPU, where the last odd step's threshold is used again if its count fits. That saves
    the search for a new one; cold keys and misfits select exactly. reuse=False selects exactly at every odd
    step: for comparisons, or where counts must not vary. On a device odd steps are always exact, because
    whether a threshold fits could only be known by waiting for the count.

    step alone decides the phase, so ranks agree without a message. Rows take turns by even steps (step // 2): if
    they took turns by step, one with two rows and k = 1 would serve the same row at every even step.
    """

    name = "adtopk"
    has_kernels = True

    def __init__(self, density: float = 0.01, reuse: bool = True) -> None:
        super().__init__(density)
        if not isinstance(reuse, bool):
            raise TypeError(f"{self.name}: reuse must be True or False, got {reuse!r}")
        self.reuse = reuse

    def _select(self, vector: Tensor, request: Request) -> Selection:
        if request.step % 2 == 0:
            return _row_wise(vector, request, request.step // 2)
        known = self._recall(request.key, vector.numel()) if self.reuse else None
        reused = estimated.reuse_threshold(vector, request.k, known[0] if known else None)
        if self.reuse and reused.threshold is not None:
            self._keep(request.key, vector.numel(), reused.threshold)
        return padded(reused.indices, request.k)

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        if request.step % 2 == 0:
            return select_rows_on_device(vector, request, request.step // 2)
        return select_largest_on_device(vector, request)

    def options(self) -> dict[str, object]:
        return {"reuse": self.reuse}


class AdTopKFill(Sparsifier):
    """Sparsifier of the largest element of every row, filled up with the largest of all the others.

    Ours. count is always k. Tensors of fewer than two dimensions have no floor. Where there are more rows than
    k, k of them send their largest in turn: every row sends once in ceil(rows / k) steps, and there is nothing to
    fill up with; so choose a density above rows / n.

    As wide as `adtopk-row` at every step and nearly as deep as topk, for two passes over the vector at every step:
    43 % of the energy, where topk keeps 45 % and rows alone 8 %, measured with log-normal rows at 1 %. It
    has no phases and no state: prefer it to `adtopk` where selection time does not matter.
    """

    name = "adtopk-fill"

    def _select(self, vector: Tensor, request: Request) -> Selection:
        forced = [matrix for matrix in matrices(request.shapes) if matrix.structured]
        bits, mask = bit_view(vector).numpy(), magnitude_mask(vector.dtype)
        indices = maxima_and_largest(bits, mask, request.k, request.step, forced)
        return Selection(torch.from_numpy(indices), request.k)

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        forced = [matrix for matrix in matrices(request.shapes) if matrix.structured]
        if not forced:
            return select_largest_on_device(vector, request)
        return Selection(maxima_and_largest_on_device(vector, request.k, request.step, forced), request.k)


def _row_wise(vector: Tensor, request: Request, turn: int) -> Selection:
    bits, mask = bit_view(vector).numpy(), magnitude_mask(vector.dtype)
    return Selection(torch.from_numpy(largest_in_rows(bits, mask, request.k, turn, request.shapes)), request.k)


def select_rows_on_device(vector: Tensor, request: Request, turn: int) -> Selection:
    """Return the largest of each row, k in all, as `rows.deal` deals them; nothing waits for the device."""
    if not gpu.has_kernels(vector):
        return Selection(largest_in_rows_on_device(vector, request.k, turn, request.shapes), request.k)
    scratch = scratch_of(vector, request)
    rows = scratch.row_table(request.shapes)
    return later_or_now(vector, request, partial(gpu.select_rows, vector, rows, request.k, turn, scratch))
