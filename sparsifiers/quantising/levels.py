# SPDX-License-Identifier: Apache-2.0
"""Levels to which `eden` rounds rotated blocks: those of Lloyd (1982) and Max (1960) for a normal distribution.

Rounded to integers, so that sums of them are exact. Torch's operations, the loops in C (`kernel_quantise_codes.h`) and
the kernels in Triton have the same.
"""

from __future__ import annotations

from itertools import pairwise

# By bits: the levels of magnitudes, in units of a block's root mean square; and the same as integers, of which a sum
# over 256 signs fits into 16 bits. Decoding is then exact up to its one multiplication by the scale.
EXACT = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
LEVELS = {1: (30,), 2: (30, 100), 3: (12, 36, 64, 103), 4: (6, 18, 30, 43, 58, 74, 95, 126)}
# A rotation does not hide one coordinate of more than this share of a block's energy: it would arrive with a gain of
# 1.02 and more. Such a block is rotated twice.
SPIKE = {1: 1 / 16, 2: 1 / 8, 3: 1 / 8, 4: 1 / 8}
# Nor does it hide that all are alike: few sums come of it, some next to the end of a level, and the mean would be off
# by 5 % of the norm. A block is rotated twice if its largest square is less than so many times its mean square.
FLAT = 4.0
LEAST = 2.0**-118  # a smaller scale is 0, so that no value read is subnormal: some machines make that zero
MOST = 2.0**104  # a larger one is this, so that no sum over up to 2**8 senders is infinite


def thresholds(bits: int) -> tuple[float, ...]:
    """Return where one level ends and the next begins, in units of a block's root mean square."""
    return tuple((low + high) / 2 for low, high in pairwise(EXACT[bits]))
