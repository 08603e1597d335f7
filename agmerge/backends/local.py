# SPDX-License-Identifier: Apache-2.0
"""In-memory backend: the ranks of a group are threads of one process. Alone, a group of one.

It is also the strictest backend: it checks that all ranks make the same call, keeps no copy of a tensor
until the last rank has arrived (so that a buffer that is touched too early shows), adds in rank
order, records every call, and lets a test inject faults and delays.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from agmerge.backends import base
from agmerge.backends.base import OPERATIONS, Backend, Handle, Listen, matched
from agmerge.backends.status import ProbeResult, Row
from agmerge.backends.streams import streams_of
from agmerge.errors import AGMergeError, CollectiveTimeout, PeerLost, RankMismatchError
from agmerge.version import __version__

SIZES: tuple[str, ...] = ()
READS_SLURM = False
PROBE = ""
HOST = ("cpu",)  # types of devices without streams: nothing is recorded there
CHECKS_MARKS = False  # whether groups check the docstrings of functions that start a collective; for our own tests


@dataclass(frozen=True)
class Call:
    """Collective as one rank starts it, for ``inject``."""

    rank: int  # of the rank in the group
    kind: str  # "all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast" or "barrier"
    name: str  # as the caller gave it
    index: int  # counts this rank's calls in the whole group, from 0
    tensor: torch.Tensor  # the input; may be changed in place


@dataclass(frozen=True)
class Part:
    """Contribution of one rank to a collective.

    On a device each rank queues into streams of its own: ``ready`` is the event behind what writes the tensor.
    """

    tensor: torch.Tensor
    splits: tuple[int, ...] = ()  # of an all-to-all: elements for each rank
    expected: tuple[int, ...] = ()  # of an all-to-all: elements from each rank
    ready: Any = None  # None: the tensor is the host's

    def queued(self) -> Part:
        """Return it with the event behind all that this thread has queued so far."""
        if self.tensor.device.type in HOST:
            return self
        streams = streams_of(self.tensor.device)
        return self if streams is None else replace(self, ready=streams.record(streams.current(self.tensor.device)))

    def await_ready(self) -> None:
        """Make readers that this thread queues from now on wait for the tensor, whose memory is kept for them."""
        streams = None if self.ready is None else streams_of(self.tensor.device)
        if streams is not None:
            here = streams.current(self.tensor.device)
            streams.wait(here, self.ready)
            streams.keep(self.tensor, here)


@dataclass
class _Op:
    """Collective that ranks are joining; the last one to arrive computes the result for all."""

    inputs: dict[int, Part] = field(default_factory=dict)  # by the rank that has joined
    described: dict[int, str] = field(default_factory=dict)  # by rank: what must be the same on all, as text
    result: list[Part] = field(default_factory=list)  # once complete: what every rank takes its own from
    error: AGMergeError | None = None  # once complete: what every rank raises
    complete: bool = False  # the last rank has joined


class Group:
    """State that the ranks of one in-memory group share.

    ``inject(call)``: runs on the rank's thread before each collective that it starts. ``checks_marks``: refuse
    functions that start a collective and do not say so (:mod:`agmerge.backends.base`); None: as
    ``CHECKS_MARKS`` says.
    """

    def __init__(
        self, size: int, inject: Callable[[Call], None] | None = None, checks_marks: bool | None = None
    ) -> None:
        self.size, self.inject = size, inject
        self.checks_marks = CHECKS_MARKS if checks_marks is None else checks_marks
        self.changed = threading.Condition()  # held to touch the fields below; notified when a rank comes or goes
        self.ops: dict[tuple[str, int], _Op] = {}  # incomplete ones, by communicator and number of the call on it
        self.left: dict[int, str] = {}  # ranks that take part in nothing any more, and why
        self.told: set[int] = set()  # ranks on which a collective has raised for that
        self.calls: list[list[tuple[str, str, int]]] = [[] for _ in range(size)]  # by rank: kind, name, bytes

    def leave(self, rank: int, why: str) -> None:
        """Record that ``rank`` takes part in nothing any more (``why``: in words); those that wait for it are told."""
        with self.changed:
            self.left[rank] = why
            self.changed.notify_all()


Combine = Callable[[list[Part]], list[Part]]


def _reduced(op: str) -> Combine:
    """Return a function that makes all tensors one, in the order of the ranks. ``op``: of ``OPERATIONS``."""
    combine = OPERATIONS[op]

    def reduce(parts: list[Part]) -> list[Part]:
        total = parts[0].tensor.clone()
        for part in parts[1:]:
            combine(total, part.tensor, out=total)
        return [Part(total)]

    return reduce


def _all(parts: list[Part]) -> list[Part]:
    # Copies: once the last rank has arrived, every rank may change what it handed in.
    """Return copies: once the last rank has arrived, every rank may change what it handed in."""
    return [Part(part.tensor.clone(), part.splits) for part in parts]


def _pieces(parts: list[Part]) -> list[Part]:
    """Return the results of an all-to-all, or raise if a rank is sent other lengths than it expects."""
    for rank, part in enumerate(parts):
        sent = tuple(other.splits[rank] for other in parts)
        if sent != part.expected:
            raise RankMismatchError(
                f"AGM501: rank {rank} expected pieces of {list(part.expected)} elements, got {list(sent)}"
            )
    return _all(parts)


class LocalHandle(Handle):
    """Handle that waits for the last rank to arrive, then puts the result in place."""

    def __init__(self, backend: LocalBackend, op: _Op, name: str, deliver: Callable[[_Op], None]) -> None:
        super().__init__(name, backend.ranks)
        self._backend, self._op, self._deliver = backend, op, deliver
        self._delivered = False

    def done(self) -> bool:
        return self._op.complete

    def _wait(self, timeout: float) -> None:
        group, deadline = self._backend.group, time.monotonic() + timeout
        with group.changed:
            while not self._op.complete:
                missing = [rank for rank in self._backend.ranks if rank not in self._op.inputs]
                late = f"AGM201: {self._name}: no answer from ranks {missing} within {timeout:g} s"
                gone = [f"rank {rank} {group.left[rank]}" for rank in missing if rank in group.left]
                if gone:
                    group.told.add(self._backend.ranks[self._backend.rank])
                    raise PeerLost(f"AGM206: {self._name}: {'; '.join(gone)}", missing=missing)
                if not group.changed.wait(max(0.0, deadline - time.monotonic())) and not self._op.complete:
                    raise CollectiveTimeout(late, missing=missing)
        if self._op.error is not None:
            # Each rank raises one of its own: a traceback belongs to one thread.
            raise type(self._op.error)(*self._op.error.args)
        if not self._delivered:
            for part in self._op.result:
                part.await_ready()
            self._deliver(self._op)
            self._delivered = True


class LocalBackend(Backend):
    """One rank's end of a communicator over ``ranks`` of an in-memory group.

    ``world_rank``: this rank's number in the group. ``channel``: tells the communicators of a group apart.
    """

    name = "local"

    def __init__(self, group: Group, ranks: Sequence[int], world_rank: int, channel: str = "world") -> None:
        self.group, self.ranks, self._world_rank, self._channel = group, list(ranks), world_rank, channel
        self.rank, self.size = self.ranks.index(world_rank), len(self.ranks)
        self.local_rank, self.local_size = world_rank, group.size
        self._calls = 0  # started on this communicator: the same number on every rank
        self._children = 0  # communicators made of this one, for their channels
        self._closed = False

    def _start(
        self, kind: str, name: str, part: Part, combine: Combine, deliver: Callable[[_Op], None], fixed: str
    ) -> Handle:
        """Join a collective; the last rank to join computes its result.

        ``kind`` and ``name``: of the collective. ``part``: this rank's contribution. ``combine``: makes the result of
        the parts of all ranks. ``deliver``: puts it where this rank wants it. ``fixed``: what else must be the same on
        all ranks, as text.
        """
        group, tensor, log = self.group, part.tensor, self.group.calls[self._world_rank]
        if self._closed:
            raise AGMergeError(f"AGM123: {name}: this communicator is closed. Create a new one.")
        if group.checks_marks and self.size > 1:
            base.require_marks(name, sys._getframe(1))
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: the tensor of shape {list(tensor.shape)} must be contiguous")
        if group.inject is not None:
            group.inject(Call(self._world_rank, kind, name, len(log), tensor))
        log.append((kind, name, tensor.numel() * tensor.element_size()))
        with group.changed:
            key = (self._channel, self._calls)
            op = group.ops.setdefault(key, _Op())
            op.inputs[self._world_rank] = part.queued()
            op.described[self._world_rank] = f"{kind} {matched(name)!r} {fixed}"
            if len(op.inputs) == self.size:
                del group.ops[key]
                self._complete(op, combine)
                group.changed.notify_all()
        self._calls += 1
        return LocalHandle(self, op, name, deliver)

    def _complete(self, op: _Op, combine: Combine) -> None:
        """Compute the result, or the error that every rank gets."""
        try:
            if len(set(op.described.values())) > 1:
                calls = "; ".join(f"rank {rank}: {op.described[rank]}" for rank in self.ranks)
                op.error = RankMismatchError(f"AGM101: Ranks made different calls: {calls}")
            else:
                for part in op.inputs.values():
                    part.await_ready()
                op.result = [part.queued() for part in combine([op.inputs[rank] for rank in self.ranks])]
        except Exception as error:
            # Every rank must learn of it, not only the one that happened to arrive last.
            kind = type(error) if isinstance(error, AGMergeError) else AGMergeError
            op.error = kind(f"{op.described[self._world_rank]}: {error}")
        op.complete = True

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        fixed = _shape(tensor) if op == "sum" else f"{_shape(tensor)} {op}"
        return self._start("all_reduce", name, Part(tensor), _reduced(op), _into(tensor), fixed)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        _check_out(name, out, self.size * tensor.numel(), tensor.dtype)

        def deliver(op: _Op) -> None:
            torch.cat([part.tensor for part in op.result], out=out)

        return self._start("all_gather", name, Part(tensor), _all, deliver, _shape(tensor))

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        _check_out(name, out, sum(out_splits), tensor.dtype)
        if sum(splits) != tensor.numel() or not len(splits) == len(out_splits) == self.size:
            raise ValueError(
                f"{name}: splits {list(splits)} and {list(out_splits)} do not divide {tensor.numel()} and "
                f"{out.numel()} elements into {self.size} pieces"
            )

        def deliver(op: _Op) -> None:
            pieces = [torch.split(part.tensor, list(part.splits))[self.rank] for part in op.result]
            torch.cat(pieces, out=out)

        part = Part(tensor, tuple(splits), tuple(out_splits))
        return self._start("all_to_all", name, part, _pieces, deliver, str(tensor.dtype))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        _check_out(name, out, tensor.numel() // self.size, tensor.dtype)
        if tensor.numel() % self.size:
            raise ValueError(
                f"{name}: the number of elements, {tensor.numel()}, must be divisible by the number of ranks, "
                f"{self.size}"
            )
        start = self.rank * out.numel()

        def deliver(op: _Op) -> None:
            out.copy_(op.result[0].tensor[start : start + out.numel()])

        return self._start("reduce_scatter", name, Part(tensor), _reduced("sum"), deliver, _shape(tensor))

    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Handle:
        def root_copy(parts: list[Part]) -> list[Part]:
            if not 0 <= root < len(parts):
                raise ValueError(f"there is no rank {root}")
            return _all([parts[root]])

        fixed = f"{_shape(tensor)} from {root}"
        return self._start("broadcast", name, Part(tensor), root_copy, _into(tensor), fixed)

    def barrier(self, name: str) -> Handle:
        return self._start("barrier", name, Part(torch.empty(0)), _all, lambda op: None, "")

    def duplicate(self, label: str, timeout: float) -> LocalBackend:
        self._children += 1
        channel = f"{self._channel}/{self._children}"
        return LocalBackend(self.group, self.ranks, self._world_rank, channel)

    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> LocalBackend | None:
        self._children += 1
        if self.rank not in ranks:
            return None
        channel = f"{self._channel}/{self._children}"
        return LocalBackend(self.group, [self.ranks[rank] for rank in ranks], self._world_rank, channel)

    @property
    def has_failed(self) -> bool:
        return self._world_rank in self.group.told

    def close(self) -> None:
        """Refuse calls from now on; nothing is held that could be released."""
        self._closed = True


def _into(out: torch.Tensor) -> Callable[[_Op], None]:
    """Return a function that copies the one result into ``out``."""

    def deliver(op: _Op) -> None:
        out.copy_(op.result[0].tensor)

    return deliver


def _check_out(name: str, out: torch.Tensor, length: int, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless ``out`` has this length and dtype, contiguous: other backends need that.

    In memory torch would quietly resize or convert it.
    """
    if out.numel() != length or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"{name}: the output must be {length} contiguous elements of {dtype}, got {_shape(out)}")


def _shape(tensor: torch.Tensor) -> str:
    """Return dtype and shape as text."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def alone() -> LocalBackend:
    """Return the one rank of a group of one."""
    return LocalBackend(Group(1), [0], 0)


# -- as a backend of the table ----------------------------------------------------------------------------------


def initialised() -> bool:
    """Return False: there is nothing that a script could initialise."""
    return False


def workers() -> int:
    """Return 1: there is nothing that a script could initialise."""
    return 1


def launched(env: Mapping[str, str]) -> bool:
    """Return False: no launcher starts workers of this backend."""
    return False


def can_join(env: Mapping[str, str]) -> bool:
    """Return False: it is taken where no other backend can join."""
    return False


def open(env: Mapping[str, str], timeout: float, listen: Listen) -> LocalBackend:
    """Return a group of this process alone, whatever the arguments say."""
    return alone()


def diagnose(probe: ProbeResult, python: str, mpirun: str) -> Row:
    """Return the doctor's row of this backend, which always works."""
    return Row("backend", "local", True, f"agmerge {__version__}: one worker, this process")
