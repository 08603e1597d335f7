"""Everything that holds for one agreed membership and order: plan, layout, arenas, merge buffers.

A session is opened collectively, at the first step and whenever membership, a dtype, a device or the plan has
changed. Residuals move from session to session by name.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

import merging
from agmerge.arena import Arena
from agmerge.backends import Backend
from agmerge.config import Config
from agmerge.exchanges import DenseExchange, Exchange, Load, SparseExchange
from agmerge.handshake import Fact, agree, broadcast_bytes, gather_bytes
from agmerge.layout import Lane, Layout, Segment, Slot
from agmerge.members import Member

# Bytes that riding dense segments may add to what a rank receives: about what an all-reduce of their own costs
# to start (0.5 ms at 1 Gbit/s). A rule by measured cost replaces it with the exchange issue.
RIDE = 65536


State = dict[tuple[str, str], torch.Tensor]  # by kind ("residual", "momentum") and name of the tensor


@dataclass(frozen=True)
class Route:
    """The segments of one merge buffer that share a message, and the exchange that takes them."""

    name: str
    buffer: int
    exchange: Exchange
    segments: tuple[Segment, ...]

    @cached_property
    def slots(self) -> list[Slot]:
        """The tensors of the message, in the order of its used bits."""
        return [slot for segment in self.segments for slot in segment.slots]

    def key(self, segment: Segment) -> str:
        """Owner of a sparsifier's state for this vector."""
        return f"{self.name}/{segment.lane}"


def model_facts(members: Sequence[Member], config: Config) -> list[Fact]:
    """What ranks must agree on about the model: every tensor, in the order of the groups."""
    groups = config.groups.by_name(members) if config.groups is not None else []
    group_of = {name: f" group {number}" for number, group in enumerate(groups) for name in group}
    facts: list[Fact] = []
    for i, member in enumerate(members):
        facts.append((f"tensor {i}", f"{member.name} {member.describe()}{group_of.get(member.name, '')}"))
    return facts


def routes(segments: Sequence[Segment], size: int) -> list[list[Segment]]:
    """Which segments of a merge buffer share a message: pure, the same on every rank.

    Per device, sparse segments share one, and the dense ones ride along while an all-gather of them is not
    much dearer than an all-reduce: it receives ``(W-1) m`` bytes instead of ``2 (W-1)/W m``.
    """
    messages: list[list[Segment]] = []
    for device in dict.fromkeys(segment.lane.device for segment in segments):
        here = [segment for segment in segments if segment.lane.device == device]
        sparse = [segment for segment in here if segment.lane.sparse]
        dense = [segment for segment in here if not segment.lane.sparse]
        riding = sum(segment.length * segment.lane.dtype.itemsize for segment in dense)
        if sparse and riding * (size - 1) * (1 - 2 / size) <= RIDE:
            messages.append(sparse + dense)
        else:
            messages += [sparse] if sparse else []
            messages += [[segment] for segment in dense]
    return messages


class Session:
    """The state of the exchange between two agreements."""

    def __init__(self, comm: Backend, config: Config, members: Sequence[Member], plan: merging.Plan) -> None:
        self.comm, self.config, self.plan = comm, config, plan
        by_name = {member.name: member for member in members}
        assert plan.names is not None
        ordered = [by_name[name] for name in plan.names]
        self.parameters = [member.parameter for member in ordered]
        self.layout = Layout([(member.name, member.shape, _lane(member)) for member in ordered])
        self.slot_of = dict(zip(self.parameters, self.layout.slots, strict=True))
        self.arenas = {lane: self._arena(lane, length) for lane, length in self.layout.lengths.items()}
        self.used = [False] * len(ordered)
        self._copies: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self.fingerprint = zlib.crc32(plan.dumps().encode()) & 0x7FFFFFFF
        sparse = SparseExchange(comm, config.op, self._commit, config.timeout)
        dense = DenseExchange(
            comm,
            config.op,
            self._commit,
            config.timeout,
            keeps=config.memory_of(False).keeps,
            cast=config.cast,
            predivide=config.predivide,
            ordered=config.ordered,
        )
        self.buffers: list[list[Route]] = []
        for index, (start, stop) in enumerate(plan.bounds):
            messages = routes(self.layout.segments(start, stop), comm.size)
            self.buffers.append(
                [
                    Route(_title(index, number), index, sparse if group[0].lane.sparse else dense, tuple(group))
                    for number, group in enumerate(messages)
                ]
            )
        self.buffer_of = [index for index, count in enumerate(plan.counts) for _ in range(count)]

    def _arena(self, lane: Lane, length: int) -> Arena:
        slots = [slot for slot in self.layout.slots if slot.lane == lane]
        return Arena(lane, length, slots, self.config.memory_of(lane.sparse), self.comm.size)

    def _commit(self, segment: Segment, indices: torch.Tensor | None, sent: torch.Tensor) -> None:
        self.arenas[segment.lane].commit(segment, indices, sent)

    def load(self, segment: Segment) -> Load:
        """The segment with its memory as it is in this step."""
        arena, part = self.arenas[segment.lane], slice(segment.start, segment.stop)
        return Load(segment, arena.work[part], arena.update[part])

    def gradient(self, slot: Slot) -> torch.Tensor:
        """The tensor's part of the update, in the strides of its parameter: what ``p.grad`` becomes.

        A view of the arena; for a parameter that is not in C order (channels_last) a copy, always the same one:
        fused optimizers read flat memory, so strides must agree.
        """
        update, parameter = self.arenas[slot.lane].gradients[slot.index], self.parameters[slot.index]
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
        """Move state in; what has no place here stays in ``parked``."""
        for key, tensor in self.state().items():
            if key in parked:
                tensor.copy_(parked.pop(key))

    def used_names(self) -> set[str]:
        """The tensors for which any rank has ever had a gradient."""
        return {slot.name for slot in self.layout.slots if self.used[slot.index]}

    def keys(self) -> set[str]:
        """Owners of sparsifier state."""
        return {route.key(part) for buffer in self.buffers for route in buffer for part in route.segments}

    def correct(self) -> None:
        """Every update is there."""
        for arena in self.arenas.values():
            arena.correct()

    def swap(self) -> None:
        """End of a step: what was not sent becomes the residual."""
        for arena in self.arenas.values():
            arena.swap()


