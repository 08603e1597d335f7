# SPDX-License-Identifier: Apache-2.0
"""Exact selection of the k largest magnitudes: of equals the lowest index, NaN larger than all.

In order: magnitudes as integer keys, the search in CPU memory, candidates that make it needless, the search on a
device, and `topk`, which takes one of these.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import gpu, native
from sparsifiers.base import Request, Selection, Sparsifier
from sparsifiers.deferred import Deferred, Select

# Keys: magnitudes as integers, the bits of a float without its sign bit.
#
# Sign-magnitude formats (IEEE 754 and bfloat16) are laid out so that these integers rise with |a|: zeros of both signs
# are 0, subnormals, normals and inf follow in order, and NaN comes after inf. One integer comparison therefore serves
# every dtype, and does not depend on the flush-to-zero mode of the thread. It treats NaN as the largest value without a
# special case (two NaNs compare by their payload).

INTEGERS = {  # of the same width, by float
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def bit_view(vector: Tensor) -> Tensor:
    """View a float tensor as signed integers of the same width: the same storage, the same strides."""
    return vector.view(INTEGERS[vector.dtype])


def magnitude_mask(dtype: torch.dtype) -> int:
    """Return the integer that clears the sign bit: bit_view(vector) & mask is the magnitude's key, in [0, mask]."""
    return int(torch.iinfo(INTEGERS[dtype]).max)


def keys_of(vector: Tensor) -> Tensor:
    """Return the magnitudes of floats [n] as integers [n] of the same width; see `bit_view`."""
    return bit_view(vector) & magnitude_mask(vector.dtype)


def key_from(threshold: float, dtype: torch.dtype) -> int:
    """Return the least key of `dtype` with a magnitude of at least `threshold`, a positive number."""
    rounded = torch.tensor(threshold, dtype=torch.float64).to(dtype)
    return int(bit_view(rounded).item()) + (float(rounded) < threshold)


def value_of(key: int, dtype: torch.dtype) -> float:
    """Return the magnitude of `dtype` that has this key."""
    return float(torch.tensor(key, dtype=INTEGERS[dtype]).view(dtype))


# The search: with scratch in the size of k.
#
# The vector is read once, in blocks that stay in the cache. Keys above a floor are kept with their positions; when more
# than twice k are held they are cut back to the k largest, and the floor rises to the smallest of these. It may rise so
# far because positions ascend: of two equal keys the later one loses. A first floor guessed from a sample makes cuts
# rare, and has no say in the result. Vectors that `native` can read are scanned and cut by compiled loops, with the
# same result.

BLOCK = 1 << 16  # elements; keys and flags of a block fit the second-level cache for every dtype
FEW = 1 << 12  # elements up to which the compiled loops do without a sample


def largest_magnitudes(bits: NDArray[np.signedinteger[Any]], mask: int, k: int) -> NDArray[np.int32]:
    """Return the positions of the k largest keys `bits & mask`, int32[k], ascending; of equals the lowest.

    bits: signed integers [n] of any stride, not changed; mask: see `magnitude_mask`; 1 <= k <= n < 2**31.
    """
    n = len(bits)
    if k == n:
        return np.arange(n, dtype=np.int32)
    compiled = native.largest(bits, mask, k, *compiled_sample(n, k))
    if compiled is not None:
        return compiled
    if n <= BLOCK:
        return largest(bits & mask, k).astype(np.int32)
    positions = scan(bits, mask, k, sampled_floor(bits, mask, k))
    if len(positions) < k:  # the sample was unlucky; every key is above -1
        positions = scan(bits, mask, k, -1)
    return positions


