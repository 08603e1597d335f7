# SPDX-License-Identifier: Apache-2.0
"""Operations of a merge buffer on a GPU, in few launches: kernels in Triton, and torch's operations beside them.

Every function queues work on the current stream of its tensors' device, and none waits for it; where kernels do not
work (no CUDA tensor, no Triton, no C compiler) it calls torch's operations, which give the same bits. Buffers are
given: nothing of full size is allocated by a kernel. Vectors are fp32, contiguous, shorter than 2**31. B/e: bytes of
device memory read and written an element; n: elements, k: slots, W: ranks.

| call | what it does | launches | B/e |
|---|---|---|---|
| `compensate(table, gradients, residual, work, ...)` | K1: work = residual + gradient, histogram, largest | 1 * | 12 |
| `select_largest(work, k, scratch, slots, ...)` | K2, K3 | 4, exact 9 | 4.5 + 72 k/n, exact 5.5 |
| `select_rows(work, rows, k, turn, scratch, slots, ...)` | the same for rows | 5 * | 4.5 to 20.5 + 72 k/n |
| `encode_indices(indices, count, section)` | index codec, where a selection has not done it | 1 | 8 k/n |
| `decode_indices(words, counts, layout, out, good, tiles)` | index codec of all ranks | 2 | 8 W k/n |
| `add_whole(update, rows, scale)` | the sum of the uncompressed tensors, in rank order | 1 | 4 + 4 W |
| `add_ranks(update, indices, values, counts, scale)` | K4: the sum in rank order | 1 | 4 + 8 W k/n |
| `merge_heads(words, figures, own, key, out, ...)` | what all ranks say in front of their messages, OR-ed | 1 | 0 |

Selections consist of

| call | what it does | launches | B/e |
|---|---|---|---|
| `count_digits(work, scratch)` | histogram of first digits, where `compensate` has taken none | 1 | 4 |
| `find_edge(k, level, scratch)` | K2: one digit of the k-th largest key | 1 | 0 |
| `mark(work, scratch, section)` | K3: bitmaps of what is above the edge and on it | 1 | 4.25 |
| `count_ties(work, level, scratch)` | histogram of the next digit of what is on it | 1 | 0.125 + what is on it |
| `settle_ties(work, scratch)` | bitmaps of what is above the k-th key and on it | 1 | 0.5 + what is on the edge |
| `mark_rows(work, rows, k, turn, scratch, section)` | bitmap of the largest of each row | 2 or 3 * | 4 to 20 |
| `gather(work, slots, scratch, commit=..., section=...)` | K3: slots, index codec; off `work` | 2 | 0.25 + 72 k/n |

A star: and a copy of some bytes a tensor from the host, addresses of gradients or shares of rows.

What a merge buffer keeps: a `TensorTable` (a constant of its plan), a `Scratch` with perhaps a `RowTable`, and a
`LargestKey`. `Slots` and an `IndexSection` are sections of its message.
"""

from __future__ import annotations

from sparsifiers.gpu.choice import has_kernels, is_fused, runs_triton
from sparsifiers.gpu.codec import decode_indices, encode_indices
from sparsifiers.gpu.combining import add_ranks, add_whole, merge_heads
from sparsifiers.gpu.compensation import compensate
from sparsifiers.gpu.layout import IndexLayout, IndexSection, Slots
from sparsifiers.gpu.scratch import LargestKey, Scratch
from sparsifiers.gpu.selection import (
    count_digits,
    count_ties,
    find_edge,
    gather,
    mark,
    mark_rows,
    select_largest,
    select_rows,
    settle_ties,
)
from sparsifiers.gpu.tables import Momenta, RowTable, TensorTable

__all__ = [
    "IndexLayout",
    "IndexSection",
    "LargestKey",
    "Momenta",
    "RowTable",
    "Scratch",
    "Slots",
    "TensorTable",
    "add_ranks",
    "add_whole",
    "compensate",
    "count_digits",
    "count_ties",
    "decode_indices",
    "encode_indices",
    "find_edge",
    "gather",
    "mark",
    "has_kernels",
    "is_fused",
    "mark_rows",
    "merge_heads",
    "runs_triton",
    "select_largest",
    "select_rows",
    "settle_ties",
]
