# SPDX-License-Identifier: Apache-2.0
"""Find the edge of a selection: the leading bits of the k-th largest key, digit by digit, from histograms."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.gpu.bits import bits_of
from sparsifiers.gpu.choice import runs_triton
from sparsifiers.gpu.compensation import histogram_of
from sparsifiers.gpu.digits import DIGITS, MASK
from sparsifiers.gpu.scratch import Scratch


def count_digits(work: Tensor, scratch: Scratch) -> None:
    """Add to the histogram the first digits of the keys of `work`, fp32[n], which `compensate` has not written.

    One launch; reads 4 bytes an element.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels import edge as kernel

        kernel.run_count(work, scratch)
    else:
        count_digits_reference(work, scratch)
    scratch.count()


def count_ties(work: Tensor, level: int, scratch: Scratch) -> None:
    """Add to the histogram the digit `level` of those elements of `work`, fp32[n], that `mark` has found on the edge.

    Of these only where the digits before this one are the edge's. One launch; reads 0.125 bytes an element, and `work`
    where it lies on the edge.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels import edge as kernel

        kernel.run_ties(work, level, scratch)
    else:
        count_ties_reference(work, level, scratch)


def find_edge(k: int, level: int, scratch: Scratch) -> None:
    """Find the digit `level` of the k-th largest key in the histogram, append it to the edge, and clear the histogram.

    Afterwards `edge` holds the digits up to this one, and how many of the elements with these are among the k largest:
    1 or more, since all larger ones are fewer than k. It may be more than there are, where k exceeds the count.
    k: of the first level, where the edge is found anew. One launch; 16 KB.
    """
    if runs_triton(scratch.histogram):
        from sparsifiers.gpu.kernels import edge as kernel

        kernel.run_edge(k, level, scratch)
    else:
        find_edge_reference(k, level, scratch)
    scratch.spend()


def count_digits_reference(work: Tensor, scratch: Scratch) -> None:
    """Count first digits with torch's operations, for :func:`count_digits`."""
    scratch.histogram.add_(histogram_of((work.view(torch.int32) & MASK) >> DIGITS[0].shift))


def count_ties_reference(work: Tensor, level: int, scratch: Scratch) -> None:
    """Count a digit of ties with torch's operations, for :func:`count_ties`."""
    shift, bits = DIGITS[level]
    keys = work.view(torch.int32) & MASK
    counted = (bits_of(scratch.ties)[: len(work)] > 0) & (keys >> shift + bits == scratch.edge[0])
    # Elements that do not count fall behind the last bin.
    bins = len(scratch.histogram)
    digits = torch.where(counted, keys >> shift & (1 << bits) - 1, bins)
    counts = torch.zeros(bins + 1, dtype=torch.int32, device=work.device)
    scratch.histogram.add_(counts.index_add_(0, digits, counted.to(torch.int32))[:-1])


def find_edge_reference(k: int, level: int, scratch: Scratch) -> None:
    """Find a digit of the edge with torch's operations, for :func:`find_edge`."""
    counts = scratch.histogram.long()
    room = scratch.edge[1] if level else torch.full((), k, dtype=torch.int32, device=counts.device)
    from_top = counts.flip(0).cumsum(0).flip(0)  # of this digit or a larger one
    digit = ((from_top >= room).sum() - 1).clamp_(min=0)
    larger = torch.where(torch.arange(len(counts), device=counts.device) > digit, counts, 0).sum()
    prefix = (scratch.edge[0].long() << DIGITS[level].bits) + digit if level else digit
    scratch.edge.copy_(torch.stack([prefix, room - larger, scratch.edge[2] if level else digit]))
    scratch.histogram.zero_()
