# SPDX-License-Identifier: Apache-2.0
"""Reuse a threshold from one step to the next, corrected by the number of elements that it finds.

Which threshold is carried over is ADTopk's idea (HPDC'24); the rule is ours. Theirs reuses a threshold for a
number of steps with any count, which under a drifting scale was measured to send up to six times k; here
every count is known before it is sent. A count within [0.8 k, 1.25 k] is accepted, any other is answered with
the exact k largest in the same step. The gain stays low because error feedback empties the tail above the last
threshold: a count says less about the next one than the distribution would have it, and a Newton step
oscillates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import exact_topk
from sparsifiers.magnitude import INTEGERS, bit_view, magnitude_mask

GAIN = 0.1  # exponent of count / k by which a threshold is corrected; see above why it is low


@dataclass(frozen=True)
class Reused:
    """Selection, and the threshold that the next step starts from."""

    indices: NDArray[np.int32]  # int32[count], ascending, 0.8 k <= count <= k
    threshold: float | None  # for the next step; None if there is none to go by
    exact: bool  # the k largest were selected afresh: the threshold that was given did not fit, or was None


def reuse_threshold(vector: Tensor, k: int, threshold: float | None) -> Reused:
    """Select between 0.8 k and k of the largest magnitudes of `vector`, by a threshold where it fits.

    vector: floats [n] in CPU memory, not changed, n >= 1; 1 <= k <= n. threshold: of the last call,
    or None. A threshold that fits costs one pass over the vector; so does one that is too low, because that
    pass holds the k largest as well. Only one that is too high costs an exact selection on top.
    """
    bits, mask = bit_view(vector).numpy(), magnitude_mask(vector.dtype)
    if threshold is None or k == len(bits):  # all of them are wanted, however small: density 1 is the dense exchange
        return _afresh(vector.dtype, bits, mask, exact_topk.largest_magnitudes(bits, mask, k))
    most = 5 * k // 4
    indices, count = exact_topk.counted_scan(bits, mask, k, key_from(threshold, vector.dtype) - 1, most)
    if 5 * count < 4 * k:
        return _afresh(vector.dtype, bits, mask, exact_topk.largest_magnitudes(bits, mask, k))
    if count > most:
        return _afresh(vector.dtype, bits, mask, indices)
    return Reused(indices, threshold * (count / k) ** GAIN, exact=False)


def _afresh(dtype: torch.dtype, bits: NDArray[np.signedinteger[Any]], mask: int, indices: NDArray[np.int32]) -> Reused:
    """Return the exact k largest with the smallest of them as the next threshold."""
    smallest = value_of(int((bits[indices] & mask).min()), dtype)
    # Every element reaches a threshold of zero, and none can be corrected to or from inf.
    return Reused(indices, smallest if 0.0 < smallest < math.inf else None, exact=True)


def key_from(threshold: float, dtype: torch.dtype) -> int:
    """Return the least key of `dtype` with a magnitude of at least `threshold`, a positive number."""
    rounded = torch.tensor(threshold, dtype=torch.float64).to(dtype)
    return int(bit_view(rounded).item()) + (float(rounded) < threshold)


def value_of(key: int, dtype: torch.dtype) -> float:
    """Return the magnitude of `dtype` that has this key."""
    return float(torch.tensor(key, dtype=INTEGERS[dtype]).view(dtype))
