# SPDX-License-Identifier: Apache-2.0
"""Layout of a quantised message: for each shard header | figures | records of blocks | plain values.

Everything starts on a 16-byte boundary and is little-endian. The header is that of sparse messages, with no elements
announced. The figures are 64-bit words, see :data:`FIGURES`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from agmerge.exchanges.message.format import Format, RoundHeader
from agmerge.exchanges.message.indices import GRAIN
from agmerge.tensors.layout import ALIGNMENT, Segment, Slot, aligned
from sparsifiers import native
from sparsifiers.gpu.tables import BlockRun, BlockTable
from sparsifiers.quantising.base import block_size, blocks_in

# Shards of a message, one an owner: pure functions, with the same results on every rank.


@dataclass(frozen=True)
class Piece:
    """Consecutive blocks of one tensor that lie in one shard."""

    slot: Slot
    size: int  # coordinates of a block
    first: int  # number of the first of them in the tensor
    blocks: int

    @cached_property
    def elements(self) -> slice:
        """Elements of the tensor, 1-D, that the blocks cover; zeros fill up its last block."""
        return slice(self.first * self.size, min((self.first + self.blocks) * self.size, self.slot.numel))


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a segment that travel as they are, in one shard."""

    segment: Segment
    start: int  # counted from the first of the segment
    stop: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the elements, in the gradient's dtype."""
        return (self.stop - self.start) * self.segment.tensor_class.dtype.itemsize


# Coordinates that lie side by side in a fragment, at most. Shorter runs stay in a cache, but with a GPT-2 of 14 million
# parameters runs of a quarter of this made a step 40 ms longer, of 440: each costs some calls.
RUN = 1 << 18
RUNS = 16  # of a message in each fragment, at least, unless they are shorter than LEAST
LEAST = 1 << 11


def whole_pieces(slots: Sequence[Slot]) -> list[Piece]:
    """Return one piece for each of ``slots``, with all of its blocks."""
    sizes = [block_size(slot.shape) for slot in slots]
    return [Piece(slot, size, 0, blocks_in(slot.numel, size)) for slot, size in zip(slots, sizes, strict=True)]


