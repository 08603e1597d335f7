# SPDX-License-Identifier: Apache-2.0
"""Exchange of messages in a compressor's own format: several tensors for each gradient, of any dtypes and lengths.

What a rank sends is known to itself alone, so ranks first gather the sizes. A message is ``table | tensors``: the table
has, for each gradient, the number of its tensors, and of each of them dtype and shape.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agmerge.errors import MessageError
from agmerge.exchanges.base import ExchangeContext, InFlight, SegmentBuffers
from agmerge.exchanges.dense import sum_in_rank_order
from agmerge.exchanges.message.format import Flag, Format, RoundHeader, write_numbers
from agmerge.exchanges.multi_round import MultiRoundExchange, Phases, State
from agmerge.ops import Average
from agmerge.tensors.layout import Slot, aligned
from agmerge.tensors.nonfinite import is_finite
from sparsifiers import Selection
from sparsifiers.custom import Custom

# The table, and the bytes of tensors.

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
GRAIN = 16  # bytes: the table and every tensor begin at a multiple
Parts = list[Tensor]  # the tensors of one gradient


def table_of(gradients: Sequence[Parts]) -> list[int]:
    """Return the table of a message: for each gradient the number of its tensors, then dtype and shape of each."""
    table = []
    for parts in gradients:
        table.append(len(parts))
        for part in parts:
            table += [DTYPES.index(part.dtype), part.dim(), *part.shape]
    return table


def written(
    gradients: Sequence[Parts], table: Sequence[int], device: torch.device, keep: Callable[[int], Tensor]
) -> Tensor:
    """Return a message: uint8, 1-D, on ``device``. ``table``: of these gradients. ``keep``: returns so many bytes."""
    first = torch.tensor(table, dtype=torch.int64).view(torch.uint8).to(device)
    rows = [first, *(part.reshape(-1).contiguous().view(torch.uint8) for parts in gradients for part in parts)]
    ends = [aligned(len(row), GRAIN) for row in rows]
    message = keep(sum(ends))
    for row, room in zip(rows, torch.split(message, ends), strict=True):
        room[: len(row)].copy_(row)
        room[len(row) :].zero_()
    return message


def by_dtype(gradients: Sequence[Parts]) -> list[tuple[list[int], Tensor]]:
    """Return the tensors of all gradients end to end: for each dtype the numbers of its tensors, and a copy of them."""
    parts = [part for own in gradients for part in own]
    found = []
    for dtype in dict.fromkeys(part.dtype for part in parts):
        numbers = [number for number, part in enumerate(parts) if part.dtype == dtype]
        found.append((numbers, torch.cat([parts[number].reshape(-1) for number in numbers])))
    return found


def read(message: Tensor, table_bytes: int, gradients: int) -> list[Parts]:
    """Return the tensors of each gradient, views of ``message``. ``table_bytes``: of its table.

    Raises ``ValueError`` for a table that does not fit the message.
    """
    words = iter(message[:table_bytes].contiguous().view(torch.int64).tolist())
    start, found = aligned(table_bytes, GRAIN), []
    try:
        for _ in range(gradients):
            parts = []
            for _ in range(next(words)):
                dtype = DTYPES[next(words)]
                shape = [next(words) for _ in range(next(words))]
                size = dtype.itemsize * torch.Size(shape).numel()
                parts.append(message[start : start + size].view(dtype).view(shape))
                start += aligned(size, GRAIN)
            found.append(parts)
    except (IndexError, RuntimeError, StopIteration) as error:
        raise ValueError("the table does not fit the message") from error
    return found


# The exchange.


@dataclass
class Encoded:
    """Gradient of one tensor as this rank's compressor has made it."""

    slot: Slot
    out: Tensor  # where its update is written: 1-D
    parts: Parts
    ctx: Any  # for this rank's ``decode``


