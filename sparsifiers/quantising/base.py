# SPDX-License-Identifier: Apache-2.0
"""Common base of quantisers: tensors become blocks, blocks bytes, and bytes the same numbers on every machine."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from sparsifiers import native
from sparsifiers.base import Compressor, Kind
from sparsifiers.gpu import records
from sparsifiers.gpu.tables import BlockRun, BlockTable
from sparsifiers.quantising.draws import Draws, key_within

# Blocks, which share a scale: a pure function of the shape.

VERSION = 2  # of blocks, levels, scales and random words: with another one the same gradients become other bits
LARGEST = 256  # coordinates of a block; 1024 and 4096 cost 1 % of a small GPT's loss, 64 to 256 nothing
LEAST = 64  # a scale of 16 bits then costs a quarter of a bit a coordinate


def block_size(shape: Sequence[int]) -> int:
    """Return the coordinates of each block of a tensor of this shape: 64, 128 or 256.

    It is the largest of these that divides a row, so that no block spans two of them: a row without a gradient,
    of an embedding or an expert, stays exactly zero, and small rows are not drowned by large ones. Where none does, it
    is 256, and blocks go across rows. A row has one index of the first dimension. Where blocks mix zeros and others,
    quantisers keep the zeros.
    """
    row = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
    size = math.gcd(row, LARGEST)
    return size if size >= LEAST else LARGEST


def blocks_in(numel: int, size: int) -> int:
    """Return how many blocks so many elements have; zeros fill up the last one."""
    return -(-numel // size)


# The choice among several compressors, of which training takes one by the time of its steps.

NONE = "none"  # among candidates: every element, as it is
NARROW = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that quantisers are given; wider ones travel dense


class Choice(Compressor):
    """Choice among candidates that send every element without error feedback, the most exact one first.

    candidates: names of quantisers, after "none" if elements may travel as they are.
    until_chosen: the one that is used before one is chosen; not "none".
    most_workers: by name, with how many workers it is a candidate at most; without limit if it is not there.
    """

    name = "auto"
    kind = Kind.QUANTISED

    def __init__(
        self, candidates: Sequence[str], until_chosen: str, most_workers: Mapping[str, int] | None = None
    ) -> None:
        self.candidates, self.until_chosen = tuple(candidates), until_chosen
        self.most_workers = dict(most_workers or {})
        if until_chosen not in self.candidates or until_chosen == NONE:
            raise ValueError(
                f"until_chosen={until_chosen!r}: expected one of {', '.join(self.candidates)} except {NONE!r}"
            )

    def is_for(self, dtype: torch.dtype) -> bool:
        return dtype in NARROW

    def options(self) -> dict[str, object]:
        limits = {"most_workers": tuple(sorted(self.most_workers.items()))} if self.most_workers else {}
        return {"candidates": self.candidates, "until_chosen": self.until_chosen, **limits}


# The base class.

WRITTEN = (
    "__init__",
    "record_bytes",
    "_encode",
    "_encode_known",
    "_decode",
    "_zeros",
    "encode",
    "decode_sum",
)  # methods that compiled loops replace
NO_LOOP, INT4, INT8 = 0, 5, 6  # numbers of quantizers in csrc/kernel_quantise.h; eden's are its bits
Words = tuple[int, int]  # key and first block: `Draws`
Record = tuple[int, int]  # number of a quantizer, and bytes of a block
PART = 1024  # blocks that the host quantises at once: intermediate results stay in the cache


class Quantizer(Compressor):
    """Base class of compressors that send every coordinate in few bits, block by block.

    A subclass sets ``name``, ``bits`` and ``unbiased``, and writes ``record_bytes``, ``_encode`` and ``_decode``. If it
    needs error feedback, it sets ``memory`` to ``"residual"`` (docs/extend.md). Each block becomes a record of bytes
    that can be read independently. Draw random numbers only from ``Draws``, so that a block gives the same bytes in
    every message. The decoded values must be bitwise identical on every machine: use integers, single operations in a
    fixed order, and no fused multiply-add.
    """

    kind = Kind.QUANTISED
    bits: float  # of a coordinate, scales not counted
    unbiased: ClassVar[bool]  # the mean over draws of the values read is the vector
    masks_zeros: ClassVar[bool] = False  # zeros beside other values in a block take bits from these
    noise: float = 0.0  # squared error of normally distributed blocks / their squares, about; 0: too small to mention

    @property
    def needs_feedback(self) -> bool:
        """Return whether rounding errors must be sent later, because training would stall otherwise."""
        return self.memory != "none"

    def loops(self) -> int:
        """Return the number of the compiled loops that write and read the same bits.

        They are not used by a subclass that writes one of `WRITTEN` itself.
        """
        return NO_LOOP

    @abstractmethod
    def record_bytes(self, size: int) -> int:
        """Return the number of bytes for one block of ``size`` coordinates (64, 128 or 256)."""

    @abstractmethod
    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        """Write `blocks`, float32[n, size], to `out`, uint8[n, record_bytes(size)]. `blocks` may be changed.

        A block with a value that is not finite has to be read as NaN. Zeros have to be read as zeros, also beside
        other values: what is zero on all ranks is zero in `p.grad`.
        """

    @abstractmethod
    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        """Return the values that receivers read of `data`, uint8[n, record_bytes(size)]: a new float32[n, size].

        Bytes that are all 0 have to be read as zeros: a sender writes them for a tensor without a gradient.

        draws: those that `_encode` had.
        """

    def _encode_known(self, blocks: Tensor, zeros: Tensor, draws: Draws, out: Tensor) -> None:
        """Write `blocks`, as `_encode` does, of which only some zeros have to be read as such: bool[n, size].

        For one that sends zeros in bits of their own: what fills up a tensor need not cost any, nor a sum that is 0 by
        chance.
        """
        self._encode(blocks, draws, out)

    def _zeros(self, data: Tensor, draws: Draws, size: int) -> Tensor | None:
        """Return which coordinates of records hold no value, bool[n, size]; None: those that are read as 0.

        data, draws: as of `_decode`.
        """
        return None

    # -- for exchanges ------------------------------------------------------------------------------------------------

    def encode(self, values: Tensor, size: int, draws: Draws, out: Tensor, squares: Tensor | None = None) -> None:
        """Write all blocks of `values`.

        values: 1-D, contiguous, of float32, bfloat16 or float16; zeros fill up the last block.
        size: coordinates of a block, see `sparsifiers.quantising.base.block_size`.
        draws: for these blocks, of the sender's own key.
        out: uint8, 1-D, of `record_bytes(size)` for each block.
        squares: float64[1]: the sum of all squares is added to it, right to 2**-20 of it, so it is for nothing that has
        to be equal on all ranks; not finite if one of the values is not.
        """
        record = self._record(size)
        if quantize_by_loop(values, size, draws, out, squares, record):
            return
        if not records.encode(values, size, draws, out, squares, record[0]):
            self._encode_in_torch(values, size, draws, out, squares)

    def encode_difference(
        self, values: Tensor, less: Tensor, size: int, draws: Draws, out: Tensor, squares: Tensor | None = None
    ) -> None:
        """Write all blocks of `values - less`, as :meth:`encode` does; both have one shape and dtype."""
        if not quantize_by_loop(values, size, draws, out, squares, self._record(size), less):
            self.encode(values - less, size, draws, out, squares)

    def _encode_in_torch(self, values: Tensor, size: int, draws: Draws, out: Tensor, squares: Tensor | None) -> None:
        """Do the work of :meth:`encode` by torch's operations."""
        rows = out.view(-1, self.record_bytes(size))
        for start, stop in _parts(rows):
            part = _blocks_of(values[start * size : stop * size], size)
            if squares is not None:
                squares += part.to(torch.float64).square_().sum()
            zeros = part == 0
            zeros.view(-1)[values.numel() - start * size :] = False  # behind the last one there is nothing to keep
            self._encode_known(part, zeros, draws.after(start), rows[start:stop])

    def decode_sum(
        self, messages: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, out: Tensor
    ) -> None:
        """Write `scale` times the sum of all messages' values, added in their order in float32.

        messages, draws: of each sender, as `encode` had them.
        out: 1-D, contiguous, as long as the values, of float32, bfloat16 or float16.
        """
        record = self._record(size)
        if add_by_loop(messages, draws, size, scale, out, record):
            return
        if not records.decode_sum(messages, draws, size, scale, out, record[0]):
            self._decode_sum_in_torch(messages, draws, size, scale, out)

    def _decode_sum_in_torch(
        self, messages: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, out: Tensor
    ) -> None:
        """Do the work of :meth:`decode_sum` by torch's operations."""
        rows = [message.view(-1, self.record_bytes(size)) for message in messages]
        for start, stop in _parts(rows[0]):
            total = self._sum(rows, draws, size, scale, slice(start, stop))
            where = out[start * size : stop * size]
            where.copy_(total.view(-1)[: where.numel()])

    def encode_sum(
        self,
        messages: Sequence[Tensor],
        draws: Sequence[Draws],
        size: int,
        scale: float,
        second: Quantizer,
        own: Draws,
        out: Tensor,
    ) -> None:
        """Write the sum of :meth:`decode_sum`, quantized once more: nothing of the vector's size is allocated.

        second, own: the quantizer of the sum, and its draws.
        out: uint8, 1-D, of `second.record_bytes(size)` for each block.
        """
        by = self._record(size), second._record(size)
        if quantize_sum_by_loop(messages, draws, size, scale, own, out, *by):
            return
        if not records.encode_sum(messages, draws, size, scale, own, out, by[0][0], by[1]):
            self._encode_sum_in_torch(messages, draws, size, scale, second, own, out)

    def _encode_sum_in_torch(
        self,
        messages: Sequence[Tensor],
        draws: Sequence[Draws],
        size: int,
        scale: float,
        second: Quantizer,
        own: Draws,
        out: Tensor,
    ) -> None:
        """Do the work of :meth:`encode_sum` by torch's operations."""
        rows = [message.view(-1, self.record_bytes(size)) for message in messages]
        written = out.view(-1, second.record_bytes(size))
        for start, stop in _parts(rows[0]):
            part = slice(start, stop)
            total = self._sum(rows, draws, size, scale, part)
            zeros = [self._zeros(data[part], each.after(start), size) for data, each in zip(rows, draws, strict=True)]
            known = total == 0
            for one in zeros:
                known = known if one is None else known & one
            second._encode_known(total, known, own.after(start), written[part])

    # -- of many tensors at once --------------------------------------------------------------------------------------

    def encode_all(
        self, table: BlockTable, values: Sequence[Tensor | None], key: int, out: Tensor, squares: Tensor | None = None
    ) -> None:
        """Write the blocks of many tensors, as :meth:`encode` does of one: on a device in one launch.

        values: by run of `table`, its elements; None: zeros. key: of the message, under which each tensor has its own.
        out: uint8, 1-D, of which `table` says where records begin.
        """
        if table.runs and not records.encode_all(table, values, key, out, squares, self.loop_number()):
            self._encode_each(table, values, key, out, squares)

    def _encode_each(
        self, table: BlockTable, values: Sequence[Tensor | None], key: int, out: Tensor, squares: Tensor | None
    ) -> None:
        """Do the work of :meth:`encode_all`, tensor by tensor."""
        for run, given in zip(table.runs, values, strict=True):
            where = out[run.target : run.target + run.blocks * self.record_bytes(run.size)]
            if given is None:
                where.zero_()
            else:
                self.encode(given, run.size, _draws_of(run, key), where, squares)

    def decode_all(
        self, table: BlockTable, rows: Tensor, keys: Sequence[int], scale: float, outs: Sequence[Tensor]
    ) -> None:
        """Write the sums of many tensors, as :meth:`decode_sum` does of one: on a device in one launch.

        rows, keys: uint8[W, bytes], of all senders. outs: by run of `table`, its elements.
        """
        if table.runs and not records.decode_all(table, rows, keys, scale, outs, self.loop_number()):
            self._decode_each(table, rows, keys, scale, outs)

    def _decode_each(
        self, table: BlockTable, rows: Tensor, keys: Sequence[int], scale: float, outs: Sequence[Tensor]
    ) -> None:
        """Do the work of :meth:`decode_all`, tensor by tensor."""
        for run, out in zip(table.runs, outs, strict=True):
            draws = [_draws_of(run, key) for key in keys]
            self.decode_sum(self._records_of(run, rows), draws, run.size, scale, out)

    def encode_sum_all(
        self,
        table: BlockTable,
        rows: Tensor,
        keys: Sequence[int],
        scale: float,
        second: Quantizer,
        own: int,
        out: Tensor,
    ) -> None:
        """Write the sums of many tensors in bits again, as :meth:`encode_sum` does of one: on a device in one launch.

        rows, keys: uint8[W, bytes], of all senders. own: key of what is written. out: as of :meth:`encode_all`.
        """
        numbers = self.loop_number(), second.loop_number()
        if table.runs and not records.encode_sum_all(table, rows, keys, scale, own, out, *numbers):
            self._encode_sum_each(table, rows, keys, scale, second, own, out)

    def _encode_sum_each(
        self,
        table: BlockTable,
        rows: Tensor,
        keys: Sequence[int],
        scale: float,
        second: Quantizer,
        own: int,
        out: Tensor,
    ) -> None:
        """Do the work of :meth:`encode_sum_all`, tensor by tensor."""
        for run in table.runs:
            where = out[run.target : run.target + run.blocks * second.record_bytes(run.size)]
            draws = [_draws_of(run, key) for key in keys]
            messages = self._records_of(run, rows)
            self.encode_sum(messages, draws, run.size, scale, second, _draws_of(run, own), where)

    def _records_of(self, run: BlockRun, rows: Tensor) -> list[Tensor]:
        """Return the records of a run, of each sender."""
        return list(rows[:, run.source : run.source + run.blocks * self.record_bytes(run.size)])

    def _record(self, size: int) -> Record:
        """Return the number of the loops to use, and the bytes of a record."""
        known: dict[int, Record] = vars(self).setdefault("_records", {})  # a subclass need not call a constructor
        if size not in known:
            known[size] = self.loop_number(), self.record_bytes(size)
        return known[size]

    def loop_number(self) -> int:
        """Return the number of the loops to use."""
        return self.loops() if _has_loops(type(self)) else NO_LOOP

    def _sum(self, rows: Sequence[Tensor], draws: Sequence[Draws], size: int, scale: float, part: slice) -> Tensor:
        """Return the scaled sum of the values in some records of all senders, `part`: float32[blocks, size]."""
        first, *others = [
            self._decode(data[part], each.after(part.start), size) for data, each in zip(rows, draws, strict=True)
        ]
        for read in others:
            first.add_(read)
        return first.mul_(scale)


