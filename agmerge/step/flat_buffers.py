# SPDX-License-Identifier: Apache-2.0
"""Flat buffers of all tensor classes between two agreements, and where gradients and updates of parameters lie."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from agmerge.backends import Backend
from agmerge.backends.topology import Nodes
from agmerge.exchanges import SegmentBuffers
from agmerge.exchanges.low_rank.bases import Bases
from agmerge.exchanges.node_shards import NodeShards, sharded
from agmerge.step.config import Config
from agmerge.step.gradients_in_place import GradientsInPlace
from agmerge.step.update_home import InArenas
from agmerge.tensors.arena import MOMENTA, Arena
from agmerge.tensors.flat_memory import trim
from agmerge.tensors.handed_out import UNSHARED, references
from agmerge.tensors.layout import Layout, Segment, Slot, TensorClass
from agmerge.tensors.parameters import ParameterInfo
from sparsifiers import Kind, LowRank

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
        # With merging="dear" a gradient stays where it is.
        self.may_move = [
            self.config.sync.model is None and local.is_contiguous() and index not in self.in_place
            for index, local in enumerate(self.locals)
        ]

    def _needs_no_arena(self, index: int) -> bool:
        """Return whether a prepared tensor is sent from where its gradient lies: without residual and momentum."""
        arena = self.arena_of[index]
        keeps = arena.memory.has_residual or arena.memory.has_momentum or arena.memory.hands_back
        return not self._has_shards and not keeps and arena.tensor_class.kind is Kind.QUANTISED

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
        if is_empty and arena.in_place and segment.slots[0].index not in self.in_place:
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
        return slot.index not in self.in_place and gradient.data_ptr() == self.updates.of(slot).data_ptr()

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

    def end_step(self, left_out: Iterable[Slot] = ()) -> None:
        """End a step: ``work`` becomes the residual, and the residual of before is lost.

        ``left_out``: tensors with an update that comes to nothing; their residuals and momenta stay as they were.
        """
        for slot in left_out:
            self.arena_of[slot.index].revert(slot)
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
        return state if self.bases is None else state | self.bases.state()

    def restore(self, carried: State, comm: Backend, timeout: float) -> None:
        """Collective. Move state in; entries without a place here stay in ``carried``.

        Rank 0's bases and momentum of averages count, which are equal on all ranks: others may not have loaded them.
        """
        for (kind, name), tensor in self.state().items():
            for other in MOMENTA if kind in MOMENTA else (kind,):  # the tensor's treatment may have changed
                if (other, name) in carried:
                    tensor.copy_(carried.pop((other, name)))
        for number, arena in enumerate(self.arenas.values()):
            if arena.memory.averages and arena.momenta is not None:
                comm.broadcast(arena.momenta.back, 0, f"momentum {number}").wait(timeout)
        if self.bases is not None:
            self.bases.restore(carried)
            self.bases.share(comm, timeout)


def _tensor_class(member: ParameterInfo) -> TensorClass:
    return TensorClass(member.device, member.dtype, member.kind, member.density)
