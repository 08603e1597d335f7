# SPDX-License-Identifier: Apache-2.0
"""Selection by an estimated threshold: a sample to fit, a count that decides, exact selection where it fails.

An estimator is a pure function (x, wanted) -> eta on tensors: x float32 [m] >= 0 are sampled magnitudes in units of a
power of two, sorted once so that each count is a binary search; wanted (0-dim) is how many of them should reach the
threshold eta (0-dim). It reads no value on the host and has no shape that depends on data, so the same code serves all
devices. It only starts the search: with any estimate, 0.8 k to k indices are selected.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import gpu
from sparsifiers.base import Request, Selection, Sparsifier
from sparsifiers.largest import (
    INTEGERS,
    bit_view,
    bracket,
    counted_scan,
    key_from,
    keys_of,
    largest_magnitudes,
    magnitude_mask,
    scan,
    select_in_kernels,
    take,
    value_of,
)

# Samples, prepared without waiting for a device.


@dataclass(frozen=True)
class Sample:
    """Sample that an estimator is fitted to, on the device of the vector."""

    x: Tensor  # float32 [m], magnitudes in units of `unit`, ascending, 0 for NaN and inf
    unit: Tensor  # a power of two, fp64 0-dim
    wanted: Tensor  # how many of x should reach the threshold, float32 0-dim


@lru_cache(maxsize=256)
def stride_for(n: int, size: int) -> int:
    """Return the largest prime at most n / size, so that hardly a period in the data fits it; 1 for short vectors."""
    stride = max(1, n // size)
    while any(stride % divisor == 0 for divisor in range(2, math.isqrt(stride) + 1)):
        stride -= 1
    return stride


def strided(vector: Tensor, size: int, request: Request) -> Tensor:
    """View at least `size` elements of `vector` (all, if it has fewer); the phase depends on (key, step)."""
    stride = stride_for(vector.numel(), size)
    if stride == 1:
        return vector
    return vector[random.Random(f"{request.key}/{request.step}").randrange(stride) :: stride]


def normalised(elements: Tensor, density: float) -> Sample:
    """Make a Sample of elements, floats [m], of a vector of which the fraction `density` is wanted.

    Non-finite elements are always sent: they count among the wanted ones, and not in the fit. Division by
    a power of two is exact, so that scaling a vector by one changes nothing that follows.
    """
    keys = keys_of(elements)
    special = keys >= int(torch.tensor(torch.inf, dtype=elements.dtype).view(keys.dtype))
    keys.masked_fill_(special, 0)
    if keys.device.type == "cpu":
        keys = torch.from_numpy(np.sort(keys.numpy()))  # thirty times as fast as torch's
    else:
        keys = keys.sort().values
    x = keys.view(elements.dtype)
    x = x if x.dtype == torch.float64 else x.float()
    largest = x[-1]
    unit = torch.where(largest > 0, largest / (2 * torch.frexp(largest).mantissa), torch.ones_like(largest))
    wanted = (density * len(x) - torch.count_nonzero(special)).clamp_min(0.5)
    return Sample((x / unit).float(), unit.double(), wanted.float())


# State by key, forgotten where the key comes back with another length.


class Keyed(Sparsifier):
    """Sparsifier that keeps a few numbers per key; a subclass calls `_recall` and `_keep`.

    The numbers are Python's, or 0-dim tensors where reading them would wait for a device. All state belongs to the
    instance.
    """

    def __init__(self, density: float = 0.01) -> None:
        super().__init__(density)
        self._kept: dict[str, tuple[Any, ...]] = {}  # by key: numel of the vector, then the numbers

    def _recall(self, key: str, numel: int) -> tuple[Any, ...] | None:
        """Return the numbers that `_keep` was given last for this key; None if there are none, or of another length."""
        kept = self._kept.get(key)
        return kept[1:] if kept is not None and kept[0] == numel else None

    def _keep(self, key: str, numel: int, *numbers: int | float | Tensor) -> None:
        """Remember the numbers for a vector of this key and length."""
        self._kept[key] = (numel, *numbers)

    def state_dict(self) -> dict[str, object]:
        """Return {name: {key: (numel, *numbers)}} in plain numbers. Waits for a device that holds some."""
        plain = {
            key: tuple(part.item() if isinstance(part, Tensor) else part for part in kept)
            for key, kept in self._kept.items()
        }
        return {self.name: plain}

    def snapshot(self) -> Mapping[str, object]:
        """Return {name: {key: (numel, *numbers)}} with tensors as they are; the numbers themselves never change."""
        return {self.name: dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state of `state_dict`; an empty mapping is a cold start."""
        kept = state.get(self.name, {})
        if set(state) - {self.name} or not isinstance(kept, Mapping):
            raise ValueError(f"{self}: expected the state {{{self.name!r}: ...}}, got {sorted(state)}")
        self._kept = {key: tuple(numbers) for key, numbers in kept.items()}

    def retain(self, keys: Iterable[str]) -> None:
        """Forget the state of every key that is not in `keys`."""
        wanted = set(keys)
        self._kept = {key: kept for key, kept in self._kept.items() if key in wanted}