@functools.cache
def _has_loops(kind: type[Quantizer]) -> bool:
    """Return whether a class writes nothing itself that the loops replace, which it or a base names."""
    named = next(each for each in kind.__mro__ if "loops" in vars(each))
    return all(getattr(kind, name) is getattr(named, name) for name in WRITTEN)


def _draws_of(run: BlockRun, key: int) -> Draws:
    """Return the random words of a run under the key of a message."""
    return Draws(key_within(key, run.number), run.first)


def _parts(rows: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the rows that are worked on at once: all of them on a device."""
    step = PART if rows.device.type == "cpu" else max(len(rows), 1)
    for start in range(0, len(rows), step):
        yield start, min(start + step, len(rows))


def _blocks_of(values: Tensor, size: int) -> Tensor:
    """Return `values`, 1-D, as a new float32[blocks, size] with zeros behind them."""
    missing = blocks_in(values.numel(), size) * size - values.numel()
    rows = pad(values, (0, missing)) if missing else values
    return rows.to(torch.float32, copy=True).view(-1, size)


# Compiled loops: bytes and values have the bits that torch's operations above give. A function returns False, with
# nothing done, if torch must do the work.


def quantize_by_loop(
    values: Tensor, size: int, draws: Words, out: Tensor, squares: Tensor | None, record: Record,
    less: Tensor | None = None,
) -> bool:  # fmt: skip
    """Write all blocks of ``values - less``, as `Quantizer.encode` does; False: torch must."""
    n, kind, (number, bytes_each) = values.numel(), native.KINDS.get(values.dtype), record
    fits = number and n and out.numel() == -(-n // size) * bytes_each
    fits = fits and (less is None or (kind == 0 and less.shape == values.shape))
    return bool(fits) and native.QUANTIZE(values, less, n, kind, number, size, *draws, out, squares) is not None


def add_by_loop(
    messages: Sequence[Tensor], draws: Sequence[Words], size: int, scale: float, out: Tensor, record: Record
) -> bool:
    """Write ``scale`` times the sum of all messages' values, as `Quantizer.decode_sum` does; False: torch must."""
    n, (number, bytes_each) = out.numel(), record
    if not number or not n or not _are_records(messages, draws, -(-n // size) * bytes_each):
        return False
    given = _senders(messages, draws)
    sizes = *map(native.address, given), len(messages), number, size, scale
    return native.ADD_QUANTIZED(*sizes, out, n, native.KINDS.get(out.dtype)) is not None


def quantize_sum_by_loop(
    messages: Sequence[Tensor], draws: Sequence[Words], size: int, scale: float, own: Words, out: Tensor,
    first: Record, second: Record,
) -> bool:  # fmt: skip
    """Write the sum of `add_quantized` by another quantizer, as `Quantizer.encode_sum` does; False: torch must."""
    blocks, rest = divmod(out.numel(), second[1])
    if not (first[0] and second[0] and blocks) or rest or not _are_records(messages, draws, blocks * first[1]):
        return False
    given = _senders(messages, draws)
    sizes = *map(native.address, given), len(messages), first[0], size, scale
    return native.QUANTIZE_SUM(*sizes, second[0], *own, out, blocks) is not None


def _are_records(messages: Sequence[Tensor], draws: Sequence[Words], size: int) -> bool:
    """Return whether there are messages, of ``size`` bytes each, that the loops can read, with draws for each."""
    fits = [message.numel() == size and native.plain(message, dtype=torch.uint8) for message in messages]
    return 0 < len(messages) == len(draws) and all(fits)


def _senders(messages: Sequence[Tensor], draws: Sequence[Words]) -> tuple[NDArray[Any], ...]:
    """Return addresses, keys and first blocks of the messages of all senders, 64 bits each."""
    addresses = np.array([message.data_ptr() for message in messages], dtype=np.uint64)
    keys, firsts = zip(*draws, strict=True)
    return addresses, np.array(keys, dtype=np.uint64), np.array(firsts, dtype=np.int64)


Quantiser = Quantizer  # the old spelling: scripts and pickles have it
