"""Find the edge of a selection: the leading bits of the k-th largest key, digit by digit, from histograms."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.gpu.choice import runs_triton
from sparsifiers.gpu.compensation import histogram_of
from sparsifiers.gpu.digits import DIGITS, MASK
from sparsifiers.gpu.scratch import Scratch


def count_digits(work: Tensor, level: int, scratch: Scratch) -> None:
    """Add to the histogram the digit `level` of the keys of `work`, fp32[n], whose digits before it are the edge's.

    Level 0 is for vectors that `compensate` has not written: there are no digits before it. One launch; reads 4 bytes
    an element.
    """
    if runs_triton(work):
        from sparsifiers.gpu.kernels import edge as kernel

        kernel.run_count(work, level, scratch)
    else:
        count_digits_reference(work, level, scratch)


def find_edge(k: int, level: int, scratch: Scratch) -> None:
    """Find the digit `level` of the k-th largest key in the histogram, append it to the edge, and clear the histogram.

    Afterwards `edge` holds the digits up to this one, and how many of the elements with these are among the k largest:
    1 or more, since all larger ones are fewer than k. It may be more than there are, where k exceeds what was counted.
    k: of the first level, where the edge is found anew. One launch; 16 KB.
    """
    if runs_triton(scratch.histogram):
        from sparsifiers.gpu.kernels import edge as kernel

        kernel.run_edge(k, level, scratch)
    else:
        find_edge_reference(k, level, scratch)


def count_digits_reference(work: Tensor, level: int, scratch: Scratch) -> None:
    """Do what :func:`count_digits` does with torch's operations."""
    shift, bits = DIGITS[level]
    keys = work.view(torch.int32) & MASK
    digits = keys >> shift & (1 << bits) - 1
    if level:
        # What has other digits before this one falls behind the last bin.
        counted = keys >> shift + bits == scratch.edge[0]
        counts = torch.zeros(len(scratch.histogram) + 1, dtype=torch.int32, device=work.device)
        digits = torch.where(counted, digits, len(scratch.histogram))
        scratch.histogram.add_(counts.index_add_(0, digits, counted.to(torch.int32))[:-1])
    else:
        scratch.histogram.add_(histogram_of(digits))


def find_edge_reference(k: int, level: int, scratch: Scratch) -> None:
    """Do what :func:`find_edge` does with torch's operations."""
    counts = scratch.histogram.long()
    room = scratch.edge[1] if level else torch.full((), k, dtype=torch.int32, device=counts.device)
    from_top = counts.flip(0).cumsum(0).flip(0)  # of this digit or a larger one
    digit = ((from_top >= room).sum() - 1).clamp_(min=0)
    larger = torch.where(torch.arange(len(counts), device=counts.device) > digit, counts, 0).sum()
    prefix = (scratch.edge[0].long() << DIGITS[level].bits) + digit if level else digit
    scratch.edge.copy_(torch.stack([prefix, room - larger]))
    scratch.histogram.zero_()