# Thresholds, reused from one step to the next, and corrected by the number of elements that they find.
#
# Which threshold is carried over is ADTopk's idea (HPDC'24); the rule is ours. Theirs reuses a threshold for a number
# of steps with any count, which under a drifting scale was measured to send up to six times k; here every count is
# known before it is sent. A count within [0.8 k, 1.25 k] is accepted, any other is answered with the exact k largest in
# the same step. The gain stays low because error feedback empties the tail above the last threshold: a count says less
# about the next one than the distribution would have it, and a Newton step oscillates.

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
        return _afresh(vector.dtype, bits, mask, largest_magnitudes(bits, mask, k))
    most = 5 * k // 4
    indices, count = counted_scan(bits, mask, k, key_from(threshold, vector.dtype) - 1, most)
    if 5 * count < 4 * k:
        return _afresh(vector.dtype, bits, mask, largest_magnitudes(bits, mask, k))
    if count > most:
        return _afresh(vector.dtype, bits, mask, indices)
    return Reused(indices, threshold * (count / k) ** GAIN, exact=False)


def _afresh(dtype: torch.dtype, bits: NDArray[np.signedinteger[Any]], mask: int, indices: NDArray[np.int32]) -> Reused:
    """Return the exact k largest with the smallest of them as the next threshold."""
    smallest = value_of(int((bits[indices] & mask).min()), dtype)
    # Every element reaches a threshold of zero, and none can be corrected to or from inf.
    return Reused(indices, smallest if 0.0 < smallest < math.inf else None, exact=True)


# Counts of a sample against a threshold, which moves until the count is the wanted one.

SLOPES = (-1e5, -0.25)  # of ln count against ln eta: a tail that ends, and one heavier than any with a mean


def reaching(x: Tensor, eta: Tensor) -> Tensor:
    """Return how many elements of x, ascending [m], are at least eta: 0-dim int64."""
    return len(x) - torch.searchsorted(x, eta)


def above(x: Tensor, eta: Tensor) -> Tensor:
    """Return how many elements of x, ascending [m], are larger than eta: 0-dim int64."""
    return len(x) - torch.searchsorted(x, eta, right=True)


def near(count: Tensor, wanted: Tensor) -> Tensor:
    """Return whether a sample's count is as near `wanted` as it can be: to 10 %, or two standard deviations up to 20 %.

    count, wanted: 0-dim float32. Returns 0-dim bool.
    """
    slack = (2 / wanted.sqrt()).clamp(min=0.1, max=0.2)
    return (count / wanted - 1).abs() <= slack


def off(x: Tensor, wanted: Tensor, eta: Tensor) -> Tensor:
    """Return how far the count at eta is from `wanted`: ln(count / wanted), above 0 if too many; finite for a 0 too.

    x: float32 [m], ascending; wanted, eta and the result: 0-dim. Half an element is added to both counts.
    """
    return ((reaching(x, eta) + 0.5) / (wanted + 0.5)).log()


def corrected(x: Tensor, wanted: Tensor, eta: Tensor, slope: Tensor, evaluations: int) -> Tensor:
    """Return the threshold, of at most `evaluations` tried from eta on, with the count closest to `wanted`.

    x: float32 [m] >= 0, ascending; wanted: 0-dim; eta: the first that is tried, 0-dim; slope: d ln count / d ln eta
    there, 0-dim, below 0; evaluations: counts of x.

    Steps are secants of ln count against ln eta, in which the tails of a normal, Laplace or power law are nearly
    straight. One that leaves the bracket of the counts seen so far is replaced by its middle, so nothing oscillates. A
    start that is `near` is kept.
    """
    place = torch.minimum(eta, x[-1]).clamp_min(torch.finfo(x.dtype).tiny).log()
    slope = slope.nan_to_num(nan=-4.0).clamp(*SLOPES)
    low, high = place - torch.inf, place + torch.inf
    best, least = place, torch.full_like(place, torch.inf)
    before, error_before = place, place
    for turn in range(evaluations):
        error = off(x, wanted, place.exp())
        distance = torch.where(near((wanted + 0.5) * error.exp(), wanted), torch.zeros_like(error), error.abs())
        best, least = torch.where(distance < least, place, best), torch.minimum(distance, least)
        low, high = torch.where(error > 0, place, low), torch.where(error > 0, high, place)
        if turn:
            secant = (error - error_before) / (place - before)
            slope = torch.where(secant.isfinite(), secant, slope).clamp(*SLOPES)
        before, error_before = place, error
        following = place - error / slope
        inside = (following > low) & (following < high)
        place = torch.where(inside, following, (low + high) / 2)
    return best.exp()


