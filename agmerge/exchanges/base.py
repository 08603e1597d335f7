# SPDX-License-Identifier: Apache-2.0
"""Contract of an exchange: ``start`` sends, ``wait`` receives, ``finish`` writes the update.

An exchange never touches a residual. It tells its :class:`Store` this rank's contribution to the update as soon as that
is known: in ``start`` where it is the sent values (dense, sparse), in ``finish`` where the ranks decide together (a
global threshold, an agreed mask, low-rank factors). So every exchange conserves gradients.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from agmerge.backends import Backend, Handle, status
from agmerge.backends.streams import HostCopies, streams_of
from agmerge.errors import CollectiveTimeout
from agmerge.exchanges.low_rank.bases import Bases
from agmerge.exchanges.message.format import Format, RoundHeader
from agmerge.ops import ReduceOp
from agmerge.tensors.arena import Difference, Unwritten, Write
from agmerge.tensors.layout import Segment, Slot
from sparsifiers import Custom, Kind, Quantiser, Selection
from sparsifiers.quantising.moving import Arrived, Moved, move_all, read_all


class Store(ABC):
    """Owner of the flat buffers that an exchange reads and writes: it alone changes residuals.

    The conservation of gradients is its matter: an exchange calls :meth:`subtract_sent` with this rank's contribution
    to the update, and whatever is left in the segment's work is the next residual.
    """

    has_residual = False  # some work keeps what was not sent; else nothing need be subtracted from dense segments
    bases: Bases | None = None  # of low-rank tensors; None: there are none

    @abstractmethod
    def subtract_sent(
        self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor | Unwritten | None
    ) -> None:
        """Subtract this rank's contribution from the segment's work: ``work[indices] -= sent``.

        ``indices``: int32 or int64, (n,); None: all elements. ``sent``: (n,); None: all of the work, as it is.
        """

    def write_and_subtract(self, segment: Segment, write: Write) -> bool:
        """Write selected values to their message, unrounded, and subtract them from the work, in one pass.

        Returns False, with nothing done, where that takes two passes.
        """
        return False

    def add_unsent(self, segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Add to the work the quantisation error of sums that this rank has encoded for all ranks.

        ``indices``: int32 or int64, (n,), ascending; ``values``: (n,).
        """
        raise NotImplementedError(f"{segment.key}: a codec rounds sums, and {type(self).__name__} has no add_unsent()")

    def takes_selections(
        self, segment: Segment, selections: list[tuple[torch.Tensor, torch.Tensor]], factor: float
    ) -> bool:
        """Return whether the (indices, values) of each rank are enough, with their factor: then no update is written.

        Asked where ranks' selections are at hand, one by one.
        """
        return False

    @property
    def counts_zeros(self) -> bool:
        """Return whether :meth:`count_zeros` is to be called in the step under way."""
        return False

    def count_zeros(self, slot: Slot, values: torch.Tensor | None) -> None:  # noqa: B027  most need not know
        """Count zeros in the blocks of a tensor that is sent, or could be, in few bits: 1-D; None: all are zero."""

    def takes_pieces(self, slot: Slot) -> bool:
        """Return whether :meth:`take_pieces` gets the pieces of a quantised tensor: then no update is written."""
        return False

    def take_pieces(self, arrived: ArrivedPieces) -> None:
        """Record the pieces of quantised tensors of a message that has arrived."""
        raise NotImplementedError(f"{type(self).__name__} takes no pieces")

    def owed_of(self, slot: Slot) -> torch.Tensor:
        """Return what this rank, as an owner of sums, has rounded and owes to all: float32, 1-D, as long as the tensor.

        Not to be written: see :meth:`owe`.
        """
        raise NotImplementedError(f"{slot.name}: {type(self).__name__} keeps nothing that owners owe")

    def owe(self, slot: Slot, elements: slice, values: torch.Tensor) -> None:
        """Record what this rank owes of some elements once the step ends: float32, 1-D, which the store keeps."""
        raise NotImplementedError(f"{slot.name}: {type(self).__name__} keeps nothing that owners owe")

    def update_of(self, slot: Slot) -> torch.Tensor:
        """Return where the update of a prepared tensor is written: in its shape and dtype, contiguous."""
        raise NotImplementedError(f"{slot.name}: it was prepared, and {type(self).__name__} has no update_of()")


