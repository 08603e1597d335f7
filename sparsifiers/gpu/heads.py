# SPDX-License-Identifier: Apache-2.0
"""Merge what all ranks say in front of their messages: words of which the bits are OR-ed, and a few figures."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.gpu.choice import runs_triton

FIGURES = 4  # int64 each: a fault, a key, squares (float64), and a word that is 0
_FAULT, _KEY, _SQUARES, _LAST = range(FIGURES)


def merge_heads(
    words: Tensor, figures: Tensor, own: int, key: int, out: tuple[Tensor, Tensor], *, free: int, used: int
) -> None:
    """Write the words of all W ranks, OR-ed, and figures of all of them; nothing waits.

    words, figures: int32[W, n] and int64[W, FIGURES], rows any number of elements apart. own: a rank. key: int64.
    out: int32[n] and int64[FIGURES]. The fault is 1 + the last rank that has another word than `own` before number
    `used` but in number `free`, or 0; the squares are the sum of all ranks'. One launch.
    """
    if runs_triton(words):
        from sparsifiers.gpu.kernels import heads as kernel

        kernel.run(words, figures, own, key, out, free, used)
    else:
        reference(words, figures, own, key, out, free, used)


def reference(
    words: Tensor, figures: Tensor, own: int, key: int, out: tuple[Tensor, Tensor], free: int, used: int
) -> None:
    """Merge heads with torch's operations, for :func:`merge_heads`."""
    head, said = out
    differs = words != words[own]
    differs[:, free].zero_()
    differs[:, used:].zero_()
    numbers = torch.arange(1, len(words) + 1, device=words.device)
    said[_FAULT].copy_((differs.any(dim=1) * numbers).amax())
    said[_KEY].fill_(key)
    said[_SQUARES : _SQUARES + 1].view(torch.float64).copy_(figures[:, _SQUARES].view(torch.float64).sum())
    said[_LAST].zero_()
    while len(words) > 1:  # in halves; the middle one of an odd number is in both
        half = len(words) // 2
        words = words[: len(words) - half] | words[half:]
    head.copy_(words[0])
