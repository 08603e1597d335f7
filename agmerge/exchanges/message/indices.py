# SPDX-License-Identifier: Apache-2.0
"""Write ascending, unique indices as bytes, of a number that depends on length and capacity only: index codecs.

Four layouts. ``int32`` is the plain one, for very few. ``bitmap`` is one bit an element, for more than a quarter.
``all`` is no bits, where every element is sent. Between the first two, the vector is cut into blocks of ``2**low``
elements: the low bits of every index stand side by side. The number in each block is told in unary (a one for
each index, a zero for each end of a block: Elias and Fano), so that an entry takes ``low + 1`` bits and a block takes
one. Counts of a byte or two a block are never smaller than the best of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from agmerge.exchanges.message import bits, device_bits
from sparsifiers import native
from sparsifiers.gpu.layout import BITMAP, PLAIN, IndexLayout

GRAIN = 16  # bytes; sections of a message start on such a boundary
_LOWS = (8, 16, 24, 2, 4, 6, 10, 12, 14, 18, 20, 22, 26, 28, 30)  # whole bytes first: they are cheaper


class IndexCodec(ABC):
    """Codec of the indices of up to ``capacity`` elements of a vector of ``length`` elements."""

    name: str  # in figures and errors
    identity: int  # in a message, 1 to 255
    size: int  # bytes, a pure function of length and capacity
    sends_all: ClassVar[bool] = False  # every element has an entry, so that no indices travel
    blank: ClassVar[int] = 0  # the byte of which bytes without any index consist
    layout: IndexLayout | None = None  # as kernels of a device know it; None: there is nothing to write

    def __init__(self, length: int, capacity: int) -> None:
        self.length, self.capacity = length, capacity

    @abstractmethod
    def encode(self, indices: Tensor, count: int | Tensor, out: Tensor) -> None:
        """Write the first ``count`` of ``indices``, int32[capacity], into ``out``, uint8[size], and fill all of it.

        A count on a device, int32, 0-dim, stays there.
        """

    def decode(self, data: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the ``count`` indices in ``data``, uint8[size]: int32[count]; and whether they can be right: bool.

        They can be if the bytes are those of so many, and all are ascending and within the vector. Damaged
        bytes raise no error.
        """
        if data.device.type == "cpu":
            return self._decode(data, count)
        indices, good = self.decode_rows(data.unsqueeze(0), torch.full((1,), count, device=data.device))
        return indices[0, :count], good[0]

    def decode_rows(self, data: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return several ranks' indices, int32[W, capacity], and whether each rank's can be right, bool[W].

        ``data``: uint8[W, size]; ``counts``: int[W], which are not waited for. Entries at and after a rank's count
        are 0. Damaged bytes, too, give indices within the vector, and raise no error.
        """
        slots = torch.arange(self.capacity, dtype=torch.int32, device=data.device)
        behind = slots >= counts.unsqueeze(1)
        places, whole = self._places(data, slots, counts)
        within = places.clamp(0, self.length - 1)
        right = within == places
        right[:, 1:] &= places[:, 1:] > places[:, :-1]
        return within.masked_fill_(behind, 0), (right | behind).all(1) & whole

    @abstractmethod
    def _decode(self, data: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Decode in the host's memory, for :meth:`decode`."""

    @abstractmethod
    def _places(self, data: Tensor, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number in each entry of ``data``, uint8[W, size]: int32[W, capacity], any behind ``counts``.

        ``slots``: 0 to ``capacity`` - 1, int32. A number that cannot stand in ``capacity`` entries is no index of the
        vector. Also returns which ranks' bytes hold as many as ``counts``: bool[W].
        """


class Int32(IndexCodec):
    """Index codec of four bytes an entry."""

    name, identity, blank = "int32", 1, 255  # indices of -1

    def __init__(self, length: int, capacity: int) -> None:
        super().__init__(length, capacity)
        self.size, self.layout = 4 * capacity, IndexLayout(length, capacity, PLAIN)

    def encode(self, indices: Tensor, count: int | Tensor, out: Tensor) -> None:
        held = out.view(torch.int32)
        if isinstance(count, Tensor):
            torch.mul(indices, _live(indices, count), out=held)
        else:
            held[:count].copy_(indices[:count])
            held[count:] = 0

    def _decode(self, data: Tensor, count: int) -> tuple[Tensor, Tensor]:
        indices = data.view(torch.int32)[:count]
        return indices, in_order(indices, self.length)

    def _places(self, data: Tensor, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return data.view(torch.int32), counts <= self.capacity


class Bitmap(IndexCodec):
    """Index codec of one bit an element of the vector."""

    name, identity = "bitmap", 2

    def __init__(self, length: int, capacity: int) -> None:
        super().__init__(length, capacity)
        self.size, self.layout = bits.bytes_of(length, 1), IndexLayout(length, capacity, BITMAP)

    def encode(self, indices: Tensor, count: int | Tensor, out: Tensor) -> None:
        if isinstance(count, Tensor):
            bits.mark(torch.where(_live(indices, count), indices, 8 * self.size), out)
        else:
            bits.mark(indices[:count], out)

    def _decode(self, data: Tensor, count: int) -> tuple[Tensor, Tensor]:
        places, total = bits.marked(data, count)
        good = total == count
        return places, good & (places[-1] < self.length) if count else good  # marks are ascending

    def _places(self, data: Tensor, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        places, totals = device_bits.marked(data, self.capacity)
        return places, totals == counts


class Everything(IndexCodec):
    """Index codec without bytes: every element of the vector has an entry, in order, and all are in use.

    The sender gives elements that are not selected the value 0.
    """

    name, identity, size, sends_all = "all", 3, 0, True

    def __init__(self, length: int) -> None:
        super().__init__(length, length)

    def encode(self, indices: Tensor, count: int | Tensor, out: Tensor) -> None:
        pass

    def _decode(self, data: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return torch.arange(count, dtype=torch.int32), torch.tensor(count == self.length)

    def _places(self, data: Tensor, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return slots.expand(len(data), -1), counts == self.length


class Blocks(IndexCodec):
    """Index codec of ``low`` bits an entry in blocks of ``2**low`` elements; counts take a bit an entry and a block.

    low: even, 2 to 30. The low bits lie in planes of 16, 8, 4 and 2 bits, the counts behind them.
    """

    def __init__(self, length: int, capacity: int, low: int) -> None:
        super().__init__(length, capacity)
        self.low, self.name, self.identity = low, f"{low}-bit", 16 + low
        self.layout = IndexLayout(length, capacity, low)
        self.last = max(length - 1, 0) >> low  # the last block
        self._planes = []
        start, shift = 0, 0
        for width in (16, 8, 4, 2):
            if low & width:
                stop = start + bits.bytes_of(capacity, width)
                self._planes.append((slice(start, stop), width, shift))
                start, shift = stop, shift + width
        self._unary = slice(start, start + bits.bytes_of(capacity + self.last, 1))
        self.size = self._unary.stop

    def encode(self, indices: Tensor, count: int | Tensor, out: Tensor) -> None:
        if not isinstance(count, Tensor):
            if native.blocks_encode(indices, count, self.capacity, self.low, self.last, out):
                return
            indices = indices[:count]
        slots = torch.arange(indices.numel(), dtype=torch.int32, device=indices.device)
        places = (indices >> self.low).add_(slots)
        if isinstance(count, Tensor):
            live = slots < count
            indices = indices * live
            places = torch.where(live, places, 8 * (self._unary.stop - self._unary.start))
        for plane, width, shift in self._planes:
            bits.pack(indices >> shift if shift else indices, width, out[plane])
        bits.mark(places, out[self._unary])

    def _decode(self, data: Tensor, count: int) -> tuple[Tensor, Tensor]:
        compiled = native.blocks_decode(data, count, self.capacity, self.low, self.last)
        if compiled is not None:
            indices, right = compiled
            return indices, in_order(indices, self.length) & right
        places, total = bits.marked(data[self._unary], count)
        block = places.sub_(torch.arange(count, dtype=torch.int32, device=data.device))
        good = total == count
        if count:
            good = good & (block[-1] <= self.last)  # before the shift could lose bits
        indices = block << self.low
        for plane, width, shift in self._planes:
            part = bits.unpack(data[plane], width, count)
            indices |= part << shift if shift else part
        return indices, good & in_order(indices, self.length)

    def _places(self, data: Tensor, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        marks, totals = device_bits.marked(data[:, self._unary], self.capacity)
        # Behind the last block there is nothing, also where the shift loses bits.
        indices = marks.sub_(slots).clamp_(max=self.last + 1) << self.low
        for plane, width, shift in self._planes:
            part = device_bits.integers(data[:, plane], width, self.capacity)
            indices |= part << shift if shift else part
        return indices, totals == counts


def in_order(indices: Tensor, length: int) -> Tensor:
    """Return whether ``indices`` are ascending, unique and within ``[0, length)``: bool, 0-dim."""
    if indices.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=indices.device)
    if indices.device.type == "cpu":
        held = indices.numpy()
        good = native.ascends(held, length)
        if good is None:
            good = bool((held[1:] > held[:-1]).all() and held[0] >= 0 and held[-1] < length)
        return torch.tensor(good)
    ascending = (indices[1:] > indices[:-1]).all()
    return ascending & (indices[0] >= 0) & (indices[-1] < length)


def candidates(length: int, capacity: int) -> Iterator[IndexCodec]:
    """Yield all codecs that take any indices of such a vector, the cheapest to write and read first."""
    yield Int32(length, capacity)
    yield Bitmap(length, capacity)
    for low in _LOWS:
        yield Blocks(length, capacity, low)


@lru_cache(maxsize=4096)
def smallest(length: int, capacity: int, grain: int = GRAIN) -> IndexCodec:
    """Return the codec of fewest bytes where sections take multiples of ``grain`` bytes; of equals, the cheapest.

    Cheap is to write and to read. ``length`` and ``capacity`` as in :class:`IndexCodec`.
    """
    plain, bitmap = -(-4 * capacity // grain), -(-bits.bytes_of(length, 1) // grain)
    # Blocks of about as many elements as there are for each index; others are larger, whatever is rounded up.
    middle = (length // max(capacity, 1)).bit_length()
    near = [low for low in _LOWS if abs(low - middle) <= 4] or [_LOWS[-1]]
    sizes = [-(-_bytes_of_blocks(length, capacity, low) // grain) for low in near]
    size, low = min(sizes), near[sizes.index(min(sizes))]
    if plain <= min(bitmap, size):
        return Int32(length, capacity)
    return Bitmap(length, capacity) if bitmap <= size else Blocks(length, capacity, low)


def _bytes_of_blocks(length: int, capacity: int, low: int) -> int:
    """Return the size of :class:`Blocks`, without making one."""
    planes = sum(bits.bytes_of(capacity, width) for width in (16, 8, 4, 2) if low & width)
    return planes + bits.bytes_of(capacity + (max(length - 1, 0) >> low), 1)


def _live(indices: Tensor, count: Tensor) -> Tensor:
    """Return which entries are in use, the first ``count``: bool[capacity]."""
    return torch.arange(indices.numel(), dtype=torch.int32, device=indices.device) < count
