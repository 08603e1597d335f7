# SPDX-License-Identifier: Apache-2.0
"""Merge buffers of a plan between two agreements: which tensors share a message, and how each message is exchanged.

They are opened collectively, at the first step and whenever membership, a dtype, a device or the plan's order has
changed. Residuals move from one agreement to the next by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, compress
from typing import cast

import torch

import merging
from agmerge.backends import Backend
from agmerge.backends.topology import Nodes
from agmerge.exchanges import Exchange, ExchangeContext, Ranks, SegmentBuffers
from agmerge.exchanges.dense import ScatterExchange
from agmerge.exchanges.routing import OWN, Message, send_mode
from agmerge.exchanges.table import exchange_of
from agmerge.step.config import Config
from agmerge.step.density_policy import Budgets
from agmerge.step.flat_buffers import FlatBuffers, ProbedValues, SentValues, messages_of, presparsified
from agmerge.step.group import CountedBackend, Note, SideStreams, clock_for, nobody_notes
from agmerge.tensors.arena import table_of
from agmerge.tensors.layout import Segment, Slot, TensorClass
from agmerge.tensors.parameters import ParameterInfo
from sparsifiers import Compressor, Custom, Kind, native
from sparsifiers.gpu import LargestKey, Scratch, TensorTable, is_fused
from sparsifiers.largest import Candidates, TensorNotes

# Scratch memory of kernels for merge buffers, kept from step to step while the plan stays as it is.


class KernelBuffers:
    """Scratch memory of segments that are selected from, and largest written keys, both made when first needed.

    ``messages``: of each merge buffer, by the plan. ``compressor``: its sparsifier may have kernels.
    """

    def __init__(self, messages: Sequence[Sequence[Message]], compressor: Compressor) -> None:
        sparsifier = compressor.part(Kind.SPARSE)
        self._has_kernels = sparsifier is not None and sparsifier.has_kernels
        self._takes_candidates = sparsifier is not None and sparsifier.takes_candidates
        self._messages = messages
        self._scratch: dict[str, Scratch | None] = {}  # by the key of a segment on a device
        self._candidates: dict[str, Candidates | None] = {}  # by the key of a segment on the host
        self._notes: dict[int, TensorNotes] | None = None  # None: not yet made
        self._largest: dict[tuple[int, torch.device], LargestKey] = {}  # by merge buffer and device
        self._tables: dict[tuple[int, ...], TensorTable] = {}  # of tensors that are accumulated together, by slot

    def scratch(self, segment: Segment) -> Scratch | Candidates | None:
        """Return the scratch memory of a segment that is selected from; None: no kernel selects from it."""
        return self._scratch_on_device(segment) if segment.tensor_class.on_device else self._candidates_on_host(segment)

    def _scratch_on_device(self, segment: Segment) -> Scratch | None:
        tensor_class, key = segment.tensor_class, segment.key
        if key not in self._scratch:
            wanted = self._has_kernels and is_fused(tensor_class.device) and tensor_class.storage == torch.float32
            self._scratch[key] = Scratch(segment.vector_length, tensor_class.device) if wanted else None
        return self._scratch[key]

    def _candidates_on_host(self, segment: Segment) -> Candidates | None:
        key, tensor_class = segment.key, segment.tensor_class
        if key not in self._candidates:
            on_host = not tensor_class.on_device and tensor_class.storage == torch.float32
            wanted = self._takes_candidates and on_host and native.available()
            self._candidates[key] = Candidates(segment.vector_length) if wanted else None
        return self._candidates[key]

    def notes(self) -> Mapping[int, TensorNotes]:
        """Return the notes of tensors' largest elements, by slot: written along with ``work`` on the host.

        Small tensors have none. A tensor may lie in several segments.
        """
        if self._notes is None:
            self._notes = dict(self._make_notes())
        return self._notes

    def _make_notes(self) -> Iterator[tuple[int, TensorNotes]]:
        parts: dict[Slot, list[tuple[Candidates, int, int]]] = {}  # in the order of messages, which is theirs
        for message in chain.from_iterable(self._messages):
            for segment in compress(message.segments, message.selected):
                candidates = self._candidates_on_host(segment)
                if candidates is None:
                    continue
                for slot in segment.slots:
                    start, stop = segment.inside(slot)
                    parts.setdefault(slot, []).append((candidates, slot.offset + start - segment.start, stop - start))
        for slot, found in parts.items():
            if slot.numel >= native.STREAMED and sum(elements for _, _, elements in found) == slot.numel:
                yield slot.index, TensorNotes(found)

    def scratch_of(self, buffer: int, tensor_class: TensorClass) -> Scratch | None:
        """Return :meth:`scratch` of a merge buffer's tensors of a class; None, too, if these are several segments."""
        parts = [
            (segment, selected)
            for message in self._messages[buffer]
            for segment, selected in zip(message.segments, message.selected, strict=True)
            if segment.tensor_class == tensor_class
        ]
        return self._scratch_on_device(parts[0][0]) if len(parts) == 1 and parts[0][1] else None

    def largest(self, buffer: int, device: torch.device) -> LargestKey:
        """Return the largest key of a merge buffer on a device, raised by the kernels that write its tensors."""
        if (buffer, device) not in self._largest:
            self._largest[buffer, device] = LargestKey(device)
        return self._largest[buffer, device]

    def table(self, slots: Sequence[Slot]) -> TensorTable:
        """Return the places of adjacent tensors that are accumulated together."""
        key = tuple(slot.index for slot in slots)
        if key not in self._tables:
            self._tables[key] = table_of(slots)
        return self._tables[key]