class ReadPiece(NamedTuple):
    """Piece of a quantised tensor that has been read: float32, 1-D, valid until the next one is read."""

    slot: Slot
    elements: slice  # of the tensor, flat in C order
    combined: torch.Tensor  # the update, of all ranks
    sent: torch.Tensor  # what receivers read of this rank's own message


@dataclass(frozen=True)
class ArrivedPieces:
    """Pieces of quantised tensors of one message that has arrived. They are not read until they are needed."""

    quantiser: Quantiser
    pieces: Sequence[tuple[Slot, slice]]  # with their elements, as of :class:`ReadPiece`
    records: Arrived

    def read(self) -> Iterator[ReadPiece]:
        """Read the pieces, one after the other."""
        for (slot, elements), pair in zip(self.pieces, read_all(self.quantiser, self.records), strict=True):
            yield ReadPiece(slot, elements, *pair)

    def move(self, tensor_of: Callable[[Slot], Moved | None]) -> None:
        """Read the pieces and move by them, in one pass over memory, what ``tensor_of`` says of each slot, if any."""
        moved = {slot.index: tensor_of(slot) for slot in {slot.index: slot for slot, _ in self.pieces}.values()}
        move_all(self.quantiser, self.records, [moved[slot.index] for slot, _ in self.pieces])


# Messages. On a device, what follows the first collective of one on another communicator starts once so many later ones
# have left, whether or not that one has ended: NCCL must see its communicators in one order on all ranks, and each rank
# sees ends at other moments. With two, the device has work while the host waits.
AHEAD = 2


@dataclass(frozen=True)
class Ranks:
    """Ranks that exchange messages, as one of them sees them."""

    comm: Backend
    timeout: float  # seconds, of every wait for a collective
    second: Backend | None = None  # another communicator of the same ranks, for second phases; None: there are none
    gradients: int | None = None  # number of gradients in a sum; None: one of each rank of `comm`
    place: int = 0  # of these ranks in their nodes: which shards of tensors they exchange

    @property
    def terms(self) -> int:
        """Number of gradients in a sum: of all workers, also where a node's ranks have added up theirs before."""
        return self.comm.size if self.gradients is None else self.gradients


@dataclass(frozen=True)
class ExchangeContext:
    """Ranks, options and buffers of an exchange, which reads the fields that concern it."""

    ranks: Ranks
    op: ReduceOp  # Average or Sum
    store: Store  # has the residuals, and is told what was sent
    wire: str = "auto"  # value codec of sparse sections, see agmerge.exchanges.message.value_codec
    ordered: bool = False  # add in rank order: a sum then does not depend on where an element lies in its message
    same_on_all_ranks: bool = False  # all ranks choose the same coordinates by themselves: no vote is needed
    predivide: float = 1.0  # f: dense sums are of `work / f`, and multiplied by f afterwards
    cast: torch.dtype | None = None  # dtype of dense segments on the wire; None: the gradient's own
    rounds_dense: bool = False  # dense segments on the host may be rounded: their `work` keeps the error
    quantiser: Quantiser | None = None  # of quantised tensors; None: there are none
    custom: Custom | None = None  # of tensors that a script's own class compresses; None: there are none
    feedback: bool = False  # the quantisation error stays in `work`, so that sent values are subtracted
    owes: bool = False  # the store keeps what owners of sums have rounded, see `Store.owed_of`
    fragments: int = 1  # a message of quantised tensors has every so many-th run of blocks, in turn from step to step


@dataclass(frozen=True)
class SegmentBuffers:
    """Segment with its buffers, 1-D of ``segment.length``."""

    segment: Segment
    work: torch.Tensor  # to be sent: residual and gradient, in the dtype of the residual
    update: torch.Tensor  # is written, in the gradient's dtype