def scan(bits: NDArray[np.signedinteger[Any]], mask: int, k: int, floor: int) -> NDArray[np.int32]:
    """Return the positions of the k largest keys above `floor`, ascending; all of these where there are fewer.

    Reads the vector once. bits: signed integers [n] of any stride, not changed; mask: see `magnitude_mask`; floor: -1
    lets all keys through. int32[at most k]; of equals the lowest.
    """
    compiled = native.largest_above(bits, mask, k, floor, k)
    if compiled is not None:
        return compiled[0]
    n = len(bits)
    limit = max(2 * k, BLOCK // 8)
    positions = np.empty(min(n, limit + BLOCK), dtype=np.int32)
    keys = np.empty(len(positions), dtype=bits.dtype)
    scratch = np.empty(min(n, BLOCK), dtype=bits.dtype)
    flags = np.empty(len(scratch), dtype=np.bool_)
    held = 0
    for start in range(0, n, BLOCK):
        block = bits[start : start + BLOCK]
        magnitudes = np.bitwise_and(block, mask, out=scratch[: len(block)])
        hits = np.flatnonzero(np.greater(magnitudes, floor, out=flags[: len(block)]))
        end = held + len(hits)
        np.add(hits, start, out=positions[held:end], casting="unsafe")
        np.take(magnitudes, hits, out=keys[held:end], mode="clip")  # "raise" would buffer
        held = end
        if held > limit:
            kept = largest(keys[:held], k)
            held = k
            positions[:k], keys[:k] = positions[kept], keys[kept]
            floor = int(keys[:k].min())
    return positions[largest(keys[:held], k)]


def counted_scan(
    bits: NDArray[np.signedinteger[Any]], mask: int, k: int, floor: int, most: int
) -> tuple[NDArray[np.int32], int]:
    """Return the positions of `scan`, and how many keys exceed `floor`; most + 1 for all larger counts. most >= k."""
    compiled = native.largest_above(bits, mask, k, floor, most)
    if compiled is not None:
        return compiled
    positions = scan(bits, mask, most + 1, floor)
    count = len(positions)
    return positions if count <= k else positions[largest(bits[positions] & mask, k)], count


def largest(keys: NDArray[np.signedinteger[Any]], k: int) -> NDArray[np.intp]:
    """Return where the k largest of `keys` stand, ascending; of equals the first; all if k >= len(keys)."""
    size = len(keys)
    if k >= size:
        return np.arange(size)
    if native.reads(keys):
        kept = np.arange(size, dtype=np.int32)
        native.cut(kept, keys.copy(), size, k, np.empty(size, dtype=np.int32))
        return kept[:k].astype(np.intp)
    smallest = np.partition(keys, size - k)[size - k]
    chosen = keys > smallest
    ties = np.flatnonzero(keys == smallest)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


# A floor: the k-th largest magnitude, guessed from a small sample, low on purpose. The guess only has to be cheap and
# seldom too high, because its callers count the elements above it.

SAMPLES = 5.0  # times cbrt(k * n); for a key carried in vain that costs five times a sample (measured)
COMPILED_SAMPLES = 0.8  # the same where the loops of `kernel` carry it for a tenth of a sample
COMPILED_LEAST = 1 << 12  # samples even so: fewer save nothing, and may let so many through that they must be cut twice


def sample_size(n: int, k: int, samples: float, least: int = 1) -> tuple[int, int]:
    """Return how many of n elements to sample, and which of these, counted from the largest, k elements reach.

    But for one call in ten thousand. The rank exceeds the size if the sample is too small to tell. n >= 8.

    One element is read at a random place in
    each of m equal stretches: the stretches keep the sample's spread below that of independent draws, the
    random places keep a period in the data from matching the stride. The sample holds about p = m * k / n of
    the k largest, with standard deviation below sqrt(p); taking the (p + 4 sqrt(p) + 1)-th largest leaves
    four of them as a margin.

    m balances the two costs, reading samples against carrying about 4 n sqrt(p) / m keys too many: their sum
    is least where m grows as the cube root of k * n.
    """
    m = min(n // 8, max(least, math.ceil(samples * (k * n) ** (1 / 3))))
    expected = m * k / n
    return m, math.ceil(expected + 4 * math.sqrt(expected) + 1)


def compiled_sample(n: int, k: int) -> tuple[int, int]:
    """Return `sample_size` for the compiled loops; (0, 1), for none, of few elements."""
    return sample_size(n, k, COMPILED_SAMPLES, COMPILED_LEAST) if n > FEW else (0, 1)


def sampled_floor(bits: NDArray[np.signedinteger[Any]], mask: int, k: int) -> int:
    """Return a key that, but for one call in ten thousand, at least k of the keys `bits & mask` exceed.

    bits: signed integers [n], n >= 8; mask: see `magnitude_mask`. -1, which all keys exceed, if the sample is too
    small to tell.
    """
    m, rank = sample_size(len(bits), k, SAMPLES)
    if rank > m:
        return -1
    sample = bits[places(len(bits), m)] & mask
    return int(np.partition(sample, m - rank)[m - rank]) - 1


def places(n: int, m: int) -> NDArray[np.int64]:
    """Return one place in each of m equal stretches of n elements, int64[m]: alike in all processes, without a pattern.

    Its distance from the start of the stretch is a hash of the stretch's number, of Murmur's kind, as a fraction of
    2**32.
    """
    number = np.arange(m, dtype=np.uint32)
    fraction = number * np.uint32(0x9E3779B1)
    fraction = (fraction ^ fraction >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    fraction = (fraction ^ fraction >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    fraction ^= fraction >> np.uint32(16)
    starts = number.astype(np.int64) * n // m
    return starts + (fraction.astype(np.uint64) * np.uint64(n // m) >> np.uint64(32)).astype(np.int64)


# Candidates: elements noted while a vector is written, so that it need not be read again.
#
# A pass that writes a vector piece by piece notes position and key of elements that exceed a floor, a little below the
# last selection's smallest key. If k or more are held at last, the k largest of them are the k largest of the vector,
# exactly. If fewer are, because the scale has dropped, or if there was no room, the vector is read as if nothing had
# been noted. So nothing depends on the floor but time.

ROOM = 3  # times k: as many are held at most, of 8 bytes each
RARE = 16  # elements for each that is selected, at least: the lists take 1.5 bytes an element at most
# The next floor is a fraction of the smallest magnitude selected. It rises while enough are held, and drops where too
# few were: so the vector is read in one step of thirty or so. It is large, because error feedback keeps the residual
# just below the last threshold: of networks in training 0.95 held 1.2 to 1.8 k, 0.85 three times as many.
FIRST, LEAST, MOST = 0.95, 0.6, 0.99
RISE, DROP = 0.0015, 0.04
MUCH = 4  # where more than 1 / MUCH of the vector was not noted, all of it is read
SPARE = 65  # slots that loops may write to beyond the room
NOTHING = np.iinfo(np.int32).max  # a floor that no key exceeds


class Notes(ctypes.Structure):
    """Mirror of `struct notes` of kernel_memory.c."""

    _fields_ = [
        ("floor", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("positions", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("elements", ctypes.c_int64),
        ("held", ctypes.c_int64),
        ("room", ctypes.c_int64),
    ]


class Stretch(NamedTuple):
    """Elements `start` to `stop` of a vector, and entries `first` to `end` of the list, which were noted of them."""

    start: int
    stop: int
    first: int
    end: int


class Candidates:
    """Candidates noted of a vector of `length` elements, fp32 in CPU memory, by a floor that is learnt step by step."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._floor = NOTHING  # a key
        self._part = FIRST  # times the smallest magnitude selected: the next floor
        self._room = 0  # candidates that the lists can hold
        self._list = np.empty((2, SPARE), dtype=np.int32)  # positions, with the signs of the elements, and keys
        self._addresses = (0, 0)  # of both
        self._held = 0  # in the lists
        self._stretches: dict[int, Stretch] = {}  # by start
        self._has_tried = False  # to note something, since the last selection

    def begin(self, notes: Notes, start: int) -> bool:
        """Prepare `notes` for elements above the floor, from element `start` on; return whether there is a floor."""
        self._stretches.pop(start, None)
        if not self._stretches:
            self._held = 0
        held, (positions, keys) = self._held, self._addresses
        notes.floor, notes.first, notes.held, notes.room = self._floor, start, 0, self._room - held
        notes.positions, notes.keys = positions + 4 * held, keys + 4 * held
        self._has_tried = self._floor != NOTHING
        return self._has_tried

    def end(self, notes: Notes) -> None:
        """Keep the noted candidates, if there was room for all of them."""
        first, held = self._held, notes.held
        if self._has_tried and held <= notes.room:
            start = notes.first
            self._stretches[start] = Stretch(start, start + notes.elements, first, first + held)
            self._held = first + held

    def forget(self, start: int) -> None:
        """Forget candidates from element `start` on: these elements are written again."""
        self._stretches.pop(start, None)

    def largest(
        self, bits: NDArray[np.int32], mask: int, k: int, search: Callable[[], NDArray[np.int32]]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32] | None]:
        """Return the positions of the k largest keys `bits & mask`, int32[k], ascending; of equals the lowest.

        With them the elements of `bits` there, if they are known. bits: the vector as it was written, int32[length];
        afterwards it may change. search: finds the positions by reading the vector.
        """
        lists, has_tried, self._has_tried = self._gather(bits, mask, k), self._has_tried, False
        self._stretches = {}
        held = 0 if lists is None else lists.shape[1]
        values = None
        if lists is None or held < k:
            found = search()
            smallest = int((bits[found] & mask).min())
        else:
            positions, keys, scratch = lists
            smallest = native.cut(positions, keys, held, k, scratch)
            values = positions[:k] & ~mask | keys[:k]
            found = positions[:k] & mask
        if has_tried:
            too_few = lists is not None and held < k
            self._part = max(LEAST, self._part - DROP) if too_few else min(MOST, self._part + RISE)
        self._learn(smallest, k)
        return found, values

    def _gather(self, bits: NDArray[np.int32], mask: int, k: int) -> NDArray[np.int32] | None:
        """Return positions and keys of all that exceed the floor, in order, and as much scratch: int32[3, held].

        They lie in a `native.workspace`, which is of this thread or, where it is large, of this call alone.

        Elements between the stretches are read: small tensors, and those that another loop has written. None, if these
        are many, or there is no room.
        """
        stretches = sorted(self._stretches.values())
        unknown = self.length - sum([stop - start for start, stop, _, _ in stretches])
        if unknown > self.length // MUCH or not native.reads(bits):
            return None
        spare = min(unknown, k + native.BLOCK)  # slots for elements that are read
        lists = native.workspace(sum([end - first for _, _, first, end in stretches]) + spare)
        positions, keys, _ = lists
        done = held = 0
        for start, stop, first, end in [*stretches, (self.length, self.length, 0, 0)]:
            if done < start:
                room, before = held + spare, held
                done, held = native.scan(bits[:start], done, mask, self._floor, positions[:room], keys[:room], held)
                if done < start:
                    return None
                positions[before:held] |= bits[positions[before:held]] & ~mask
                spare -= held - before
            positions[held : held + end - first], keys[held : held + end - first] = self._list[:, first:end]
            done, held = stop, held + end - first
        return lists[:, :held]

    def _learn(self, smallest: int, k: int) -> None:
        """Take a floor for the next step from the smallest of the k keys selected in this one."""
        magnitude = value_of(smallest, torch.float32)
        if not 0.0 < magnitude < math.inf or RARE * k > self.length:
            self._floor = NOTHING
            return
        self._floor = key_from(magnitude * self._part, torch.float32)
        if not ROOM * k <= self._room <= 2 * ROOM * k:
            self._room = ROOM * k
            self._list = np.empty((2, self._room + SPARE), dtype=np.int32)
            self._addresses = native.address(self._list[0]), native.address(self._list[1])


class TensorNotes:
    """Notes of a loop that writes one tensor, the slices of which lie in one vector or several, for `native.add`."""

    def __init__(self, parts: Sequence[tuple[Candidates, int, int]]) -> None:
        """Take, of each slice, the candidates of its vector, where it starts there, and how many elements it has."""
        self._notes = (Notes * len(parts))(*(Notes(elements=elements) for _, _, elements in parts))
        self._address = ctypes.addressof(self._notes)
        ours = zip(parts, self._notes, strict=True)
        self._parts = [(candidates, start, notes) for (candidates, start, _), notes in ours]

    def begin(self) -> tuple[int, int]:
        """Return the address and number of `struct notes` that a loop is to fill; (0, 0): there is nothing to note."""
        begun = 0
        for candidates, start, notes in self._parts:
            begun += candidates.begin(notes, start)
        return (self._address, len(self._parts)) if begun else (0, 0)

    def end(self) -> None:
        """Keep the candidates noted since `begin`."""
        for candidates, _, notes in self._parts:
            candidates.end(notes)

    def forget(self) -> None:
        """Forget the candidates: the tensor is written again."""
        for candidates, start, _ in self._parts:
            candidates.forget(start)


# On a device, without waiting for it.
#
# Shapes depend on n and k alone and no value is read by the host, so a call only queues work. The k-th largest key is
# from `torch.topk`, exactly, or from `bracket`: halving an interval of keys, one counting pass each, which costs the
# same for every k and gains from an estimate of where the k-th key lies.

ITERATIONS = 18  # of the 31 that fp32 needs: an interval of 2**13 keys is left, 0.1 % in magnitude


def largest_magnitudes_on_device(vector: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest magnitudes, int32[k], ascending; of equals the lowest index, NaN largest.

    vector: floats [n] on any device, not changed; 1 <= k <= n < 2**31.
    """
    keys = keys_of(vector)
    smallest = keys.topk(k, sorted=False).values.amin()
    return take(keys, smallest - 1, smallest, k)[0]


def bracket(
    keys: Tensor,
    k: int,
    dtype: torch.dtype,
    *,
    start: Tensor | None = None,
    floor: Tensor | None = None,
    iterations: int = ITERATIONS,
) -> tuple[Tensor, Tensor]:
    """Return an interval of keys (low, high] that holds the k-th largest, as 0-dim int64 tensors.

    keys: int[n], the keys of floats of `dtype`. start: a guess of the k-th key, 0-dim, or None. floor: only keys
    above it, 0-dim, are of interest; None: all. iterations: halvings, one counting pass over the keys each.

    Fewer than k keys exceed high; at least k exceed low unless low is the floor: where fewer than k exceed that, low
    and high meet at it. Two probes a quarter of an octave to either side of `start` come first. They are ordinary steps
    of the bisection, so each narrows the interval whether the guess was right or not, and after a right one 18 steps
    leave 2e-6 in magnitude.
    """
    low = torch.full((), -1, dtype=torch.int64, device=keys.device) if floor is None else floor.to(torch.int64)
    high = torch.full((), magnitude_mask(dtype), dtype=torch.int64, device=keys.device)
    spread = int(0.25 / torch.finfo(dtype).eps)
    for turn in range(iterations if start is None else iterations + 2):
        if start is not None and turn < 2:
            probe = start.to(torch.int64) + (-spread, spread)[turn]
        else:
            probe = (low >> 1) + (high >> 1) + (low & high & 1)  # the sum itself would overflow for fp64
        probe = torch.minimum(torch.maximum(probe, low), high)
        enough = torch.count_nonzero(keys > probe) >= k
        low, high = torch.where(enough, probe, low), torch.where(enough, high, probe)
    return low, high


def take(keys: Tensor, low: Tensor, high: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Take the keys above `high` and, up to k in all, those in (low, high] of lowest index.

    keys: int[n], of which at most k exceed high; low, high: 0-dim. Returns the indices int32[k], ascending, and how
    many of them count, 0-dim int32; later slots hold index n - 1. The taken are counted from the left, and the j-th
    index is where that count first reaches j: a compaction of a shape that is known beforehand.
    """
    larger = keys > high
    vacant = (k - torch.count_nonzero(larger)).to(torch.int32)
    equal = ((keys > low) & ~larger).cumsum(0, dtype=torch.int32)
    taken = larger.cumsum(0, dtype=torch.int32) + torch.minimum(equal, vacant)
    ranks = torch.arange(1, k + 1, dtype=torch.int32, device=keys.device)
    indices = torch.searchsorted(taken, ranks, out_int32=True)
    return indices.clamp_(max=len(keys) - 1), taken[-1].clone()


# Selections.


def select_largest_on_host(vector: Tensor, request: Request, search: Callable[[], NDArray[np.int32]]) -> Selection:
    """Return the k largest magnitudes of floats [n], ascending; of equals the lowest index, NaN largest.

    search: finds their positions by reading the vector; it is not asked where enough was noted when that was written.
    """
    bits, values = bit_view(vector).numpy(), None
    if isinstance(request.scratch, Candidates) and vector.dtype == torch.float32:
        found, values = request.scratch.largest(bits, magnitude_mask(vector.dtype), request.k, search)
    else:
        found = search()
    known = None if values is None else torch.from_numpy(values).view(vector.dtype)
    return Selection(torch.from_numpy(found), request.k, known)


def select_largest_on_device(vector: Tensor, request: Request) -> Selection:
    """Return the k largest magnitudes of floats [n], 1 <= k <= n, ascending; of equals the lowest index, NaN largest.

    Nothing waits for the device.
    """
    if gpu.has_kernels(vector):
        return select_in_kernels(vector, request, exact=True)
    return Selection(largest_magnitudes_on_device(vector, request.k), request.k)


def select_in_kernels(vector: Tensor, request: Request, *, exact: bool) -> Selection:
    """Return k of the largest magnitudes of fp32 [n], 1 <= k <= n, ascending, with their values; nothing waits.

    exact: the k largest. Else all that are larger than the k-th by an eighth of an octave, and of those as large as it
    within that the first: for methods that estimate the k-th, which a histogram finds in one pass.
    """
    scratch = scratch_of(vector, request)
    return later_or_now(vector, request, partial(gpu.select_largest, vector, request.k, scratch, exact=exact))


def scratch_of(vector: Tensor, request: Request) -> gpu.Scratch:
    """Return the scratch of the request, or a new one."""
    if request.scratch is None:
        return gpu.Scratch(vector.numel(), vector.device)
    assert isinstance(request.scratch, gpu.Scratch)  # that of the host is not given where a device selects
    return request.scratch


def later_or_now(vector: Tensor, request: Request, select: Select) -> Selection:
    """Return the selection of `select`, deferred where the request has a scratch: it may then be made in a message."""
    deferred = Deferred(request.k, vector.device, select)
    return deferred if request.scratch is not None else Selection(deferred.indices, deferred.count, deferred.values)


# The method.


class TopK(Sparsifier):
    """Sparsifier of the k coordinates of largest magnitude.

    Of all choices of k coordinates this one has the smallest residual: ||a - sent||^2 <= (1 - k/n) ||a||^2
    (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018). count is always k. Equal
    magnitudes go to the lowest index and NaN counts as larger than inf, on every device, so the selection is
    a function of the vector's bits alone.

    Use it where the selection must be exact. On the CPU, with the compiled loops, it costs little more than
    reading the vector, and so it does on a GPU with Triton, by computation (`sparsifiers.gpu`); on other devices
    `torch.topk` dominates and a threshold estimator is cheaper. A density of 0.01 is the usual start; 0.001 needs a
    warm-up.
    """

    name = "topk"
    has_kernels = True
    takes_candidates = True

    def _select(self, vector: Tensor, request: Request) -> Selection:
        bits, mask = bit_view(vector).numpy(), magnitude_mask(vector.dtype)
        return select_largest_on_host(vector, request, lambda: largest_magnitudes(bits, mask, request.k))

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        return select_largest_on_device(vector, request)
