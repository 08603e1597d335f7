# SPDX-License-Identifier: Apache-2.0
"""Give each block one scale in two bytes. Its product with a short code is exact, never subnormal and never infinite.

A scale is a bfloat16, of 8 significant bits. Codes have 7 at most, so a product has 15 and fits into a float32 as it
is: a machine that fuses it with the addition behind it gets the same bits. Four bytes would buy nothing: codes are
chosen for the scale as it was rounded, which moves the levels by 0.4 % at most and adds no error of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 2  # bytes
NAN = 0x7FC0  # bits of a bfloat16
# A smaller scale is 0. Values read are multiples of 2**-7 times this one, as a scale has 8 significant bits; or of
# 2**-9 times, by the least code of fp8, with scales of one bit. A sum of such multiples, times 1 / 256 for as many
# senders, is then 0 or at least 2**-126. Smaller numbers are subnormal, and some machines make them 0.
LEAST = 2.0**-109
MOST = 2.0**119  # a larger magnitude is this, so that a sum over 2**8 senders is finite, also after rounding up


def bounded(blocks: Tensor) -> Tensor:
    """Cut magnitudes of ``blocks``, float32[n, size], off at MOST, in place, and return the largest: float32[n, 1].

    It is NaN for a block with a value that is not finite; the other values of such a block have no meaning.
    """
    largest = blocks.abs().amax(dim=1, keepdim=True)
    blocks.clamp_(-MOST, MOST)
    return torch.where(largest.isfinite(), largest.clamp(max=MOST), torch.nan)


def as_scale(wanted: Tensor, up: bool = False) -> Tensor:
    """Return the scales that receivers read for those that are ``wanted``, float32[n, 1], at least 0: alike.

    up: whether to round up, so that nothing is more steps of a scale than of the wanted one; else to nearest.
    """
    if up:
        rounded = (wanted.view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32)
    else:
        rounded = wanted.to(torch.bfloat16).to(torch.float32)
    rounded = torch.where(wanted < LEAST, 0.0, rounded)
    return torch.where(wanted.isnan(), torch.nan, rounded)


def steps_of(blocks: Tensor, scale: Tensor) -> Tensor:
    """Return how many times ``scale``, float32[n, 1], all of ``blocks`` are: alike; 0 where the scale is 0 or NaN."""
    return torch.where(scale > 0, blocks / scale, 0.0)


def write_scale(scale: Tensor, out: Tensor) -> None:
    """Put ``scale``, float32[n, 1] from :func:`as_scale`, in front of the records ``out``, uint8[n, bytes]."""
    out[:, :SCALE] = as_bits(scale).view(torch.uint8)


def as_bits(scale: Tensor) -> Tensor:
    """Return float32 ``scale`` as bits of bfloat16, to nearest: int16, as long. Every NaN is the same one."""
    rounded = scale.to(torch.bfloat16).view(torch.int16)
    return torch.where(scale.isnan(), NAN, rounded)  # torch's own differs by the instructions that a processor has


def read_scale(data: Tensor) -> Tensor:
    """Return the scale in front of each of the records ``data``, uint8[n, bytes]: float32[n, 1]."""
    return data[:, :SCALE].contiguous().view(torch.bfloat16).to(torch.float32)
