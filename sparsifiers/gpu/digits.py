# SPDX-License-Identifier: Apache-2.0
"""Cut the 31 bits of an fp32 magnitude's key into digits, of which histograms are taken.

The first digit is the exponent and three bits of the mantissa, so that a bin is an eighth of an octave: 12.5 % of a
magnitude or less. All three digits are the whole key.
"""

from __future__ import annotations

from typing import NamedTuple

BINS = 2048  # of a histogram
KEY_BITS = 31  # of an fp32 number, its sign apart
MASK = (1 << KEY_BITS) - 1


class Digit(NamedTuple):
    """Place of a digit in a key."""

    shift: int  # bits below it
    bits: int  # its own


DIGITS = (Digit(20, 11), Digit(9, 11), Digit(0, 9))