@dataclass(frozen=True)
class Noise:
    """Noise that quantising has added to the update of one message: see :mod:`agmerge.step.gradient_norm`."""

    squares: torch.Tensor  # float64[1]: of all values that the ranks have sent, added up
    first: float  # times these: the squared error of the sum, on average
    second: float  # times the sum's squares: that of quantising it once more

    @property
    def added(self) -> float:
        """Expected squared norm that the noise has added to the sum. Waits for a device."""
        return self.first * float(self.squares)


@dataclass
class InFlight:
    """Message under way: started, not finished."""

    name: str  # of its collectives, the same on all ranks
    loads: Sequence[SegmentBuffers]  # the segments that it carries
    control: RoundHeader  # this rank's header
    handle: Handle  # the collective that is waited for next
    bytes: int  # handed to collectives so far
    elements: int  # sent of the segments, padding not counted
    message: torch.Tensor  # what this rank has sent, 1-D
    received: torch.Tensor  # what arrives, 1-D; may be `message`
    extra: Any = None  # state of the exchange that made it: each has a type of its own
    # `bytes` by codec, see Format.by_codec; empty: all of them are dense elements
    codecs: Mapping[str, int] = field(default_factory=dict)
    overflows: Sequence[str] = ()  # names of finite tensors of which the sent factors are not finite
    # By sparse section: which ranks' indices were right, int32[W], on the device; filled by `finish` there.
    good: list[torch.Tensor] = field(default_factory=list)
    is_checked: bool = False  # `check` has been: what `finish` finds wrong of a message on a device it refuses itself

    def count(self, by_codec: Mapping[str, int]) -> None:
        """Count bytes that were handed to one more collective, by codec."""
        self.bytes += sum(by_codec.values())
        self.codecs = Counter(self.codecs) + Counter(by_codec)

    @property
    def on_device(self) -> bool:
        """Return whether the message is not in the host's memory."""
        return self.message.device.type != "cpu"

    @property
    def has_streams(self) -> bool:
        """Return whether its device can be told to wait, instead of the host."""
        return self.on_device and streams_of(self.message.device) is not None


# Headers of messages on devices, brought to the host in one wait. Until then only the devices wait for the messages and
# write their updates: the host merely queues that. No result is visible, for an update becomes a gradient only after
# all headers were checked.

Announced = tuple[InFlight, Sequence[torch.Tensor]]  # a message, and the result of its exchange's `announced`


def announced_on_host(messages: Sequence[Announced], timeout: float) -> dict[int, list[torch.Tensor]]:
    """Return the input of :meth:`Exchange.check` for each message, on the host, by the message's ``id``.

    ``messages``: in plan order. Their devices wait for them already; here the host waits, with the deadline: raises
    :class:`agmerge.CollectiveTimeout` after ``timeout`` seconds, which names the first missing message.
    """
    by_device: dict[torch.device, list[Announced]] = {}
    for message, announced in messages:
        by_device.setdefault(message.message.device, []).append((message, announced))
    copies = []
    for device, group in by_device.items():
        streams = streams_of(device)
        assert streams is not None, f"{group[0][0].name}: {device} was not told to wait"
        copies.append(HostCopies([part for _, announced in group for part in announced], streams))
    found: dict[int, list[torch.Tensor]] = {}
    deadline = time.monotonic() + timeout
    for group, copy in zip(by_device.values(), copies, strict=True):
        with status.waiting_for(group[0][0].name, ()):
            if not copy.arrive(deadline - time.monotonic()):
                missing = next((message for message, _ in group if not message.handle.done()), group[-1][0])
                raise CollectiveTimeout(f"AGM201: {missing.name}: no answer from all ranks within {timeout:g} s")
        parts = iter(copy.tensors())
        found |= {id(message): [next(parts) for _ in announced] for message, announced in group}
    return found


