"""Do on a GPU, in few launches, what a merge buffer needs: kernels in Triton, and torch's operations beside them.

Every function queues work on the current stream of its tensors' device, and none waits for it; where kernels cannot
work (no CUDA tensor, no Triton) it calls torch's operations, which give the same bits. Buffers are given: nothing of
full size is allocated by a kernel. Vectors are fp32, contiguous, shorter than 2**31. B/e: bytes of device memory read
and written an element; n: elements, k: slots, W: ranks.

| call | what it does | launches | B/e |
|---|---|---|---|
| `compensate(table, gradients, residual, work, staging=...)` | K1: work = residual + gradient, histogram | 1 | 12 |
| `count_digits(work, level, scratch)` | histogram of one digit of keys | 1 | 4 |
| `find_edge(k, level, scratch)` | K2: one digit of the k-th largest key | 1 | 0 |
| `mark(work, level, least, scratch)` | K3: bitmaps of what is above the edge and on it | 1 | 4.25 |
| `mark_rows(work, rows, k, turn, scratch, staging=...)` | bitmap of the largest of each row | 2 | 4 to 20 |
| `gather(work, slots, scratch, commit=...)` | K3: slots and count; takes them off `work` | 2 | 0.25 + 24 k/n |
| `commit(work, slots, sent)` | takes off what a lossy codec has sent | 1 | 16 k/n |
| `select_largest(work, k, slots, scratch, exact=..., counted=...)` | all of K2 and K3 | 4, exact 8 | 4.5, exact 12.5 |
| `select_rows(work, rows, k, turn, slots, scratch, staging=...)` | the same for rows | 4 | 4.5 to 20.5 |
| `encode_indices(slots, layout, words)` | index codec | 1 | 12 k/n |
| `decode_indices(words, counts, layout, out, wrong, tiles)` | index codec of all ranks | 2 | 14 W k/n |
| `add_ranks(update, indices, values, counts, scale)` | K4: the sum in rank order | 1 | 4 + 18 W k/n |

What a merge buffer keeps: a `TensorTable` and perhaps a `RowTable` (constants of its plan), a `Scratch`, `Slots` (parts
of its message) and an `IndexLayout`. `staging` tensors are pinned, and one each for steps under way.
"""

from __future__ import annotations

from sparsifiers.gpu.add import add_ranks
from sparsifiers.gpu.choice import runs_triton
from sparsifiers.gpu.codec import decode_indices, encode_indices
from sparsifiers.gpu.compact import commit, gather, mark
from sparsifiers.gpu.compensation import INFINITY, compensate
from sparsifiers.gpu.edge import count_digits, find_edge
from sparsifiers.gpu.layout import IndexLayout
from sparsifiers.gpu.row_table import RowTable
from sparsifiers.gpu.rows import mark_rows
from sparsifiers.gpu.scratch import Scratch
from sparsifiers.gpu.select import select_largest, select_rows
from sparsifiers.gpu.slots import Slots
from sparsifiers.gpu.table import Momenta, TensorTable

__all__ = [
    "INFINITY",
    "IndexLayout",
    "Momenta",
    "RowTable",
    "Scratch",
    "Slots",
    "TensorTable",
    "add_ranks",
    "commit",
    "compensate",
    "count_digits",
    "decode_indices",
    "encode_indices",
    "find_edge",
    "gather",
    "mark",
    "mark_rows",
    "runs_triton",
    "select_largest",
    "select_rows",
]
