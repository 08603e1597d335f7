# SPDX-License-Identifier: Apache-2.0
"""Flat buffers of all tensor classes between two agreements: messages over them, places of updates, sent values."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

import merging
from agmerge.backends import Backend
from agmerge.backends.topology import Nodes
from agmerge.exchanges import Exchange, SegmentBuffers, routing
from agmerge.exchanges.base import ReadPiece, Store
from agmerge.exchanges.low_rank.bases import Bases
from agmerge.exchanges.message.scaled import ZeroCount
from agmerge.exchanges.node_shards import NodeShards, sharded
from agmerge.exchanges.routing import (
    Message,
    group_by,
    group_by_dtype,
    group_into_messages,
    message_name,
    send_modes,
    split,
)
from agmerge.step.config import Config
from agmerge.tensors.arena import MOMENTA, UNSHARED, Arena, Unwritten, Write, references, trim, zeros
from agmerge.tensors.layout import Layout, Segment, Slot, TensorClass
from agmerge.tensors.parameters import ParameterInfo
from sparsifiers import Kind, LowRank, native
from sparsifiers.quantising.base import block_size

# Gradients that are sent from where they lie, and overwritten by updates: no memory of a model's size is needed.


class GradientsInPlace:
    """Gradients of one round that lie in no arena, and where their updates are written."""

    def __init__(self) -> None:
        self.slots: frozenset[int] = frozenset()  # the numbers of the tensors that are sent so
        self._updates: dict[int, torch.Tensor] = {}  # by slot
        self._strided: dict[int, torch.Tensor] = {}  # by slot: gradients of plain memory that are not in C order
        # By device: addresses where gradients begin that updates will be written over, ascending, and where they end.
        self._taken: dict[torch.device, tuple[list[int], list[int]]] = {}

    def choose(self, slots: Iterable[int]) -> None:
        """Send the tensors with these numbers so, from now on. Nothing may be under way."""
        self.slots = frozenset(slots)
        self.let_go()

    def hold(self, slot: Slot, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the tensor to be sent, in its shape and contiguous; None: this rank has no gradient.

        The update will be written over the gradient itself, if that is contiguous, of the tensor's dtype and shares its
        memory with no other gradient; else into a new tensor. Called once a round for each tensor.
        """
        if gradient is None:
            return None
        if gradient.dtype == slot.tensor_class.dtype and gradient.shape == slot.shape and not gradient.requires_grad:
            if self._takes(gradient):
                if gradient.is_contiguous():
                    self._updates[slot.index] = gradient
                    return gradient
                self._strided[slot.index] = gradient
        return gradient.detach().to(slot.tensor_class.dtype).reshape(slot.shape).contiguous()

    def _takes(self, gradient: torch.Tensor) -> bool:
        """Return whether no other gradient here shares memory with this one, and record where it lies.

        autograd gives one tensor to two parameters where the gradient of a sum needs no other, perhaps on some ranks
        alone.
        """
        begins, ends = self._taken.setdefault(gradient.device, ([], []))
        span = gradient.numel()
        if not gradient.is_contiguous():
            span = 1 + sum(step * (size - 1) for step, size in zip(gradient.stride(), gradient.shape, strict=True))
        first = gradient.data_ptr()
        last, place = first + span * gradient.element_size(), bisect(begins, first)
        if (place and ends[place - 1] > first) or (place < len(begins) and begins[place] < last):
            return False
        begins.insert(place, first)
        ends.insert(place, last)
        return True

    def of(self, slot: Slot) -> torch.Tensor:
        """Return where the update of a tensor is written, in its shape and contiguous; zeros where nothing was."""
        update = self._updates.get(slot.index)
        if update is None:
            update = torch.zeros(slot.shape, dtype=slot.tensor_class.dtype, device=slot.tensor_class.device)
            self._updates[slot.index] = update
        return update

    def strided(self, slot: Slot, stride: tuple[int, ...]) -> torch.Tensor | None:
        """Return this rank's own gradient, for the update to be copied to, if it has these strides; else None."""
        gradient = self._strided.get(slot.index)
        return gradient if gradient is not None and gradient.stride() == stride else None

    def let_go(self) -> None:
        """Drop the references to gradients: updates have been handed out, or the round comes to nothing."""
        self._updates, self._strided, self._taken = {}, {}, {}


