# SPDX-License-Identifier: Apache-2.0
"""Write a bitmap of the largest of each row of a segment's tensors, as many as each row is dealt."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.gpu.bits import bits_of, pack_bits
from sparsifiers.gpu.choice import runs_triton
from sparsifiers.gpu.digits import MASK
from sparsifiers.gpu.layout import IndexSection
from sparsifiers.gpu.row_table import RowTable
from sparsifiers.gpu.scratch import Scratch
from sparsifiers.rows import deal, table, top


def mark_rows(
    work: Tensor,
    rows: RowTable,
    k: int,
    turn: int,
    scratch: Scratch,
    section: IndexSection | None = None,
) -> None:
    """Set in `scratch.above` the bits of the largest of each row of `work`, fp32[n], k in all; of equals the first.

    k, turn: see `sparsifiers.rows.deal`. section: see `mark`. Ties are not used: `gather` gets ties=False.
    Two launches, one of which clears the marks, a third for a section, and one copy of 12 bytes a tensor; reads a row
    five times (with Triton before 3.8 eight times), and the device once or, where a panel of eight rows does not stay
    in its cache, each time: 4 to 20 bytes an element, or to 32.
    """
    scratch.clear()
    if section is not None:
        section.words.zero_()
    if runs_triton(work):
        from sparsifiers.gpu.kernels import rows as kernel

        kernel.run(work, rows, rows.shares(k, turn), scratch)
    else:
        reference(work, rows, k, turn, scratch)


def reference(work: Tensor, rows: RowTable, k: int, turn: int, scratch: Scratch) -> None:
    """Set the bits of the largest of rows with torch's operations, for :func:`mark_rows`."""
    keys = work.view(torch.int32) & MASK
    taken = torch.zeros_like(keys, dtype=torch.bool)
    for share in deal(rows.tensors, k, turn):
        if share.count:
            each, more = divmod(share.count, share.matrix.rows)
            turned = (torch.arange(share.matrix.rows, device=keys.device) - share.start) % share.matrix.rows
            quotas = (turned < more) + each
            table(taken, share.matrix)[:] = top(table(keys, share.matrix), quotas, each + (more > 0))
    pack_bits(taken, scratch.above)
    scratch.counts[:, 0] = bits_of(scratch.above).view(scratch.tiles, -1).sum(1)