BATCH_COPY_LIMIT = 1 << 14  # elements up to which a dense tensor waits for its merge buffer


class MergeBuffers:
    """Plan, messages and exchanges over flat buffers: equal on every rank but for the numbers in them.

    ``members``: the tensors that take part, each with its class; ``plan``: their order and merge buffers. ``side``: the
    exchange's. ``nodes``: for ``exchange="two-level"``, where each rank has a shard of every tensor; else None.
    ``second``: another communicator of the ranks that exchange messages, see :class:`agmerge.exchanges.Ranks`.
    ``note`` is told the collectives of rounds, not those of probes. ``unsent``: as in
    :class:`FlatBuffers`.
    """

    def __init__(
        self,
        comm: Backend,
        config: Config,
        members: Sequence[ParameterInfo],
        plan: merging.Plan,
        side: SideStreams,
        nodes: Nodes | None = None,
        second: Backend | None = None,
        note: Note = nobody_notes,
        unsent: Collection[str] = (),
    ) -> None:
        assert plan.names is not None
        self.comm, self.config, self._note, self._second = comm, config, note, second
        self.across = comm if nodes is None else nodes.across  # the ranks that exchange messages with this one
        self._place = 0 if nodes is None else nodes.place  # in the node: the number of this rank's shards
        if nodes is not None:
            nodes = replace(nodes, inside=CountedBackend(nodes.inside, note))
        by_name = {member.name: member for member in members}
        self.flat = FlatBuffers(config, [by_name[name] for name in plan.names], comm.size, nodes, unsent)
        self.layout, self.store = self.flat.layout, SentValues(self.flat)
        self.slot_of = dict(zip(plan.names, self.layout.slots, strict=True))
        self._small_dense = {
            slot.index
            for slot in self.layout.slots
            if slot.tensor_class.kind is Kind.DENSE
            and slot.numel <= BATCH_COPY_LIMIT
            and not slot.tensor_class.on_device
            if self.flat.arenas[slot.tensor_class].is_sum
        }
        self.side = side
        side.serve(tensor_class.device for tensor_class in self.flat.arenas)
        # The context in which a round's device work is queued. The host's work has no streams.
        on_device = any(tensor_class.on_device for tensor_class in self.flat.arenas)
        self.within: Callable[[], AbstractContextManager[None]] = side.within if on_device else nullcontext
        self.clock = clock_for(tensor_class.device for tensor_class in self.flat.arenas)
        self.budgets = Budgets(
            config.compression.density, self.layout.slots, selects=config.compression.compressor.selects
        )
        self.rebuild(plan)

    def rebuild(self, plan: merging.Plan, *, exact: bool = False) -> None:
        """Send by ``plan`` from now on; its order is the one in use. No data moves. Nothing may be in flight.

        ``exact``: dense tensors are not cast, whatever the compressor.
        """
        wire, mode = self.config.compression.wire, send_mode(plan)
        self.wire = wire if wire != OWN else mode.codec  # of selected values
        self.exchange = mode.exchange if self.config.exchanges else self.config.merging.exchange  # likewise
        self.quantiser = self.config.quantiser_of(mode.quantiser)  # None: nothing is quantised
        context = self._context(self._note)
        exchanges = self._exchanges(replace(context, cast=None) if exact else context)
        self.scatter: ScatterExchange | None = None
        if self.config.sync.model is not None:  # merging="dear": each all-reduce in two halves
            exchanges[Kind.DENSE] = self.scatter = ScatterExchange(self._context(self._note))
        self.plan = plan
        self.budgets.forget_segments()
        self.fingerprint = zlib.crc32(plan.dumps().encode()) & 0x7FFFFFFF
        self.messages = messages_of(
            plan, self.layout, exchanges, self.across.size, ordered=self.config.sync.ordered
        )  # of each merge buffer
        in_use = dict.fromkeys(message.exchange for message in chain.from_iterable(self.messages))
        self.two_phase = [exchange for exchange in in_use if exchange.two_phase]
        self.kernels = KernelBuffers(self.messages, self.config.compression.compressor)
        self.buffer_of = [index for index, count in enumerate(plan.counts) for _ in range(count)]
        self.presparsified = presparsified(self.messages, plan)
        self.prepared: dict[int, Exchange] = {}  # by slot: exchange that prepares its message early
        for message in chain.from_iterable(self.messages):
            message.exchange.expect(message.name, message.segments)
            for part in message.segments:
                if part.tensor_class.kind is message.exchange.prepares:
                    self.prepared |= dict.fromkeys((slot.index for slot in part.slots), message.exchange)
        self.flat.rebuild(plan.bounds, self.prepared)
        # Slots that wait until their merge buffer is complete, and are accumulated together: a call each would cost
        # more. On a device these are all but those of which something can be done before.
        self.batched = self._small_dense | {
            slot.index for slot in self.layout.slots if slot.tensor_class.on_device and slot.index not in self.prepared
        }

    def adopt(self, config: Config) -> None:
        """Use ``config`` from now on. It may differ only in the figures that a sparsifier records."""
        self.config = config

    def probed_exchanges(self) -> dict[Kind, Exchange]:
        """Return new exchanges to be timed: what they send and receive leaves no trace."""
        return self._exchanges(replace(self._context(nobody_notes), store=ProbedValues(self.flat)))

    def _exchanges(self, context: ExchangeContext) -> dict[Kind, Exchange]:
        """Return new exchanges, one for each kind of tensor class here."""
        kinds = {tensor_class.kind for tensor_class in self.flat.arenas} | {Kind.DENSE}
        return {kind: exchange_of(kind, self.exchange, context) for kind in kinds}

    def _context(self, note: Note) -> ExchangeContext:
        """Return the context that these exchanges are made with; ``note``: see the class."""
        config, memory = self.config, self.config.compression.memory
        ranks = Ranks(
            CountedBackend(self.across, note),
            config.guards.timeout,
            second=None if self._second is None else CountedBackend(self._second, note),
            gradients=self.comm.size,  # a node's sum counts for all of its ranks
            place=self._place,
        )
        return ExchangeContext(
            ranks,
            config.sync.op,
            self.store,
            wire=self.wire,
            ordered=config.sync.ordered,
            same_on_all_ranks=config.compression.compressor.same_on_all_ranks,
            predivide=config.sync.predivide,
            cast=config.compression.compressor.dtype,
            rounds_dense=config.rounds_dense,
            quantiser=self.quantiser,
            custom=cast(Custom | None, config.compression.compressor.part(Kind.CUSTOM)),
            feedback=memory.has_residual or memory.hands_back,
            owes=memory.hands_back,
            fragments=config.fragments,
        )

    def forget_round(self) -> None:
        """Forget sent, received and staged values of a round: it has been applied, or comes to nothing."""
        self.side.follow()
        self.flat.in_place.let_go()
        self.store.forget()

    # -- selections -----------------------------------------------------------------------------------------------

    def vector(self, operand: SegmentBuffers, step: int) -> tuple[torch.Tensor, int, tuple[tuple[int, ...], ...]]:
        """Return a sparsifier's input for a segment: the vector (a view of its ``work``), k, and its shapes."""
        segment, work = operand.segment, operand.work
        k, shapes = self.budgets.of_segment(segment, step), segment.shapes
        if len(segment.slots) == 1:
            return work[: segment.vector_length], k, shapes[:1]  # no padding
        return work, segment.length if k == segment.numel else k, shapes  # padding too: else it could be chosen

    def keys(self) -> set[str]:
        """Return the keys of sparsifier state: one for each segment."""
        return {part.key for messages in self.messages for message in messages for part in message.segments}

    def goes_dense(self, slot: Slot) -> bool:
        """Return whether a tensor is sent dense in a round, rather than as a selection, quantised or as factors."""
        return slot.tensor_class.kind is Kind.DENSE or self.plan.dense[self.buffer_of[slot.index]]

    def is_quantised(self, slot: Slot) -> bool:
        """Return whether a tensor travels quantised, and is not sent dense by the plan."""
        return slot.tensor_class.kind is Kind.QUANTISED and not self.goes_dense(slot)