# Messages of each merge buffer of a plan: a pure function, the same on every rank.


def messages_of(
    plan: merging.Plan, layout: Layout, exchanges: Mapping[Kind, Exchange], workers: int, *, ordered: bool
) -> list[list[Message]]:
    """Return the messages of each merge buffer.

    Args:

        plan: of the tensors in ``layout``, in its order.
        layout: where they lie.
        exchanges: by kind of tensor class; that of ``Kind.DENSE`` also serves merge buffers that the plan sends dense.
        workers: the number of ranks that exchange messages.
        ordered: sums are in rank order, whatever the plan: dense tensors do not share messages with others.
    """
    ride = [kind for kind, each in exchanges.items() if each.carries_dense and not ordered]
    mixes_classes = all(each.mixes_classes for each in exchanges.values())
    bytes_of = exchanges[Kind.SPARSE].whole_bytes if Kind.SPARSE in exchanges else None
    messages: list[list[Message]] = []
    kinds = zip(plan.bounds, send_modes(plan), plan.dense, plan.parts, strict=True)
    for index, (bounds, mode, goes_dense, parts) in enumerate(kinds):
        segments = routing.segments(layout, *bounds, mode.ahead and not goes_dense)
        if goes_dense:
            groups = group_by_dtype(segments)
        elif mixes_classes:
            groups = group_into_messages(segments, workers, ride, bytes_of)
        else:
            groups = group_by(segments, lambda tensor_class: tensor_class)
        if parts > 1:
            groups = [message for group in groups for message in split(group, parts)]
        messages.append(
            [
                Message(message_name(index, number), index, _carrier(exchanges, group, goes_dense, ride), tuple(group))
                for number, group in enumerate(groups)
            ]
        )
    return messages


def _carrier(
    exchanges: Mapping[Kind, Exchange], group: Sequence[Segment], goes_dense: bool, ride: Collection[Kind]
) -> Exchange:
    """Return the exchange for a message of these segments."""
    kind = group[0].tensor_class.kind
    if kind is Kind.DENSE and not goes_dense and all(routing.goes_quantised(segment, ride) for segment in group):
        kind = Kind.QUANTISED
    return exchanges[Kind.DENSE if goes_dense else kind]


def presparsified(messages: list[list[Message]], plan: merging.Plan) -> dict[int, Segment]:
    """Return, by slot, the segment of each tensor that is selected from before it is merged.

    Where messages are split, each slice is selected from when it is sent, and is not listed.
    """
    found: dict[int, Segment] = {}
    for row, mode, parts in zip(messages, send_modes(plan), plan.parts, strict=True):
        if mode.ahead and parts == 1:
            for message in row:
                for part, selected in zip(message.segments, message.selected, strict=True):
                    if selected:
                        found[part.slots[0].index] = part
    return found


# Places of updates: in the arenas, or over gradients, where every rank has whole tensors.
#
# With ``exchange="two-level"`` a :class:`agmerge.exchanges.node_shards.NodeShards` takes the place of
# :class:`InArenas`: there a rank's arenas have shards, and whole updates are gathered inside the node.


