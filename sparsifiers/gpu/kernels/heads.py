# SPDX-License-Identifier: Apache-2.0
"""Merge the heads of all ranks' messages; a single program does it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.kernels.launching import launch, power


@triton.jit
def merged_word(words: tl.tensor, stride: tl.tensor, ranks: tl.tensor, place: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Return the words of all ranks at these places, OR-ed."""
    merged = tl.load(words + place, mask=there, other=0)
    for _ in range(1, ranks):
        words += stride
        merged = merged | tl.load(words + place, mask=there, other=0)
    return merged


@triton.jit(do_not_specialize=["length", "own", "ranks", "free", "used", "low", "high"])
def heads_kernel(
    words: tl.tensor, stride: tl.tensor, figures: tl.tensor, figure_stride: tl.tensor, out: tl.tensor, said: tl.tensor,
    length: tl.tensor, own: tl.tensor, ranks: tl.tensor, free: tl.tensor, used: tl.tensor, low: tl.tensor,
    high: tl.tensor,
    WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the merged words, and the figures. `low` and `high`: the halves of the key."""
    place = tl.arange(0, WORDS)
    there = place < length
    tl.store(out + place, merged_word(words, stride, ranks, place, there), mask=there)
    compared = there & (place != free) & (place < used)
    mine = tl.load(words + own.to(tl.int64) * stride + place, mask=compared, other=0)
    fault = ranks * 0
    squares = tl.load(figures + 2).to(tl.float64, bitcast=True)
    for rank in range(0, ranks):
        theirs = tl.load(words + place, mask=compared, other=0)
        differs = tl.max((theirs != mine).to(tl.int32), 0)
        fault = tl.where(differs > 0, rank + 1, fault)
        if rank > 0:
            figures += figure_stride
            squares += tl.load(figures + 2).to(tl.float64, bitcast=True)
        words += stride
    tl.store(said, fault.to(tl.int64))
    tl.store(said + 1, (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF))
    tl.store(said + 2, squares.to(tl.int64, bitcast=True))
    tl.store(said + 3, ranks.to(tl.int64) * 0)


def run(words: Tensor, figures: Tensor, own: int, key: int, out: tuple[Tensor, Tensor], free: int, used: int) -> None:
    """Launch the kernel of `sparsifiers.gpu.merge_heads`."""
    low = key & 0xFFFFFFFF
    launch(
        heads_kernel, 1, words,
        words, words.stride(0), figures, figures.stride(0), *out, words.shape[1], own, len(words), free, used,
        low - (low >> 31 << 32), key >> 32, WORDS=power(words.shape[1]),
    )  # fmt: skip
