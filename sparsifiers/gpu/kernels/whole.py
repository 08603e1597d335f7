# SPDX-License-Identifier: Apache-2.0
"""Add dense rows of all ranks, element by element."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.kernels.launching import launch

BLOCK = 1024  # elements of a program


@triton.jit
def whole_kernel(
    update: tl.tensor, rows: tl.tensor, stride: tl.tensor, length: tl.tensor, ranks: tl.tensor, scale: tl.tensor,
    factor: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write one block of the update."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = place < length
    total = tl.load(rows + place, mask=within, other=0.0).to(tl.float32) * scale
    for _ in range(1, ranks):
        rows += stride
        total += tl.load(rows + place, mask=within, other=0.0).to(tl.float32) * scale
    tl.store(update + place, total * factor, mask=within)


def run(update: Tensor, rows: Tensor, scale: float, factor: float) -> None:
    """Launch the kernel of `sparsifiers.gpu.add_whole`."""
    programs = -(-len(update) // BLOCK)
    launch(
        whole_kernel, programs, update,
        update, rows, rows.stride(0), len(update), len(rows), scale, factor, BLOCK=BLOCK,
    )  # fmt: skip