class InArenas:
    """Updates that are found where they were written.

    ``arena_of``: the arena of each slot; ``in_place``: gradients and updates that lie in no arena.
    """

    def __init__(self, arena_of: Sequence[Arena], in_place: GradientsInPlace) -> None:
        self._arena_of, self._in_place = arena_of, in_place

    def rebuild(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Do nothing: unlike those of :class:`NodeShards`, these updates do not depend on the plan's merge buffers."""

    def let_updates_go(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Do nothing: the arenas do it."""

    def of(self, slot: Slot) -> torch.Tensor:
        """Return the update of a tensor, in C order: a view."""
        if slot.index in self._in_place.slots:
            return self._in_place.of(slot)
        return self._arena_of[slot.index].gradients[slot.index]

    def gather(self, arenas: Mapping[TensorClass, Arena]) -> int:
        """Return 0, the bytes sent: updates are whole already."""
        return 0


# The buffers.

State = dict[tuple[str, str], torch.Tensor]  # by kind ("residual", "momentum") and name of the tensor


class FlatBuffers:
    """Memory of all tensors that take part: residuals, gradients, updates, and the state between steps.

    ``members``: the tensors, in the order of the plan, each with its class. ``workers``: ranks of the group. ``nodes``:
    for ``exchange="two-level"``, where each rank has a shard of every tensor; else None. ``unsent``: names of tensors
    with a residual of this rank's from before, which is sent even where the memory has none.
    """

    def __init__(
        self,
        config: Config,
        members: Sequence[ParameterInfo],
        workers: int,
        nodes: Nodes | None,
        unsent: Collection[str],
    ) -> None:
        self.config, self._workers = config, workers
        self.parameters = [member.parameter for member in members]  # the script's own, by slot
        self.locals = [member.local for member in members]  # this rank's shard of each
        self.tensors = Layout([(member.name, member.shape, _tensor_class(member)) for member in members])
        # The tensors that a rank selects from, keeps and sends: whole ones, or its shards of them.
        self.layout = self.tensors if nodes is None else sharded(self.tensors, nodes.places)
        self.arenas = {
            tensor_class: self._arena(tensor_class, length, unsent)
            for tensor_class, length in self.layout.lengths.items()
        }
        self.arena_of = [self.arenas[slot.tensor_class] for slot in self.layout.slots]
        self.in_place = GradientsInPlace()  # gradients and updates that lie in no arena
        # Where updates of whole tensors lie.
        self.updates: InArenas | NodeShards = InArenas(self.arena_of, self.in_place)
        if nodes is not None:
            timeout, ordered = config.guards.timeout, config.sync.ordered
            self.updates = NodeShards(nodes, self.tensors, self.layout, timeout, ordered=ordered)
        factored = [slot for slot in self.layout.slots if slot.tensor_class.kind is Kind.LOW_RANK]
        self.bases: Bases | None = None  # of low-rank tensors; None: there are none
        if factored:
            low_rank = config.compression.compressor.part(Kind.LOW_RANK)
            assert isinstance(low_rank, LowRank)
            self.bases = Bases(low_rank, factored)
        self.owed: dict[str, torch.Tensor] = {}  # by name, in the tensor's shape: see `owed_of`
        self._owing: list[tuple[Slot, slice, torch.Tensor]] = []  # what replaces it when the step ends
        self.in_pieces: frozenset[int] = frozenset()  # slots of which :meth:`takes_pieces`
        self.may_move: list[bool] = []  # by slot: a gradient may move to where its update will be, see `update`
        self._has_shards = nodes is not None
        self._untrimmed = 2  # steps
        self._copies: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        # Parameters with a gradient that is looked at by its use count: a DTensor is not the tensor that was written.
        self._plain = {i: one for i, one in enumerate(self.parameters) if not hasattr(one, "to_local")}
        self._hands_out = config.sync.updates is None and config.sync.model is None  # updates become gradients

    def _arena(self, tensor_class: TensorClass, length: int, unsent: Collection[str]) -> Arena:
        slots = [slot for slot in self.layout.slots if slot.tensor_class == tensor_class]
        memory = self.config.memory_of(tensor_class, has_unsent=any(slot.name in unsent for slot in slots))
        rate = None if self.config.compression.rates is None else self.config.compression.rates.by_slot(self.parameters)
        return Arena(tensor_class, length, slots, memory, self._workers, rate)

    def rebuild(self, bounds: Sequence[tuple[int, int]], prepared: Iterable[int]) -> None:
        """Follow another plan: its merge buffers have tensors ``start`` to ``stop``. Nothing may be in flight.

        ``prepared``: the slots of tensors that are prepared for their message before it is complete.
        """
        self.updates.rebuild(bounds)
        self.in_place.choose(filter(self._needs_no_arena, prepared))
        self.in_pieces = frozenset(i for i in self.in_place.slots if self.arena_of[i].memory.hands_back)
        # With merging="dear" a gradient stays where it is.
        self.may_move = [
            self.config.sync.model is None and local.is_contiguous() and index not in self.in_place.slots
            for index, local in enumerate(self.locals)
        ]

    def _needs_no_arena(self, index: int) -> bool:
        """Return whether a prepared tensor is sent from where its gradient lies: without residual and momentum."""
        arena = self.arena_of[index]
        keeps = arena.memory.has_residual or arena.memory.has_momentum
        return not self._has_shards and not keeps and arena.tensor_class.kind is Kind.QUANTISED

    def takes_pieces(self, slot: Slot) -> bool:
        """Return whether the owner of a tensor takes its pieces as they arrive: no memory of its size is needed."""
        return slot.index in self.in_pieces

    # -- segments and tensors -------------------------------------------------------------------------------------

    def arena_with(self, segment: Segment) -> Arena:
        """Return the arena that a segment lies in."""
        return self.arena_of[segment.slots[0].index]  # a :class:`TensorClass` takes longer to look up

    def operands(self, segment: Segment, *, is_empty: bool = False) -> SegmentBuffers:
        """Return the segment with its views of ``work`` and update, as they are in this step.

        ``is_empty``: nothing of it is to be sent. Then gradients in the place of ``work``, views of the last updates,
        are left as they are: they are needed once ranks have agreed again.
        """
        arena, part = self.arena_with(segment), slice(segment.start, segment.stop)
        work = arena.work[part]
        if is_empty and arena.in_place and segment.slots[0].index not in self.in_place.slots:
            work = torch.zeros_like(work)
        return SegmentBuffers(segment, work, arena.update[part])

    def has_unsent(self, slot: Slot) -> bool:
        """Return whether this rank sends a residual of an earlier configuration, which counts as a gradient."""
        arena, own = self.arena_of[slot.index], self.config.memory_of(slot.tensor_class)
        only_unsent = arena.memory.has_residual and not own.has_residual
        return only_unsent and bool(arena.values.back_of[slot.index].any())

    def left_over(self, slot: Slot) -> bool:
        """Return whether a residual of earlier steps was sent, so that a tensor that no rank used has an update."""
        return self.arena_of[slot.index].memory.has_residual and bool(self.updates.of(slot).any())

    def will_overwrite(self, slot: Slot, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies where sums may be written before a round is known to be the last attempt."""
        return slot.index not in self.in_place.slots and gradient.data_ptr() == self.updates.of(slot).data_ptr()

    def let_updates_go(self) -> None:
        """Write the next updates elsewhere than those to which the script still refers, which stay as they are.

        Between two rounds. It runs in every step: keep it short.
        """
        if not self._hands_out:
            return
        for arena in self.arenas.values():
            arena.let_updates_go(self._plain)
        self.updates.let_updates_go(self._plain)
        if references(self._copies.values()) > UNSHARED:
            self._copies = {}

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

    @property
    def keeps_state(self) -> bool:
        """Return whether a residual or a momentum of any tensor is kept from step to step."""
        return any(arena.keeps_state for arena in self.arenas.values())

    # -- a step ends ----------------------------------------------------------------------------------------------

    def settle(self, used: Sequence[bool]) -> None:
        """Finish dense tensors, as :meth:`Arena.settle` does. ``used``: by slot, whether any rank had a gradient.

        Called once every message has arrived, before updates are gathered in a node. With ``unused="zero"`` tensors
        that no rank had count as used: their gradient is zero.
        """
        used = [True] * len(used) if self.config.sync.zero_unused else used
        exempt = Kind.DENSE not in self.config.compression.compressor.kinds  # dense beside compressed tensors
        for tensor_class, arena in self.arenas.items():
            arena.settle(used, waits=exempt and tensor_class.kind is Kind.DENSE)

    def take_owed(self) -> dict[str, torch.Tensor]:
        """Return what this rank owes to all, by name and in the shape of the tensor; owe nothing from now on."""
        owed, self.owed = self.owed, {}
        return owed

    def owe(self, slot: Slot, elements: slice, values: torch.Tensor) -> None:
        """Record what this rank owes of some elements once the step ends."""
        self._owing.append((slot, elements, values))

    def forget_owing(self) -> None:
        """Forget what this rank would owe: the step comes to nothing."""
        self._owing = []

    def end_step(self, left_out: Iterable[Slot] = ()) -> None:
        """End a step: ``work`` becomes the residual, and the residual of before is lost.

        ``left_out``: tensors with an update that comes to nothing; their residuals and momenta stay as they were.
        """
        reverted = set[int]()
        for slot in left_out:
            self.arena_of[slot.index].revert(slot)
            reverted.add(slot.index)
        owing, self._owing = self._owing, []
        for slot, elements, values in owing:
            if slot.index not in reverted:
                self.owed_of(slot)[elements] = values
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
            for kind, tensor in self.arenas[slot.tensor_class].state_of(slot).items()
        }
        state |= {("owed", name): owed for name, owed in self.owed.items()}
        return state if self.bases is None else state | self.bases.state()

    def owed_of(self, slot: Slot) -> torch.Tensor:
        """Return what this rank owes to all of a tensor, float32, 1-D: made when it is first asked for."""
        if slot.name not in self.owed:
            self.owed[slot.name] = zeros(slot.numel, torch.float32, slot.tensor_class.device).view(slot.shape)
        return self.owed[slot.name].view(-1)

    def restore(self, carried: State, comm: Backend, timeout: float) -> None:
        """Collective. Move state in; entries without a place here stay in ``carried``.

        Rank 0's bases and momentum of averages count, which are equal on all ranks: others may not have loaded them.
        """
        for (kind, name), tensor in self.state().items():
            for other in MOMENTA if kind in MOMENTA else (kind,):  # the tensor's treatment may have changed
                if (other, name) in carried:
                    tensor.copy_(carried.pop((other, name)))
        for slot in self.layout.slots:
            if ("owed", slot.name) in carried:
                self.owed_of(slot).copy_(carried.pop(("owed", slot.name)).view(-1))
        for number, arena in enumerate(self.arenas.values()):
            if arena.memory.averages and arena.momenta is not None:
                comm.broadcast(arena.momenta.back, 0, f"momentum {number}").wait(timeout)
        if self.bases is not None:
            self.bases.restore(carried)
            self.bases.share(comm, timeout)


def _tensor_class(member: ParameterInfo) -> TensorClass:
    return TensorClass(member.device, member.dtype, member.kind, member.density)


# The log of a round: what it sends and receives is subtracted at once, or recorded for the caller.

# Of a segment: indices (None: all elements) and values that were sent (None: exactly those of `work`).
Sent = tuple[Segment, "torch.Tensor | None", "torch.Tensor | None"]
# Of a segment: the indices and values of each rank, and the factor of the values.
Received = tuple[Segment, "list[tuple[torch.Tensor, torch.Tensor]]", float]


class SentValues(Store):
    """Store of the exchanges of one agreement, and the log of the round under way.

    Sent values are subtracted from ``work``, which becomes the residual. With a memory that hands back they are
    recorded in ``sent`` instead, and all ranks' selections in ``received``, or pieces of quantised tensors in
    ``pieces``, where these take the place of an update.
    """

    def __init__(self, flat: FlatBuffers) -> None:
        self._flat, self.bases = flat, flat.bases
        self.has_residual = any(arena.memory.has_residual for arena in flat.arenas.values())
        self.sent: list[Sent] = []
        self.received: list[Received] = []
        self.pieces: list[ReadPiece] = []  # of quantised tensors
        self._zeros: ZeroCount | None = None  # of quantised tensors; None: not asked for

    def subtract_sent(
        self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor | Unwritten | None
    ) -> None:
        """Subtract sent values from ``work``, as :meth:`Arena.subtract_sent`, or record them, to hand others back."""
        arena = self._flat.arena_with(segment)
        if not arena.memory.hands_back:
            arena.subtract_sent(segment, indices, sent)
            return
        if indices is not None:  # copies: the buffers of a message are written again
            # As many as there are are all, unless a codec without a 0 has moved them up. A device is not asked.
            full = indices.numel() == segment.length and indices.device.type == "cpu"
            everything = full and int(indices[-1]) == segment.length - 1
            indices = None if everything else indices.clone()
        if isinstance(sent, torch.Tensor):
            sent = sent.to(arena.work.dtype, copy=True)
        elif sent is not None:
            sent = sent.tensor().view(-1)
        self.sent.append((segment, indices, sent))

    def write_and_subtract(self, segment: Segment, write: Write) -> bool:
        """Write sent values to their message and subtract them in one pass: :meth:`Arena.write_and_subtract`."""
        return self._flat.arena_with(segment).write_and_subtract(segment, write)

    def add_unsent(self, segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Add unsent values of sums to ``work``, as :meth:`Arena.add_unsent`, or record them in ``sent``, negated."""
        arena = self._flat.arena_with(segment)
        if arena.memory.hands_back:
            self.subtract_sent(segment, indices, -values)
        else:
            arena.add_unsent(segment, indices, values)

    def takes_selections(
        self, segment: Segment, selections: list[tuple[torch.Tensor, torch.Tensor]], factor: float
    ) -> bool:
        """Record all ranks' selections, and return True, if they are few and one pass can apply them."""
        tensor_class, arena = segment.tensor_class, self._flat.arena_with(segment)
        if sum(len(indices) for indices, _ in selections) > segment.length // 2 or not (
            arena.memory.hands_back and native.takes_in(tensor_class.dtype, tensor_class.device)
        ):
            return False
        self.received.append((segment, selections, factor))
        return True

    def takes_pieces(self, slot: Slot) -> bool:
        """Return whether pieces of a quantised tensor are recorded, and no update is written."""
        return self._flat.takes_pieces(slot)

    def take_piece(self, piece: ReadPiece) -> None:
        """Record a piece that has arrived."""
        self.pieces.append(piece)

    def owed_of(self, slot: Slot) -> torch.Tensor:
        """Return what this rank, as an owner of sums, owes to all: float32, 1-D."""
        return self._flat.owed_of(slot)

    def owe(self, slot: Slot, elements: slice, values: torch.Tensor) -> None:
        """Record what this rank owes of some elements once the step ends."""
        self._flat.owe(slot, elements, values)

    def update_of(self, slot: Slot) -> torch.Tensor:
        """Return where the update of a tensor, or of this rank's shard of it, is written, in its shape, contiguous."""
        if slot.index in self._flat.in_place.slots:
            return self._flat.in_place.of(slot)
        return self._flat.arena_of[slot.index].gradients[slot.index]

    def forget(self) -> None:
        """Forget the values of a round: it has been applied, or comes to nothing."""
        self.sent.clear()
        self.received.clear()
        self.pieces.clear()
        if self.bases is not None:
            self.bases.forget()

    # -- zeros beside other values, for the choice of quantisers --------------------------------------------------

    @property
    def counts_zeros(self) -> bool:
        return self._zeros is not None

    def start_zeros(self) -> None:
        """Count zeros in the blocks of the next step, for :meth:`end_zeros`."""
        self._zeros = ZeroCount()

    def count_zeros(self, slot: Slot, values: torch.Tensor | None) -> None:
        """Count zeros in the blocks of a tensor, in a step that is asked for it."""
        if self._zeros is not None:
            self._zeros.take(values, slot.numel, block_size(slot.shape))

    def end_zeros(self) -> tuple[int, int]:
        """Return the coordinates in mixed blocks, and all that were counted; stop counting."""
        count, self._zeros = self._zeros, None
        return (0, 0) if count is None else count.counts()


class ProbedValues(SentValues):
    """Store of exchanges that are timed: what they are told leaves no trace."""

    def owe(self, slot: Slot, elements: slice, values: torch.Tensor) -> None:
        """Do nothing."""

    def take_piece(self, piece: ReadPiece) -> None:
        """Decode a piece, as the owner of its tensor would."""
        piece.combined()
        piece.sent()