# The sparsifier.

SAMPLES = 1 << 16  # elements, at least
REACHED = 256  # sampled elements above the threshold, at least: their count is then right to 6 %
LEAST = 0.8  # of k: fewer are selected only where there are fewer non-zeros
MOST = 4.0  # of k: carrying more through the scan costs more than selecting exactly


class Estimated(Keyed):
    """Sparsifier of the coordinates that reach an estimated threshold: a subclass writes `_estimate`.

    On the CPU the vector is read once where the sample bears the estimate out; where more than k are found they are
    cut to the k largest, and fewer than `least` of k are replaced by the exact k. On a device the estimate starts a
    bisection for the k-th largest key, and count is always k; with kernels (`sparsifiers.gpu`) a histogram finds it.
    """

    has_kernels = True
    least: float = LEAST  # the smallest fraction of k that is sent, where there are as many non-zeros

    @abstractmethod
    def _estimate(self, sample: Sample, request: Request) -> Tensor:
        """Return eta, 0-dim, in units of the sample; it may recall and keep numbers of request.key."""

    def start(self, vector: Tensor, request: Request) -> tuple[Tensor, Sample]:
        """Return the threshold before any count, fp64 0-dim, and the sample it was fitted to; for inspection too.

        It is 0, which selects all non-zeros, where no more than the wanted elements of the sample are non-zero.
        """
        size = max(SAMPLES, math.ceil(REACHED * vector.numel() / request.k))
        sample = normalised(strided(vector, size, request), request.k / vector.numel())
        eta = self._estimate(sample, request)
        zero = torch.zeros_like(eta)
        eta = torch.where(above(sample.x, zero) <= sample.wanted, zero, eta)
        return eta.double() * sample.unit, sample

    def _select(self, vector: Tensor, request: Request) -> Selection:
        k = request.k
        tau, sample = self.start(vector, request)
        bits, mask, floor = bit_view(vector).numpy(), magnitude_mask(vector.dtype), int(key_floor(tau, vector.dtype))
        enough = False
        if floor == 0 or self._borne_out(tau / sample.unit, sample):
            indices = scan(bits, mask, k, floor)
            # All non-zeros are enough, except for a method that promises k.
            enough = len(indices) >= self.least * k or (floor == 0 and self.least < 1.0)
        return padded(indices if enough else largest_magnitudes(bits, mask, k), k)

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        """Select k on any device, by a histogram or by bisection from the estimate; no value is read by the host."""
        if gpu.has_kernels(vector):
            return select_in_kernels(vector, request, exact=False)
        keys, start = keys_of(vector), key_floor(self.start(vector, request)[0], vector.dtype)
        return Selection(take(keys, *bracket(keys, request.k, vector.dtype, start=start), request.k)[0], request.k)

    def _borne_out(self, eta: Tensor, sample: Sample) -> bool:
        # A threshold that is off in the sample is off in the vector: better not to scan with it at all.
        reached, wanted = int(reaching(sample.x, eta.float())), float(sample.wanted)
        return self.least * wanted <= reached <= MOST * wanted


def key_floor(tau: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the key, 0-dim int64, that exactly the elements of `dtype` with |a| >= tau exceed; at least 0.

    tau: 0-dim fp64, which is rounded up to `dtype`. So zeros are never selected, while NaN and inf always are.
    """
    tau = tau.clamp(min=0.0, max=torch.inf)
    rounded = tau.to(dtype)
    key = rounded.view(INTEGERS[dtype]).to(torch.int64)
    return (key - (rounded.double() >= tau).to(torch.int64)).clamp(min=0)


def padded(indices: NDArray[np.signedinteger[Any]], k: int) -> Selection:
    """Return at most k indices, ascending, as a Selection with k entries; it owns the array if there are k."""
    slots = indices if len(indices) == k else np.zeros(k, dtype=np.int32)
    slots[: len(indices)] = indices
    return Selection(torch.from_numpy(slots), len(indices))


def number(owner: str, option: str, value: object) -> float:
    """Return the value of an option as a Python float. TypeError if it is no number; owner: named in the error."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {option} must be a number, got {value!r}")
    return float(value)