@dataclass
class _State(State):
    """State of a message under way."""

    layout: Format | None = None  # of the header
    encoded: list[Encoded] = field(default_factory=list)
    flat: list[tuple[list[int], Tensor]] = field(default_factory=list)  # as of :func:`by_dtype`, if they are added up
    error: Exception | None = None  # of this rank's compressor
    gathered: list[list[Parts]] = field(default_factory=list)  # by rank and gradient; one row if they are added up


class CustomExchange(MultiRoundExchange):
    """All-gather of what a script's own compressor makes of each gradient; or a sum, if the compressor asks for it.

    1. ``start``: each rank compresses every gradient of the merge buffer. Headers and sizes are gathered, under
       backward.
    2. ``wait``: the messages are gathered, each as long as the longest. With ``sums`` all-reduces add up the tensors,
       one for each dtype; with ``context.ordered`` they are gathered, and added in rank order.
    3. ``finish``: each rank decompresses the tensors of every rank, combines them, and writes the update.

    An error of the compressor on one rank is an error on all ranks.
    """

    sparse = False
    carries_dense = mixes_classes = False

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        assert context.custom is not None
        self.custom: Custom = context.custom
        self._reduces = self.custom.sums and not context.ordered  # tensors are added up on their way

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Compress the gradients; send the header and the sizes."""
        layout = self.format_of(name, loads, [0] * len(loads))
        state = _State(layout=layout)
        if not control.flags & Flag.REPLAN:
            self._encode(loads, state)
        device = loads[0].work.device
        gradients = [] if state.error else [each.parts for each in state.encoded]
        table = table_of(gradients)
        if self._reduces:
            state.flat, gradients = by_dtype(gradients), []  # copied here: the object may write to them from now on
        own = written(gradients, table, device, lambda length: self.keep(("own", name), length, torch.uint8, device))
        numbers = [int(state.error is not None), len(own), 8 * len(table), zlib.crc32(repr(table).encode()) >> 1]
        header = 4 * layout.words
        message = self.keep(("header", name), header + 4 * len(numbers), torch.uint8, device)
        received = self.keep(("headers", name), self.comm.size * message.numel(), torch.uint8, device)
        layout.write_header(message, control, [0] * len(loads))
        write_numbers(numbers, message[header:].view(torch.int32))
        handle = self.comm.all_gather(received, message, name)
        elements = sum(load.segment.numel for load in loads)
        return self.schedule(
            InFlight(
                name, loads, control, handle, message.numel(), elements, own, received, state,
                codecs={"header": message.numel()},
            )
        )  # fmt: skip

    def _encode(self, loads: Sequence[SegmentBuffers], state: _State) -> None:
        """Compress each gradient; an error is kept for :meth:`phases`."""
        try:
            for load in loads:
                for slot in load.segment.slots:
                    where = slice(slot.offset - load.segment.start, slot.offset - load.segment.start + slot.numel)
                    parts, ctx = self.custom.encode(load.work[where].view(slot.shape), slot.name)
                    unknown = [part.dtype for part in parts if part.dtype not in DTYPES]
                    if unknown:
                        raise TypeError(f"{self.custom.name}.compress(): tensors of {unknown[0]} cannot be sent")
                    state.encoded.append(Encoded(slot, load.update[where], parts, ctx))
                if self.store.has_residual:  # of a compressor before: all of it was compressed now
                    self.store.subtract_sent(load.segment, None, None)
        except Exception as error:
            state.error = error

    def phases(self, pending: InFlight) -> Phases[None]:
        """Collective. Gather the messages, or add them up, once all sizes are known."""
        state, name, size = pending.extra, pending.name, self.comm.size
        headers = pending.received.view(size, -1)
        state.control = state.layout.read_headers(headers, pending.control, name)
        words = headers[:, 4 * state.layout.words :].contiguous().view(torch.int32).tolist()
        faults = [rank for rank, row in enumerate(words) if row[0]]
        if state.error is not None:
            raise state.error
        if faults:
            raise MessageError(
                f"AGM508: {name}: {self.custom.name} raised an error on rank {faults[0]}, so no rank has an update. "
                "See the output of that rank."
            )
        if state.control.flags & Flag.REPLAN:
            return
        lengths, tables = [row[1] for row in words], [row[2] for row in words]
        if self.custom.sums:
            self._check_alike(name, [row[1:] for row in words])
            if self._reduces:
                state.gathered = [(yield from self._sums(pending))]
                return
        longest, message = max(lengths), pending.message
        own = self.keep(("own", name), longest, torch.uint8, message.device)  # the same memory, if it is long enough
        if own.data_ptr() != message.data_ptr():
            own[: len(message)].copy_(message)
        own[len(message) :].zero_()
        rows = own.new_empty(size * longest)  # the script's object may keep what it decompresses
        pending.count({self.custom.name: longest})
        yield self.comm.all_gather(rows, own, f"{name}/tensors")
        count = len(state.encoded)
        try:
            messages = zip(rows.view(size, -1), lengths, tables, strict=True)
            state.gathered = [read(row[:length], table, count) for row, length, table in messages]
        except ValueError as error:
            raise MessageError(
                f"AGM501: {name}: {error}. Check the network, and the memory of the machines."
            ) from error
        if self.custom.sums:
            by_gradient = zip(*state.gathered, strict=True)
            state.gathered = [[list(map(self._in_order, zip(*parts, strict=True))) for parts in by_gradient]]

    def _check_alike(self, name: str, words: Sequence[Sequence[int]]) -> None:
        """Raise :class:`agmerge.MessageError` unless all ranks have tensors of the same dtypes and shapes."""
        others = [rank for rank, row in enumerate(words) if row != words[0]]
        if others:
            raise MessageError(
                f"AGM509: {name}: {self.custom.name} made other tensors on rank {others[0]} than on rank 0, and "
                "tensors of other shapes cannot be added up. Gather them: sums=False."
            )

    @staticmethod
    def _in_order(parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of one tensor of each rank, added in rank order."""
        return sum_in_rank_order(torch.stack([part.reshape(-1) for part in parts])).view(parts[0].shape)

    def _sums(self, pending: InFlight) -> Phases[list[Parts]]:
        """Collective. Return the sums over ranks of each gradient's tensors: one all-reduce for each dtype."""
        own = [part for each in pending.extra.encoded for part in each.parts]
        totals: dict[int, Tensor] = {}
        for chosen, flat in pending.extra.flat:
            pending.count({self.custom.name: flat.nbytes})
            yield self.comm.all_reduce(flat, f"{pending.name}/sum of {flat.dtype}")
            pieces = torch.split(flat, [own[number].numel() for number in chosen])
            totals |= {number: piece.view(own[number].shape) for number, piece in zip(chosen, pieces, strict=True)}
        numbers = iter(range(len(own)))
        return [[totals[next(numbers)] for _ in each.parts] for each in pending.extra.encoded]

    def finish(self, pending: InFlight) -> None:
        """Decompress, combine and write the updates. Raises the same errors on every rank."""
        averages = self.custom.averages and self.context.op is Average
        for number, each in enumerate(pending.extra.encoded):
            name, shape = each.slot.name, each.slot.shape
            rows = [gradients[number] for gradients in pending.extra.gathered]
            if self.custom.sums and averages:
                rows = [[part / self.comm.size for part in row] for row in rows]
            made = [self.custom.decode(row, each.ctx, name, shape) for row in rows]
            total = made[0] if self.custom.sums else self.custom.aggregate(made)
            if averages and not self.custom.sums:
                total = total / self.comm.size
            if total.device.type == "cpu" and not is_finite(total):
                raise MessageError(f"AGM510: {self.custom.name} made infinities or NaN of finite gradients of {name!r}")
            each.out.copy_(total.reshape(-1))
