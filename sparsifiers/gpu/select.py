# SPDX-License-Identifier: Apache-2.0
"""Select from a vector on a device in few launches, into slots that may lie in a message."""

from __future__ import annotations

from torch import Tensor

from sparsifiers.gpu.compact import gather, mark, settle_ties
from sparsifiers.gpu.digits import DIGITS
from sparsifiers.gpu.edge import count_digits, count_ties, find_edge
from sparsifiers.gpu.layout import IndexSection
from sparsifiers.gpu.row_table import RowTable
from sparsifiers.gpu.rows import mark_rows
from sparsifiers.gpu.scratch import Scratch
from sparsifiers.gpu.slots import Slots


def select_largest(
    work: Tensor,
    k: int,
    scratch: Scratch,
    slots: Slots,
    section: IndexSection | None = None,
    *,
    exact: bool,
    commit: bool,
    momentum: Tensor | None = None,
) -> None:
    """Take the k largest magnitudes of `work`, fp32[n]: 1 <= k <= n, at most as many as there are slots; zeros, too.

    exact: the k largest, of equals those of lowest index, as `topk` selects. Else all that are larger than
    the k-th by an eighth of an octave, and of those in the k-th one's bin the first; a function of the bits alone.
    commit, momentum, section: see `gather`.

    4 launches, exact 9, one more unless `compensate` has just counted the first digits of `work`; 4.5 bytes an element,
    about 1 more if exact, 4 more if not counted.
    """
    if not scratch.is_counted:
        count_digits(work, scratch)
    find_edge(k, 0, scratch)
    mark(work, scratch, section)
    if exact:
        for level in range(1, len(DIGITS)):
            count_ties(work, level, scratch)
            find_edge(k, level, scratch)
        settle_ties(work, scratch)
    gather(work, slots, scratch, commit=commit, momentum=momentum, section=section)


def select_rows(
    work: Tensor,
    rows: RowTable,
    k: int,
    turn: int,
    scratch: Scratch,
    slots: Slots,
    section: IndexSection | None = None,
    *,
    commit: bool,
    momentum: Tensor | None = None,
) -> None:
    """Take the largest of each row of `work`, fp32[n], k in all, as `adtopk-row` deals them: the count is k.

    turn: see `mark_rows`; commit, momentum, section: see `gather`. 4 launches, 5 with a section, and a copy of 12 bytes
    a tensor; 4.5 to 20.5 bytes an element.
    """
    mark_rows(work, rows, k, turn, scratch, section)
    gather(work, slots, scratch, commit=commit, ties=False, momentum=momentum, section=section)