def open_session(
    comm: Backend,
    config: Config,
    members: Sequence[Member],
    order: Iterable[str],
    steps: int,
    used: Set[str],
    recorded: merging.Plan | None,
) -> tuple[Session, int]:
    """Agree on members, order and plan, and set up memory. Collective.

    ``order``: names in the order in which this rank saw them ready; tensors it did not see go last. ``steps``:
    committed exchanges so far. Rank 0's count, in both. ``used``: tensors that this rank knows to have had a
    gradient; any rank's count. ``recorded``: a plan to go on with, if it still fits. Rank 0 plans; the plan
    travels with a checksum, and every rank checks it against its own model. Raises
    :class:`agmerge.RankMismatchError` on every rank if the models differ, and ``ValueError`` on every rank if
    the plan does not fit.
    """
    facts = model_facts(members, config)
    advice = "Change parameters (add_param_group, requires_grad, dtype, device) on every rank at the same step."
    agree(comm, facts, what="membership", advice=advice, timeout=config.timeout)
    if not members:
        raise ValueError("no parameter needs a gradient, so there is nothing to exchange: unfreeze one, or do not step")
    told: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            told = {"plan": _make_plan(config, members, order, recorded).dumps(), "steps": steps}
        except ValueError as error:
            told = {"problem": str(error)}
    told = json.loads(broadcast_bytes(comm, json.dumps(told).encode(), 0, "plan", config.timeout))
    problem = told.get("problem") or _misfit(merging.Plan.loads(told["plan"]), members)
    agree(comm, [("the plan", problem or "fits")], what="plan", advice=advice, timeout=config.timeout)
    if problem:
        raise ValueError(f"the plan does not fit the model: {problem}")
    session = Session(comm, config, members, merging.Plan.loads(told["plan"]))
    mine = bytes(slot.name in used for slot in session.layout.slots)
    session.used = [any(ranks) for ranks in zip(*gather_bytes(comm, mine, "used", config.timeout), strict=True)]
    return session, told["steps"]


def _misfit(plan: merging.Plan, members: Sequence[Member]) -> str:
    """Why ``plan`` cannot serve these members; empty if it can."""
    names = sorted(member.name for member in members)
    if sum(plan.counts) != len(names):
        return f"it covers {sum(plan.counts)} tensors, the model has {len(names)}"
    different = sorted(set(plan.names or ()) ^ set(names))
    return f"tensors that only one of them has: {', '.join(different)}" if different else ""


def _make_plan(
    config: Config, members: Sequence[Member], order: Iterable[str], recorded: merging.Plan | None
) -> merging.Plan:
    """This rank's plan, from what it saw. A saved plan with names brings its own order."""
    parameters = {member.name: member.parameter for member in members}
    if config.plan is not None and config.plan.names is not None:
        return config.plan
    if recorded is not None and not _misfit(recorded, members):
        return recorded
    # Reversed registration stands in for tensors that no backward pass has reached yet.
    names = list(dict.fromkeys([*(name for name in order if name in parameters), *reversed(list(parameters))]))
    if config.groups is not None:
        return config.groups.plan(members, names)
    if config.plan is not None:
        config.plan.check(len(names))
        return merging.Plan(config.plan.counts, config.plan.dense, config.plan.labels, tuple(names))
    assert config.planner is not None
    sparse = {member.name for member in members if member.sparse}
    numel = [parameters[name].numel() for name in names]
    work = [parameters[name].numel() if name in sparse else 0 for name in names]
    profile = merging.Profile(names, numel, [0.0] * len(names), work=work)
    return config.planner.plan(profile, _UNMEASURED, config.mode)


def _linear(seconds: float) -> Any:
    return lambda elements: seconds * elements


# Until profiling is built, planners that go by bytes or counts are the only ones, and they read no costs.
_UNMEASURED = merging.Costs(sparsify=_linear(1e-9), exchange=_linear(1e-9))


def _lane(member: Member) -> Lane:
    return Lane(member.device, member.dtype, member.sparse, member.density)


def _title(buffer: int, number: int) -> str:
    return f"buffer {buffer}" if number == 0 else f"buffer {buffer}.{number}"