def fragment_of(slots: Sequence[Slot], fragments: int, fragment: int) -> list[Piece]:
    """Return the pieces of one of several fragments: every ``fragments``-th run of blocks.

    Runs are counted over all blocks, in the order of ``slots``. So fragments are about equally long, and each has a
    part of every large tensor.
    """
    pieces = whole_pieces(slots)
    if fragments == 1:
        return pieces
    total = sum(piece.blocks * piece.size for piece in pieces)
    run = min(RUN, max(LEAST, total // (RUNS * fragments)))
    return [
        piece
        for number, row in enumerate(_cut(pieces, run, -(-total // run)))
        if number % fragments == fragment
        for piece in row
    ]


def cut_blocks(pieces: Sequence[Piece], shards: int) -> list[list[Piece]]:
    """Return the pieces of each shard: whole blocks in the order of ``pieces``, about as many coordinates a shard."""
    total = sum(piece.blocks * piece.size for piece in pieces)
    return _cut(pieces, -(-total // shards), shards)


def _cut(pieces: Sequence[Piece], each: int, parts: int) -> list[list[Piece]]:
    """Return ``pieces`` cut into so many parts of about ``each`` coordinates.

    A block lies where its first coordinate does, counted over all blocks.
    """
    found: list[list[Piece]] = [[] for _ in range(parts)]
    before = 0  # coordinates of the pieces that came first
    for piece in pieces:
        size, blocks = piece.size, piece.blocks
        for part in range(before // each, (before + blocks * size - 1) // each + 1):
            first = max(0, -(-(part * each - before) // size))
            stop = min(blocks, -(-((part + 1) * each - before) // size))
            if first < stop:
                found[part].append(Piece(piece.slot, size, piece.first + first, stop - first))
        before += blocks * size
    return found


def cut_plain(segments: Sequence[Segment], shards: int) -> list[list[Run]]:
    """Return the runs of each shard: of every segment about as many elements."""
    runs: list[list[Run]] = [[] for _ in range(shards)]
    for segment in segments:
        each = aligned(-(-segment.length // shards), ALIGNMENT)
        for shard in range(shards):
            start, stop = shard * each, min((shard + 1) * each, segment.length)
            if start < stop:
                runs[shard].append(Run(segment, start, stop))
    return runs


# Bytes of a shard, and of a message.

# Figures behind the header: 1 + the rank of a message that arrived damaged in the first phase, or 0; the key of the
# random words, without the tensor; the squares of all quantised elements of the sender or senders, a float64; the
# checksum of all bytes from the figures on but itself.
FIGURES = ("fault", "key", "squares", "checksum")
_FAULT, _KEY, _SQUARES, _CHECKSUM = range(len(FIGURES))
WORD = 8  # bytes


class ShardLayout:
    """Layout of one shard's bytes: a pure function of its pieces, its runs and the bytes of a record."""

    def __init__(
        self, header: Format, pieces: Sequence[Piece], runs: Sequence[Run], record_bytes: Callable[[int], int]
    ) -> None:
        self.header = header
        self._figures = aligned(4 * header.words, GRAIN)  # where they begin
        end = self._figures + aligned(WORD * len(FIGURES), GRAIN)
        self.records: list[tuple[Piece, slice]] = []  # bytes of each piece
        self.plain: list[tuple[Run, slice]] = []  # bytes of each run
        for piece in pieces:
            stop = end + piece.blocks * record_bytes(piece.size)
            self.records.append((piece, slice(end, stop)))
            end = stop
        end = aligned(end, GRAIN)
        for run in runs:
            self.plain.append((run, slice(end, end + run.nbytes)))
            end = aligned(end + run.nbytes, GRAIN)
        self.size = end

    @cached_property
    def table(self) -> BlockTable:
        """Return the records for a quantiser, read and written at the same places of a shard."""
        return table_of((piece, where.start) for piece, where in self.records)

    @property
    def announced(self) -> int:
        """Return the bytes of the header and of the figures, in front of a shard."""
        return self._figures + WORD * len(FIGURES)

    def write_header(self, shard: Tensor, control: RoundHeader, *, fault: int, key: int, squares: Tensor) -> None:
        """Put ``control`` and the figures in front of ``shard``, uint8[size]; its other bytes are in place.

        ``squares``: float64[1]. On a device there is no checksum.
        """
        words = [half - (half >> 31 << 32) for word in (fault, key, 0, 0) for half in (word & 0xFFFFFFFF, word >> 32)]
        self.header.write_header(shard, control, [0] * len(self.header.sections), behind=words)
        self._figures_of(shard)[_SQUARES : _SQUARES + 1].view(torch.float64).copy_(squares)
        self.seal(shard)

    def seal(self, shard: Tensor) -> None:
        """Write the checksum; on a device there is none."""
        if shard.device.type == "cpu":
            self._figures_of(shard)[_CHECKSUM] = self._checksum(shard)

    def merge_headers(self, shard: Tensor, rows: Tensor, own: int, *, key: int) -> None:
        """Put the merged header and figures of ``rows``, uint8[W, size or more], in front of ``shard``.

        That is for devices: nothing waits. A row that does not belong with number ``own`` is announced as a fault.
        """
        out = shard, self._figures_of(shard)
        self.header.merge_on_device(rows, self._figures_of(rows), own, key - (key >> 63 << 64), out)

    def faults(self, rows: Tensor) -> list[int]:
        """Return the fault of the first phase that each of ``rows``, uint8[W, size or more], announces: see FIGURES."""
        found: list[int] = self._figures_of(rows)[:, _FAULT].tolist()
        return found

    def squares(self, rows: Tensor) -> Tensor:
        """Return the squares that each of ``rows``, uint8[W, size or more], announces: float64[W], a view."""
        return self._figures_of(rows)[:, _SQUARES : _SQUARES + 1].view(torch.float64)[:, 0]

    def damaged(self, rows: Tensor, key: Callable[[int], int] | None, *, sealed: bool | None = None) -> list[int]:
        """Return the numbers of ``rows``, uint8[W, size or more], that have changed since they were written.

        ``key``: the key of each sender, by number; another one counts as damage. None: keys are not checked.
        ``sealed``: they have checksums, which a device does not write; None: if they are on the host. If not, ``rows``
        may end behind what is :attr:`announced`.
        """
        figures = self._figures_of(rows)
        found = set()
        if key is not None:
            keys = [key(number) for number in range(len(rows))]
            announced = figures[:, _KEY].tolist()
            own = [one - (one >> 63 << 64) for one in keys]
            found = {number for number, pair in enumerate(zip(announced, own, strict=True)) if pair[0] != pair[1]}
        if rows.device.type == "cpu" if sealed is None else sealed:
            sums = figures[:, _CHECKSUM].tolist()
            found |= {number for number, written in enumerate(sums) if written != self._checksum(rows[number])}
        return sorted(found)

    def _figures_of(self, rows: Tensor) -> Tensor:
        """Return the figures of ``rows``, uint8[..., size or more]: int64[..., 4], a view."""
        return rows[..., self._figures : self._figures + WORD * len(FIGURES)].view(torch.int64)

    def _checksum(self, shard: Tensor) -> int:
        """Return the checksum of ``shard``, uint8[size or more], of all behind the header but itself: as int64."""
        end = self._figures + WORD * _CHECKSUM
        first = native.checksum(shard[self._figures : end])
        total = first + native.checksum(shard[end + WORD : self.size]) & (1 << 64) - 1
        return total - (total >> 63 << 64)


class MessageLayout:
    """Layout of one message's bytes in both phases.

    ``first``: the shards that a rank sends, one for each owner, one behind the other. ``second``: the shard that each
    owner sends, once it has added it up; empty where there is one phase, in which all ranks own all.
    """

    def __init__(self, first: Sequence[ShardLayout], second: Sequence[ShardLayout]) -> None:
        self.first, self.second = list(first), list(second)
        self.starts = [0]  # bytes before each shard of the first phase, and of all
        for shard in first:
            self.starts.append(self.starts[-1] + shard.size)
        self.size = self.starts[-1]  # bytes that a rank sends in the first phase
        self.has_plain = any(shard.plain for shard in first)  # dense segments travel in it, too
        self.longest = max((shard.size for shard in second), default=0)
        # By slot: its pieces, with their bytes in the message.
        self.pieces_of: dict[int, list[tuple[Piece, slice]]] = {}
        for shard, start in zip(first, self.starts, strict=False):
            for piece, where in shard.records:
                placed = slice(start + where.start, start + where.stop)
                self.pieces_of.setdefault(piece.slot.index, []).append((piece, placed))

    @cached_property
    def pieces(self) -> list[Piece]:
        """Return the pieces of all shards, one shard behind the other: those of :attr:`table` and :attr:`sums`."""
        return [piece for shard in self.first for piece, _ in shard.records]

    @cached_property
    def elements(self) -> int:
        """Return how many elements of quantised tensors the message has."""
        return sum(piece.elements.stop - piece.elements.start for piece in self.pieces)

    @cached_property
    def table(self) -> BlockTable:
        """Return the records of what a rank sends in the first phase, for a quantiser."""
        return self._table(self.first, self.starts)

    @cached_property
    def sums(self) -> BlockTable:
        """Return the records of what all owners send in the second phase, one behind the other."""
        return self._table(self.second, [owner * self.longest for owner in range(len(self.second))])

    def _table(self, shards: Sequence[ShardLayout], starts: Sequence[int]) -> BlockTable:
        """Return the records of shards that begin at these bytes."""
        return table_of(
            (piece, start + where.start) for shard, start in zip(shards, starts, strict=False)
            for piece, where in shard.records
        )  # fmt: skip

    def shard(self, message: Tensor, number: int) -> Tensor:
        """Return one shard of ``message``, uint8[size]: a view."""
        return message[self.starts[number] : self.starts[number + 1]]

    def write_headers(self, message: Tensor, control: RoundHeader, *, key: int, squares: Tensor) -> None:
        """Put the same header and figures in front of all shards of ``message`` in the first phase."""
        first, *others = [self.shard(message, number) for number in range(len(self.first))]
        self.first[0].write_header(first, control, fault=0, key=key, squares=squares)
        if others:
            end = self.first[0].announced
            torch._foreach_copy_([shard[:end] for shard in others], [first[:end]] * len(others))
        for layout, shard in zip(self.first[1:], others, strict=True):
            layout.seal(shard)


def table_of(placed: Iterable[tuple[Piece, int]]) -> BlockTable:
    """Return the table of pieces for a quantiser. `placed`: each with the byte where its records begin."""
    return BlockTable([
        BlockRun(
            number_of(piece.slot.name), piece.size, piece.first, piece.blocks,
            piece.elements.stop - piece.elements.start, start, start,
        )
        for piece, start in placed
    ])  # fmt: skip


@lru_cache(maxsize=1 << 16)
def number_of(name: str) -> int:
    """Return a number of 64 bits for the name of a tensor: the same whatever other tensors there are."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
