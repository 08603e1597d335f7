"""Everything that holds for one agreed membership and order: plan, layout, arenas, merge buffers.

A session is opened collectively, at the first step and whenever membership, a dtype, a device or the plan has
changed. Residuals move from session to session by name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch

import merging
import sparsifiers
from agmerge.backends import Backend
from agmerge.backends.handshake import Fact
from agmerge.backends.topology import Nodes
from agmerge.exchanges import (
    Commit,
    DenseExchange,
    Exchange,
    MaskedExchange,
    OkTopkExchange,
    SegmentBuffers,
    SparseExchange,
    routing,
)
from agmerge.exchanges.node_shards import NodeShards, sharded
from agmerge.exchanges.routing import AHEAD, Message, group_by, group_into_messages, message_name
from agmerge.exchanges.splitting import split
from agmerge.metrics.step_times import clock_for
from agmerge.options.config import AUTO, Config
from agmerge.step.importance import GradientEnergy
from agmerge.tensors.arena import Arena, rest, trim
from agmerge.tensors.layout import Lane, Layout, Segment, Slot
from agmerge.tensors.parameters import ParameterInfo
from sparsifiers.memories import NoMemory
from sparsifiers.randomk import RandomK

SMALL = 1 << 14  # elements up to which a tensor that is sent whole waits for its merge buffer
State = dict[tuple[str, str], torch.Tensor]  # by kind ("residual", "momentum") and name of the tensor


def model_facts(members: Sequence[ParameterInfo], config: Config) -> list[Fact]:
    """What ranks must agree on about the model: every tensor, in the order of the groups."""
    groups = config.groups.by_name(members) if config.groups is not None else []
    group_of = {name: f" group {number}" for number, group in enumerate(groups) for name in group}
    facts: list[Fact] = []
    for i, member in enumerate(members):
        facts.append((f"tensor {i}", f"{member.name} {member.describe()}{group_of.get(member.name, '')}"))
    return facts


class MergeBuffers:
    """The state of the exchange between two agreements."""

    def __init__(
        self,
        comm: Backend,
        config: Config,
        members: Sequence[ParameterInfo],
        plan: merging.Plan,
        nodes: Nodes | None = None,
    ) -> None:
        self.comm, self.config, self.nodes = comm, config, nodes
        by_name = {member.name: member for member in members}
        assert plan.names is not None
        ordered = [by_name[name] for name in plan.names]
        self.parameters = [member.parameter for member in ordered]
        self.tensors = Layout([(member.name, member.shape, _lane(member)) for member in ordered])
        self.layout = self.tensors if nodes is None else sharded(self.tensors, nodes.places)
        self.shards: NodeShards | None = None  # two-level: whose sums are exchanged
        if nodes is not None:
            self.shards = NodeShards(nodes, self.tensors, self.layout, config.timeout, ordered=config.ordered)
        self.slot_of = dict(zip(self.parameters, self.layout.slots, strict=True))
        self.arenas = {lane: self._arena(lane, length) for lane, length in self.layout.lengths.items()}
        self.arena_of = [self.arenas[slot.lane] for slot in self.layout.slots]
        # Slots that wait until their merge buffer is complete, and are copied together: a call each would cost more.
        self.small = {
            slot.index
            for slot in self.layout.slots
            if not slot.lane.sparse and slot.numel <= SMALL and slot.lane.device.type == "cpu"
            if isinstance(self.arenas[slot.lane].memory, NoMemory)
        }
        self.clock = clock_for(lane.device for lane in self.arenas)
        self.shares: tuple[int, ...] | None = None  # by slot: elements to send, by importance, once that is known
        self.energy = GradientEnergy() if config.importance and config.sparsifier is not None else None
        self._untrimmed = 2  # steps
        self._copies: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self.follow(plan)

    def follow(self, plan: merging.Plan) -> None:
        """Send by ``plan`` from now on; it has the order of this session. No data moves. Nothing may be in flight."""
        sparse, dense = self.exchanges()
        self.plan = plan
        if self.shards is not None:
            self.shards.follow(plan.bounds)
        self.fingerprint = zlib.crc32(plan.dumps().encode()) & 0x7FFFFFFF
        ride = sparse.carries_dense and not self.config.ordered
        self.messages: list[list[Message]] = []
        kinds = zip(plan.bounds, plan.labels, plan.dense, plan.parts, strict=True)
        for index, (bounds, label, goes_dense, parts) in enumerate(kinds):
            found = routing.segments(self.layout, *bounds, label == AHEAD and not goes_dense)
            if goes_dense:
                groups = group_by(found, lambda lane: (lane.device, lane.dtype))
            elif sparse.mixes_lanes:
                groups = group_into_messages(found, self.across.size, ride=ride)
            else:
                groups = group_by(found, lambda lane: lane)
            if parts > 1:
                groups = [message for group in groups for message in split(group, parts)]
            self.messages.append(
                [
                    Message(
                        message_name(index, number),
                        index,
                        sparse if selects(group, goes_dense) else dense,
                        tuple(group),
                    )
                    for number, group in enumerate(groups)
                ]
            )
        self.buffer_of = [index for index, count in enumerate(plan.counts) for _ in range(count)]
        # By slot: its own segment, if it is selected from before it is merged; in parts, each is when its turn comes.
        self.alone = {
            part.slots[0].index: part
            for buffer in self.messages
            for route in buffer
            for part in route.segments
            if part.lane.sparse and route.exchange.sparse and plan.labels[route.buffer] == AHEAD
            if plan.parts[route.buffer] == 1
        }

    def _arena(self, lane: Lane, length: int) -> Arena:
        slots = [slot for slot in self.layout.slots if slot.lane == lane]
        rates = self.config.rates
        rate = None if rates is None else rates.by_slot(self.parameters)
        return Arena(lane, length, slots, self.config.memory_of(lane.sparse), self.comm.size, rate)

    @property
    def across(self) -> Backend:
        """The ranks that exchange messages with this one: all, or those of its place on every node."""
        return self.comm if self.nodes is None else self.nodes.across

    def exchanges(self) -> tuple[Exchange, DenseExchange]:
        """New exchanges, of the sparse and of the dense lane."""
        made = exchanges(self.across, self.config, self.commit)
        for one in made:
            one.scale = self.config.op.scale(self.comm.size)  # a node's sum counts for all of its ranks
        return made

    def commit(self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor | None) -> None:
        self.arenas[segment.lane].commit(segment, indices, sent)

    def load(self, segment: Segment) -> SegmentBuffers:
        """The segment with its memory as it is in this step."""
        arena, part = self.arenas[segment.lane], slice(segment.start, segment.stop)
        return SegmentBuffers(segment, arena.work[part], arena.update[part])

    def tensor_budget(self, slot: Slot, step: int) -> int:
        """How many elements of one tensor a step sends, if it is selected from by itself."""
        density = self.config.density(slot.lane.density, step)
        if self.shares is None:
            return sparsifiers.budget(density, slot.numel)
        assert self.config.sparsifier is not None
        share = self.shares[slot.index] * (density / self.config.sparsifier.density)  # a warm-up is for all alike
        return min(max(1, math.ceil(share - 1e-6)), slot.numel)

    def budget(self, segment: Segment, step: int) -> int:
        """How many elements of the segment a step sends: merged tensors keep what each may send."""
        if self.shares is None:
            return sparsifiers.budget(self.config.density(segment.lane.density, step), segment.numel)
        return sum(self._share(segment, slot, step) for slot in segment.slots)

    def _share(self, segment: Segment, slot: Slot, step: int) -> int:
        """What of a tensor's budget falls to the part of it that lies in the segment."""
        start, stop = segment.inside(slot)
        return -(-self.tensor_budget(slot, step) * (stop - start) // slot.numel)

    def vector(self, segment: Segment, step: int) -> tuple[torch.Tensor, int, tuple[tuple[int, ...], ...]]:
        """What a sparsifier is given of a segment: the vector, k, and its shapes."""
        work, k, shapes = self.load(segment).work, self.budget(segment, step), segment.shapes
        if len(segment.slots) == 1:
            return work[: segment.numel], k, shapes[:1]  # no padding
        # Everything, padding too: else it could be chosen in place of an element.
        return work, segment.length if k == segment.numel else k, shapes

    def rest(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Return what ``p.grad`` should be once its gradient was handed over, until the exchange has ended."""
        if not self.parameters[slot.index].is_contiguous() or self.config.model is not None:
            return gradient  # see `gradient`; with merging="dear" it stays the script's own
        if self.shards is not None:
            return rest(self.shards.gradients[slot.index], gradient)
        return self.arena_of[slot.index].rest(slot, gradient)

    def moves(self, slot: Slot) -> bool:
        """Whether something of earlier steps was sent, so that a tensor has an update that no rank used in this one."""
        return self.arena_of[slot.index].memory.keeps and bool(self._whole(slot).any())

    def _whole(self, slot: Slot) -> torch.Tensor:
        gradients = self.arenas[slot.lane].gradients if self.shards is None else self.shards.gradients
        return gradients[slot.index]

    def gradient(self, slot: Slot) -> torch.Tensor:
        """The tensor's part of the update, in the strides of its parameter: what ``p.grad`` becomes.

        A view of the arena; for a parameter that is not in C order (channels_last) a copy, always the same one:
        fused optimizers read flat memory, so strides must agree.
        """
        update, parameter = self._whole(slot), self.parameters[slot.index]
        if parameter.is_contiguous():
            return update
        key = (slot.index, parameter.stride())
        if key not in self._copies:
            self._copies[key] = torch.empty_like(parameter, requires_grad=False)
        return self._copies[key].copy_(update)

    def state(self) -> State:
        """What is kept from step to step: views."""
        return {
            (kind, slot.name): tensor
            for slot in self.layout.slots
            for kind, tensor in self.arenas[slot.lane].state_of(slot).items()
        }

    def take(self, parked: State) -> None:
        """Move state in; what has no place here stays in ``parked``. Collective.

        The momentum of averages is the same on every rank, and rank 0's counts: others may not have loaded it.
        """
        for key, tensor in self.state().items():
            if key in parked:
                tensor.copy_(parked.pop(key))
        for number, arena in enumerate(self.arenas.values()):
            if arena.memory.corrects and not arena.memory.keeps:
                self.across.broadcast(arena.momentum, 0, f"momentum {number}").wait(self.config.timeout)

    def give(self, shares: dict[str, int]) -> None:
        """Take shares by importance as they were, if they are of all the tensors here."""
        if self.energy is not None and all(slot.name in shares for slot in self.layout.slots):
            self.set_budgets(tuple(shares[slot.name] for slot in self.layout.slots))

    def set_budgets(self, budgets: tuple[int, ...]) -> None:
        """Send so many elements of each tensor from now on, by slot; energies are not added up any more."""
        self.energy, self.shares = None, budgets

    def shares_by_name(self) -> dict[str, int] | None:
        """How many elements of each tensor to send, by importance, once that is known."""
        return None if self.shares is None else {slot.name: self.shares[slot.index] for slot in self.layout.slots}

    def keys(self) -> set[str]:
        """Owners of sparsifier state."""
        return {routing.key(part) for buffer in self.messages for route in buffer for part in route.segments}

    def correct(self, used: Sequence[bool]) -> int:
        """Every update is there; returns the bytes that go round in the node then. ``used``: by slot, by any rank."""
        for lane, arena in self.arenas.items():
            arena.correct(slot for slot in self.layout.slots if slot.lane == lane and not used[slot.index])
        return 0 if self.shards is None else self.shards.hand_round(self.arenas)

    def swap(self) -> None:
        """End of a step: what was not sent becomes the residual."""
        for arena in self.arenas.values():
            arena.swap()
        if self._untrimmed:  # in the first step all gradients are there before any can be let go; the second one's
            self._untrimmed -= 1  # go one by one, but out of what the first has left in pieces
            trim()


def selects(group: Sequence[Segment], goes_dense: bool) -> bool:
    """Whether a message of a merge buffer carries what a sparsifier selects."""
    return group[0].lane.sparse and not goes_dense


SPARSE: dict[str, type[Exchange]] = {  # of the sparse lane, by name
    AUTO: SparseExchange,
    "sparse": SparseExchange,
    "oktopk": OkTopkExchange,
    "masked": MaskedExchange,
    "two-level": SparseExchange,
}


def exchanges(comm: Backend, config: Config, commit: Commit) -> tuple[Exchange, DenseExchange]:
    """The exchanges of the sparse and of the dense lane."""
    kind: type[Any] = SPARSE[config.exchange]
    more: dict[str, Any] = {"payload": config.checks_payload}
    if kind is MaskedExchange:
        more |= {"drawn": isinstance(config.sparsifier, RandomK), "ordered": config.ordered}
    elif kind is SparseExchange:
        more |= {"wire": config.wire}
    return kind(comm, config.op, commit, config.timeout, **more), DenseExchange(
        comm,
        config.op,
        commit,
        config.timeout,
        keeps=config.memory_of(False).keeps or config.memory_of(True).keeps,  # of lanes that keep nothing, nothing is
        cast=config.cast,
        predivide=config.predivide,
        ordered=config.ordered,
    )


def _lane(member: ParameterInfo) -> Lane:
    return Lane(member.device, member.dtype, member.sparse, member.density)