def wait_for(handle: Handle, timeout: float, *, on_stream: bool) -> None:
    """Wait for a collective; ``on_stream``: make the device's stream wait, and return at once."""
    if on_stream:
        handle.wait_on_stream(timeout)
    else:
        handle.wait(timeout)


# The contract.


class Exchange(ABC):
    """Aggregator of all ranks' messages. Buffers and formats are kept from step to step."""

    sparse: ClassVar[bool] = True  # sends a sparsifier's selection of sparse segments; else all of them
    # By its name, `exchange=` means nothing with a compressor that selects nothing, so options refuse that.
    needs_selection: ClassVar[bool] = True
    # If the script names no codec, selected values may have the one that plans choose, or the default one of updates.
    chooses_codec: ClassVar[bool] = False
    sends_zeros: ClassVar[bool] = False  # also values that are 0: a codec without a code for 0 is refused
    rounds_dense: ClassVar[bool] = False  # does what `ExchangeContext.rounds_dense` asks for; else that is not asked
    factorises: ClassVar[bool] = False  # sends factors of low-rank segments
    prepares: ClassVar[Kind | None] = None  # tensors of this kind are handed to `prepare`; None: none are
    carries_dense: bool = True  # dense segments may share its messages
    mixes_classes: ClassVar[bool] = True  # a message may have segments of several tensor classes
    can_poll: bool = True  # `arrived` sees the end of a whole exchange
    two_phase: ClassVar[bool] = False  # `advance` may start something
    pipelines_parts: ClassVar[bool] = False  # several messages of one merge buffer overlap in time
    queues: ClassVar[bool] = False  # a device can wait for its messages, and write their updates, without the host
    # `finish` writes over gradients: on a device, too, only when the headers have been read.
    overwrites: ClassVar[bool] = False

    def __init__(self, context: ExchangeContext) -> None:
        self.context, self.store = context, context.store
        self.comm, self.timeout = context.ranks.comm, context.ranks.timeout
        self.scale = context.op.scale(context.ranks.terms)  # factor of sums over ranks
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}  # buffers, by key, dtype and device
        self._formats: dict[str, Format] = {}  # by message, as it was last

    def expect(self, name: str, segments: Sequence[Segment]) -> None:  # noqa: B027  most need not know
        """Learn which segments message ``name`` will have, before its tensors are prepared."""

    def prepare(self, slot: Slot, work: torch.Tensor | None, step: int) -> bool | None:
        """Process one complete tensor of a message to come, before the others of it are complete.

        ``work``: as in :class:`SegmentBuffers`, in the tensor's shape, contiguous; None: it is zero. ``step``:
        committed exchanges so far. Returns whether all of it is finite; None: not checked.
        """
        return None

    def prepare_difference(self, slot: Slot, work: Difference, step: int) -> bool | None:
        """Do what :meth:`prepare` does, for a tensor of which :meth:`Store.takes_pieces` is told the pieces."""
        return self.prepare(slot, work.tensor().contiguous(), step)

    def complete(self, name: str, step: int) -> torch.Tensor | None:
        """Process what :meth:`prepare` has only noted of message ``name``: on a device, all tensors together.

        Called before the message starts, when all its tensors are there. Returns a number on the device, 0-dim, that
        is finite if they are; None: there is none.
        """
        return None

    def add_and_prepare(
        self,
        slot: Slot,
        work: torch.Tensor,
        update: torch.Tensor,
        residual: torch.Tensor,
        gradient: torch.Tensor,
        *,
        moves: bool,
    ) -> bool | None:
        """Write ``work = residual + gradient`` of one tensor, and :meth:`prepare` it, in one pass over memory.

        ``moves``: copy the gradient to ``update`` in that pass, too, where it waits for the end of the round. Returns
        whether the sum is finite; None, with nothing done, where that takes two passes.
        """
        return None

    def whole_bytes(self, segment: Segment) -> int:
        """Return the bytes of a dense segment in a message that it shares, see ``carries_dense``."""
        return segment.nbytes

    @abstractmethod
    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Send the message of one merge buffer, and return at once.

        ``offers``: the compressor's selection of each load; None: all of it is sent. ``control``: this rank's header.
        """

    def arrived(self, pending: InFlight) -> bool:
        """Collective. Return whether the exchange is known to have ended. Starts its second phase as soon as it can.

        Waits for nothing.
        """
        return self.can_poll and pending.handle.done()

    def advance(self) -> None:  # noqa: B027  most have nothing to start
        """Collective. Start the second phases of messages for which the first one has ended. Waits for nothing."""

    # -- messages arrive: in plan order, by `wait` on the host; on a device by `arrive`, `finish` and `check` ---------

    def wait(self, pending: InFlight) -> RoundHeader:
        """Collective. Wait until every rank's message is here and checked; return the merged header.

        Starts the remaining collectives of the exchange. Writes no update.
        """
        self.arrive(pending)
        return self.check(pending, self.announced(pending))

    def can_queue(self, pending: InFlight) -> bool:
        """Return whether the message's device can do the remaining work by itself, without a wait of the host."""
        return self.queues and pending.has_streams

    def arrive(self, pending: InFlight, *, on_stream: bool = False) -> None:
        """Collective. Wait for all messages, and start the remaining collectives of the exchange.

        ``on_stream``: the device's stream waits in place of the host, if :meth:`can_queue`. ``finish`` may follow at
        once, unless it ``overwrites``: its work is queued behind that.
        """
        raise NotImplementedError(f"{type(self).__name__}: {pending.name} arrives in wait() alone")

    def announced(self, pending: InFlight) -> list[torch.Tensor]:
        """Return the input of :meth:`check`, where the message lies: what all ranks announce, once it has arrived."""
        raise NotImplementedError(f"{type(self).__name__}: {pending.name} is checked in wait() alone")

    def check(self, pending: InFlight, announced: Sequence[torch.Tensor]) -> RoundHeader:
        """Check the messages that have arrived; return the merged header. ``announced``: on the host."""
        raise NotImplementedError(f"{type(self).__name__}: {pending.name} is checked in wait() alone")

    @abstractmethod
    def finish(self, pending: InFlight) -> None:
        """Write the update of every load. Called in plan order, after :meth:`wait` or :meth:`arrive`.

        Behind ``wait`` it is the last to look at a message, on a device too: some devices have no streams, and all
        messages of a merge buffer are waited for where one of them cannot be queued.
        """

    def noise(self, pending: InFlight) -> Noise | None:
        """Return the noise that quantising has added to the update of ``finish``; None: the update is exact."""
        return None

    def format_of(
        self,
        name: str,
        loads: Sequence[SegmentBuffers],
        capacities: list[int | None],
        wire: str = "auto",
        whole: str | None = None,
    ) -> Format:
        """Return the format of the message ``name``: the same object as long as segments and capacities stay.

        ``capacities``: entries by load; None: dense. ``wire``: the value codec, always the same one. ``whole``: the
        codec of dense segments; None: they travel as they are.
        """
        segments = [load.segment for load in loads]
        kept = self._formats.get(name)
        if kept is None or kept.capacities != capacities or kept.segments != segments:
            kept = self._formats[name] = Format(segments, capacities, wire, whole)
        return kept

    def keep(self, key: tuple[object, ...], length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a 1-D buffer of this exchange, the same one at every step; zeros at first."""
        full = (*key, dtype, device)
        buffer = self._kept.get(full)
        if buffer is None or buffer.numel() < length:
            # Zeroed, so that gaps between sections never send old contents of memory.
            buffer = self._kept[full] = torch.zeros(length, dtype=dtype, device=device)
        return buffer[:length]

    def accumulator(self, load: SegmentBuffers) -> torch.Tensor:
        """Return where contributions to ``load`` are added up: its update, or float32 scratch for 16 bits."""
        if load.update.dtype == load.work.dtype:
            return load.update
        return self.keep(("accumulator",), load.update.numel(), load.work.dtype, load.update.device)
