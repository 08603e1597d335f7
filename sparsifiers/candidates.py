# SPDX-License-Identifier: Apache-2.0
"""Selection without a search of all: from elements noted while a vector is written, or by the last step's threshold.

A pass that writes a vector piece by piece notes position and key of elements that exceed a floor, a little below the
last selection's smallest key. If k or more are held at last, the k largest of them are the k largest of the vector,
exactly. If fewer are, because the scale has dropped, or if there was no room, the vector is read as if nothing had been
noted. So nothing depends on the floor but time.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsifiers import exact_topk, kernel
from sparsifiers.exact_topk import INTEGERS, bit_view, magnitude_mask, workspace

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


# Candidates.

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
            smallest = kernel.cut(positions, keys, held, k, scratch)
            values = positions[:k] & ~mask | keys[:k]
            found = positions[:k] & mask
        if has_tried:
            too_few = lists is not None and held < k
            self._part = max(LEAST, self._part - DROP) if too_few else min(MOST, self._part + RISE)
        self._learn(smallest, k)
        return found, values

    def _gather(self, bits: NDArray[np.int32], mask: int, k: int) -> NDArray[np.int32] | None:
        """Return positions and keys of all that exceed the floor, in order, and as much scratch: int32[3, held].

        They lie in a `workspace`, which is of this thread or, where it is large, of this call alone.

        Elements between the stretches are read: small tensors, and those that another loop has written. None, if these
        are many, or there is no room.
        """
        stretches = sorted(self._stretches.values())
        unknown = self.length - sum([stop - start for start, stop, _, _ in stretches])
        if unknown > self.length // MUCH:
            return None
        spare = min(unknown, k + kernel.BLOCK)  # slots for elements that are read
        lists = workspace(sum([end - first for _, _, first, end in stretches]) + spare)
        positions, keys, _ = lists
        done = held = 0
        for start, stop, first, end in [*stretches, (self.length, self.length, 0, 0)]:
            if done < start:
                room, before = held + spare, held
                done, held = kernel.scan(bits[:start], done, mask, self._floor, positions[:room], keys[:room], held)
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
            self._addresses = kernel.address(self._list[0]), kernel.address(self._list[1])


class TensorNotes:
    """Notes of a loop that writes one tensor, the slices of which lie in one vector or several, for `kernel.add`."""

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
