"""State between two agreements: plan, layout, arenas, and the messages of each merge buffer.

Merge buffers are opened collectively, at the first step and whenever membership, a dtype, a device or the plan's order
has changed. Residuals move from one agreement to the next by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch

import merging
from agmerge.backends import Backend
from agmerge.backends.topology import Nodes
from agmerge.exchanges import Exchange, ExchangeContext, SegmentBuffers
from agmerge.exchanges.low_rank.bases import Bases
from agmerge.exchanges.message.sample import ValueSample
from agmerge.exchanges.node_shards import NodeShards, sharded
from agmerge.exchanges.reduce_scatter import ScatterExchange
from agmerge.exchanges.send_mode import OWN, send_mode
from agmerge.exchanges.table import exchange_of
from agmerge.metrics.step_times import clock_for
from agmerge.step.budgets import Budgets
from agmerge.step.config import Config
from agmerge.step.counted_links import Count, CountedBackend, nobody_counts
from agmerge.step.gradients_in_place import GradientsInPlace
from agmerge.step.kernel_buffers import KernelBuffers
from agmerge.step.messages import messages_of, presparsified
from agmerge.step.side_streams import SideStreams
from agmerge.step.update_home import InArenas
from agmerge.tensors.arena import MOMENTA, Arena, Unwritten, Write, trim
from agmerge.tensors.layout import Lane, Layout, Segment, Slot
from agmerge.tensors.parameters import ParameterInfo
from sparsifiers import Kind, LowRank, kernel_updates

BATCH_COPY_LIMIT = 1 << 14  # elements up to which a dense tensor waits for its merge buffer
State = dict[tuple[str, str], torch.Tensor]  # by kind ("residual", "momentum") and name of the tensor
# Of a segment: indices (None: all elements) and values that were sent (None: exactly those of `work`).
Sent = tuple[Segment, "torch.Tensor | None", "torch.Tensor | None"]
# Of a segment: the indices and values of each rank, and the factor of the values.
Received = tuple[Segment, "list[tuple[torch.Tensor, torch.Tensor]]", float]


class MergeBuffers:
    """Plan, layout, arenas and messages between two agreements: equal on every rank but for the numbers in them.

    ``members``: the tensors that take part, each with its lane; ``plan``: their order and merge buffers. ``nodes``: for
    ``exchange="two-level"``, where each rank has a shard of every tensor; else None. ``second``: another communicator
    of the ranks that exchange messages, see :class:`agmerge.exchanges.ExchangeContext`. ``count`` is given the bytes
    that leave this rank in rounds, not those of probes. ``unsent``: names of tensors with a residual of this rank's
    from before, which is sent even where the memory has none.
    """

    def __init__(
        self,
        comm: Backend,
        config: Config,
        members: Sequence[ParameterInfo],
        plan: merging.Plan,
        nodes: Nodes | None = None,
        second: Backend | None = None,
        count: Count = nobody_counts,
        unsent: Collection[str] = (),
    ) -> None:
        self.comm, self.config, self._count = comm, config, count
        by_name = {member.name: member for member in members}
        assert plan.names is not None
        ordered = [by_name[name] for name in plan.names]
        self.parameters = [member.parameter for member in ordered]  # the script's own, by slot
        self.locals = [member.local for member in ordered]  # this rank's shard of each
        self.tensors = Layout([(member.name, member.shape, _lane(member)) for member in ordered])
        # The tensors that a rank selects from, keeps and sends: whole ones, or its shards of them.
        self.layout = self.tensors if nodes is None else sharded(self.tensors, nodes.places)
        self.across = comm if nodes is None else nodes.across  # the ranks that exchange messages with this one
        self.second = second
        self._place = 0 if nodes is None else nodes.place  # in the node: the number of this rank's shards
        self.slot_of = dict(zip(plan.names, self.layout.slots, strict=True))
        self.arenas = {lane: self._arena(lane, length, unsent) for lane, length in self.layout.lengths.items()}
        self.arena_of = [self.arenas[slot.lane] for slot in self.layout.slots]
        self.updates: InArenas | NodeShards = InArenas(self.arena_of)  # where updates of whole tensors lie
        if nodes is not None:
            nodes = replace(nodes, inside=CountedBackend(nodes.inside, count))
            self.updates = NodeShards(
                nodes, self.tensors, self.layout, config.guards.timeout, ordered=config.sync.ordered
            )
        self._small_dense = {
            slot.index
            for slot in self.layout.slots
            if slot.lane.kind is Kind.DENSE and slot.numel <= BATCH_COPY_LIMIT and not slot.lane.on_device
            if self.arenas[slot.lane].is_sum
        }
        factored = [slot for slot in self.layout.slots if slot.lane.kind is Kind.LOW_RANK]
        low_rank = config.compression.compressor.part(Kind.LOW_RANK)
        self.bases = Bases(low_rank, factored) if isinstance(low_rank, LowRank) and factored else None
        self.side = SideStreams(dict.fromkeys(lane.device for lane in self.arenas))
        self.clock = clock_for(lane.device for lane in self.arenas)
        self.budgets = Budgets(
            config.compression.density, self.layout.slots, selects=config.compression.compressor.selects
        )
        # In this round, of tensor classes that hand back: values that this rank, and that all ranks have sent
        # where that takes the place of an update.
        self.sent: list[Sent] = []
        self.received: list[Received] = []
        self._untrimmed = 2  # steps
        self._copies: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self._sample: ValueSample | None = None  # of selected values; None: not asked for
        self.may_move: list[bool] = []  # by slot: a gradient may move to where its update will be, see `update`
        self.in_place = GradientsInPlace()
        self.rebuild(plan)

    def rebuild(self, plan: merging.Plan, *, exact: bool = False) -> None:
        """Send by ``plan`` from now on; its order is the one in use. No data moves. Nothing may be in flight.

        ``exact``: dense tensors are not cast, whatever the compressor.
        """
        wire, mode = self.config.compression.wire, send_mode(plan)
        self.wire = wire if wire != OWN else mode.codec  # of selected values
        self.exchange = mode.exchange if self.config.exchanges else self.config.merging.exchange  # likewise
        self.quantiser = self.config.quantiser_of(mode.quantiser)  # None: nothing is quantised
        exchanges = self.exchanges(exact=exact, count=self._count)
        if self.config.sync.model is not None:  # merging="dear": each all-reduce in two halves
            exchanges[Kind.DENSE] = ScatterExchange(self.exchange_context(self._count))
        self.dense, self.plan = exchanges[Kind.DENSE], plan
        self.budgets.forget_segments()
        self.updates.rebuild(plan.bounds)
        self.fingerprint = zlib.crc32(plan.dumps().encode()) & 0x7FFFFFFF
        self.messages = messages_of(
            plan, self.layout, exchanges, self.across.size, ordered=self.config.sync.ordered
        )  # of each merge buffer
        self.in_use = list(dict.fromkeys(message.exchange for message in chain.from_iterable(self.messages)))
        self.kernels = KernelBuffers(self.messages, self.config.compression.compressor)
        self.buffer_of = [index for index, count in enumerate(plan.counts) for _ in range(count)]
        self.presparsified = presparsified(self.messages, plan)
        self.prepared: dict[int, Exchange] = {}  # by slot: exchange that prepares its message early
        for message in chain.from_iterable(self.messages):
            message.exchange.expect(message.name, message.segments)
            for part in message.segments:
                if part.lane.kind is message.exchange.prepares:
                    self.prepared |= dict.fromkeys((slot.index for slot in part.slots), message.exchange)
        self.in_place = GradientsInPlace(filter(self._lies_in_no_arena, self.prepared))
        if isinstance(self.updates, InArenas):
            self.updates.in_place = self.in_place
        # With merging="dear" a gradient stays where it is.
        self.may_move = [
            self.config.sync.model is None and local.is_contiguous() and index not in self.in_place
            for index, local in enumerate(self.locals)
        ]
        # Slots that wait until their merge buffer is complete, and are accumulated together: a call each would cost
        # more. On a device these are all but those of which something can be done before.
        self.batched = self._small_dense | {
            slot.index for slot in self.layout.slots if slot.lane.on_device and slot.index not in self.prepared
        }

    def _lies_in_no_arena(self, index: int) -> bool:
        """Return whether a prepared tensor is sent from where its gradient lies: without residual and momentum."""
        arena = self.arena_of[index]
        whole = isinstance(self.updates, InArenas)  # of whole tensors: a node's shards lie in arenas
        held = arena.memory.has_residual or arena.memory.has_momentum or arena.memory.hands_back
        return whole and not held and arena.lane.kind is Kind.QUANTISED

    def output_of(self, slot: Slot) -> torch.Tensor:
        """Return where the update of a tensor, or of this rank's shard of it, is written, in its shape, contiguous."""
        if slot.index in self.in_place:
            return self.in_place.of(slot)
        return self.arena_of[slot.index].gradients[slot.index]

    def adopt(self, config: Config) -> None:
        """Use ``config`` from now on. It may differ only in the figures that a sparsifier records."""
        self.config = config

    def _arena(self, lane: Lane, length: int, unsent: Collection[str]) -> Arena:
        slots = [slot for slot in self.layout.slots if slot.lane == lane]
        memory = self.config.memory_of(lane, has_unsent=any(slot.name in unsent for slot in slots))
        rate = None if self.config.compression.rates is None else self.config.compression.rates.by_slot(self.parameters)
        return Arena(lane, length, slots, memory, self.comm.size, rate)

    def has_unsent(self, slot: Slot) -> bool:
        """Return whether this rank sends a residual of an earlier configuration, which counts as a gradient."""
        residual, own = self.arena_of[slot.index].residual_of(slot), self.config.memory_of(slot.lane)
        return residual is not None and not own.has_residual and bool(residual.any())

    def _arena_of(self, segment: Segment) -> Arena:
        return self.arena_of[segment.slots[0].index]  # a :class:`Lane` takes longer to look up

    def exchanges(self, *, exact: bool = False, count: Count = nobody_counts) -> dict[Kind, Exchange]:
        """Return new exchanges, one for each kind of tensor class here. ``exact``: without a cast."""
        context, kinds = self.exchange_context(count), {lane.kind for lane in self.arenas} | {Kind.DENSE}
        context = replace(context, cast=None) if exact else context
        return {kind: exchange_of(kind, self.exchange, context) for kind in kinds}

    def exchange_context(self, count: Count) -> ExchangeContext:
        """Return the context that these exchanges are made with; ``count``: see the class."""
        config = self.config
        return ExchangeContext(
            CountedBackend(self.across, count),
            config.sync.op,
            self.commit,
            config.guards.timeout,
            wire=self.wire,
            ordered=config.sync.ordered,
            same_on_all_ranks=config.compression.compressor.same_on_all_ranks,
            predivide=config.sync.predivide,
            cast=config.compression.compressor.dtype,
            rounds_whole=config.rounds_whole,
            has_residual=any(arena.memory.has_residual for arena in self.arenas.values()),
            receive=self._receive,
            take=self.take,
            retain=self.retain,
            observe=self._observe,
            bases=self.bases,
            workers=self.comm.size,  # a node's sum counts for all of its ranks
            quantiser=self.quantiser,
            feedback=config.compression.memory.has_residual or config.compression.memory.hands_back,
            second=None if self.second is None else CountedBackend(self.second, count),
            place=self._place,
            update_of=self.output_of,
        )

    def _receive(self, segment: Segment, parts: list[tuple[torch.Tensor, torch.Tensor]], scale: float) -> bool:
        """Record all ranks' sparse values of a segment, and return whether they are few and one pass can apply them."""
        lane = segment.lane
        if sum(len(indices) for indices, _ in parts) > segment.length // 2 or not (
            self._arena_of(segment).memory.hands_back and kernel_updates.takes_in(lane.dtype, lane.device)
        ):
            return False
        self.received.append((segment, parts, scale))
        return True

    def commit(self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor | Unwritten | None) -> None:
        """Subtract sent values from ``work``, as :meth:`Arena.commit`, or record them, to hand others back."""
        arena = self._arena_of(segment)
        if arena.memory.hands_back:  # copies: the buffers of a message are written again
            if indices is not None:
                # As many as there are are all, unless a codec without a 0 has moved them up. A device is not asked.
                full = indices.numel() == segment.length and indices.device.type == "cpu"
                everything = full and int(indices[-1]) == segment.length - 1
                indices = None if everything else indices.clone()
            if isinstance(sent, torch.Tensor):
                sent = sent.to(arena.work.dtype, copy=True)
            elif sent is not None:
                sent = sent.tensor().view(-1)
            self.sent.append((segment, indices, sent))
        else:
            arena.commit(segment, indices, sent)

    def take(self, segment: Segment, write: Write) -> bool:
        """Write sent values to their message and subtract them, in one pass, as :meth:`Arena.take` does."""
        return self._arena_of(segment).take(segment, write)

    def retain(self, segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Add unsent values of sums to ``work``, as :meth:`Arena.retain`, or record them in ``sent``, negated."""
        arena = self._arena_of(segment)
        if arena.memory.hands_back:
            self.commit(segment, indices, -values)
        else:
            arena.retain(segment, indices, values)

    def _observe(self, values: torch.Tensor, count: int | torch.Tensor) -> None:
        """Keep some of the values that a message has of a segment, in a step that is asked for a sample."""
        if self._sample is not None:
            self._sample.take(values, count)

    def sample_values(self, step: int) -> None:
        """Keep some of the values that the next step, ``step``, selects, for :meth:`sampled_values`."""
        sparse = [slot for slot in self.layout.slots if slot.lane.sparse]
        self._sample = ValueSample(sum(self.budgets.of_tensor(slot, step) for slot in sparse))

    def sampled_values(self) -> torch.Tensor | None:
        """Return the sample, as :meth:`ValueSample.values` does, and stop sampling; None: none was asked for."""
        sample, self._sample = self._sample, None
        return None if sample is None else sample.values()

    def forget_round(self) -> None:
        """Forget sent, received and staged values of a round: it has been applied, or comes to nothing."""
        self.side.follow()
        self.in_place.let_go()
        self.sent.clear()
        self.received.clear()
        if self.bases is not None:
            self.bases.forget()

    # -- messages -------------------------------------------------------------------------------------------------

    def load(self, segment: Segment) -> SegmentBuffers:
        """Return the segment with its views of ``work`` and update, as they are in this step."""
        arena, part = self._arena_of(segment), slice(segment.start, segment.stop)
        return SegmentBuffers(segment, arena.work[part], arena.update[part])

    def vector(self, segment: Segment, step: int) -> tuple[torch.Tensor, int, tuple[tuple[int, ...], ...]]:
        """Return a sparsifier's input for a segment: the vector (a view), k, and its shapes."""
        k = self.budgets.of_segment(segment, step)
        work, shapes = self._arena_of(segment).work[segment.start : segment.stop], segment.shapes
        if len(segment.slots) == 1:
            return work[: segment.vector_length], k, shapes[:1]  # no padding
        return work, segment.length if k == segment.numel else k, shapes  # padding too: else it could be chosen

    def keys(self) -> set[str]:
        """Return the keys of sparsifier state: one for each segment."""
        return {part.key for messages in self.messages for message in messages for part in message.segments}

    def goes_whole(self, slot: Slot) -> bool:
        """Return whether a tensor is sent dense in a round, rather than as a selection, quantised or as factors."""
        return slot.lane.kind is Kind.DENSE or self.plan.dense[self.buffer_of[slot.index]]

    def is_quantised(self, slot: Slot) -> bool:
        """Return whether a tensor travels quantised, and is not sent dense by the plan."""
        return slot.lane.kind is Kind.QUANTISED and not self.goes_whole(slot)

    # -- gradients and updates ------------------------------------------------------------------------------------

    def left_over(self, slot: Slot) -> bool:
        """Return whether a residual of earlier steps was sent, so that a tensor that no rank used has an update."""
        return self.arena_of[slot.index].memory.has_residual and bool(self.updates.of(slot).any())

    def will_overwrite(self, slot: Slot, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies where sums may be written before a round is known to be the last attempt."""
        return slot.index not in self.in_place and gradient.data_ptr() == self.updates.of(slot).data_ptr()

    def update(self, slot: Slot) -> torch.Tensor:
        """Return the tensor's update, in the strides of its parameter: the value for ``p.grad``.

        A view of the arena, or over the gradient. For a parameter that is not in C order (channels_last) a copy, over
        the gradient or always the same one: fused optimizers read flat memory, so strides must agree.
        """
        update, local = self.updates.of(slot), self.locals[slot.index]
        if local.is_contiguous():
            return update
        key, own = (slot.index, local.stride()), self.in_place.strided(slot, local.stride())
        if own is None and key not in self._copies:
            self._copies[key] = torch.empty_like(local, dtype=update.dtype, requires_grad=False)
        return (self._copies[key] if own is None else own).copy_(update)

    def settle(self, used: Sequence[bool]) -> None:
        """Finish dense tensors, as :meth:`Arena.settle` does. ``used``: by slot, whether any rank had a gradient.

        Called once every message has arrived, before updates are gathered in a node. With ``unused="zero"`` tensors
        that no rank had count as used: their gradient is zero.
        """
        used = [True] * len(used) if self.config.sync.zero_unused else used
        exempt = Kind.DENSE not in self.config.compression.compressor.kinds  # dense beside compressed tensors
        for lane, arena in self.arenas.items():
            arena.settle(used, waits=exempt and lane.kind is Kind.DENSE)

    def gather_node_updates(self) -> int:
        """Collective. Gather whole updates from the shards in a node; return the bytes sent.

        Where ranks have whole tensors this does nothing, and returns 0.
        """
        return self.updates.gather(self.arenas)

    def commit_residuals(self, left_out: Iterable[Slot] = ()) -> None:
        """End a step: ``work`` becomes the residual, and the residual of before is lost.

        ``left_out``: tensors with an update that comes to nothing; their residuals and momenta stay as they were.
        """
        for slot in left_out:
            self.arena_of[slot.index].keep(slot)
        for arena in self.arenas.values():
            arena.swap()
        if self.bases is not None:
            self.bases.commit()
        if self._untrimmed:  # in the first step all gradients are there before any can be let go; the second one's
            self._untrimmed -= 1  # go one by one, but out of fragments that the first has left
            trim()

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return the state between steps, by kind and name: views."""
        state = {
            (kind, slot.name): tensor
            for slot in self.layout.slots
            for kind, tensor in self.arenas[slot.lane].state_of(slot).items()
        }
        return state if self.bases is None else state | self.bases.state()

    def restore_state(self, carried: State) -> None:
        """Collective. Move state in; entries without a place here stay in ``carried``.

        Rank 0's bases and momentum of averages count, which are equal on all ranks: others may not have loaded them.
        """
        for (kind, name), tensor in self.state().items():
            for other in MOMENTA if kind in MOMENTA else (kind,):  # the tensor's treatment may have changed
                if (other, name) in carried:
                    tensor.copy_(carried.pop((other, name)))
        for number, arena in enumerate(self.arenas.values()):
            if arena.memory.averages:
                self.across.broadcast(arena.momentum, 0, f"momentum {number}").wait(self.config.guards.timeout)
        if self.bases is not None:
            self.bases.restore(carried)
            self.bases.share(self.across, self.config.guards.timeout)


def _lane(member: ParameterInfo) -> Lane:
    return Lane(member.device, member.dtype, member.kind, member.density)
