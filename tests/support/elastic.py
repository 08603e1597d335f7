# SPDX-License-Identifier: Apache-2.0
"""Elastic groups of ranks as threads: some die, the others form the next group and go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from agmerge.backends import Backend
from agmerge.backends.local import Call, Group, LocalBackend, LocalHandle
from agmerge.errors import PeerLost
from agmerge.runtime import workers

T = TypeVar("T")
Inject = Callable[[int, int, Call], None]  # (worker, generation, its call)


class Killed(BaseException):
    """A worker dies here: raised on its thread by a test."""


@dataclass(frozen=True)
class BadLuck:
    """Worker ``of`` does not get the results of its call number ``call`` and later ones: ``victim`` is lost meanwhile.

    In memory a result is there for all ranks or for none; over a network some have it and some do not.
    """

    of: int
    call: int
    victim: int


class Unlucky(LocalBackend):
    """Communicator of a worker with bad luck; ``lose`` is called when it waits for the first result that it loses."""

    first_lost: int
    lose: Callable[[], None]

    def _start(self, *arguments: Any) -> LocalHandle:
        handle = super()._start(*arguments)
        if len(self.group.calls[self._world_rank]) > self.first_lost:
            handle.__class__ = LostHandle
        return handle

    def duplicate(self, label: str, timeout: float) -> LocalBackend:
        return self.like(super().duplicate(label, timeout))

    def like(self, made: LocalBackend) -> LocalBackend:
        """Give ``made`` the same bad luck."""
        made.__class__ = Unlucky
        made.first_lost, made.lose = self.first_lost, self.lose  # type: ignore[attr-defined]
        return made


class LostHandle(LocalHandle):
    """Handle of a collective of which the others have the result."""

    def done(self) -> bool:
        return False

    def _wait(self, timeout: float) -> None:
        with self._backend.group.changed:
            assert self._backend.group.changed.wait_for(lambda: self._op.complete or self._backend.group.left, 20)
        self._backend.lose()  # type: ignore[attr-defined]
        raise PeerLost(f"{self._name}: a rank has left")


class Lighthouse:
    """Membership of an in-memory job: which workers live, and the group of each generation."""

    def __init__(self, size: int, inject: Inject | None, luck: BadLuck | None) -> None:
        self._inject, self._luck, self._changed = inject, luck, threading.Condition()
        self._living = set(range(size))
        self._asking: set[int] = set()
        self.generation = 0
        self.members = list(range(size))
        self._group = self._open()

    def _open(self) -> Group:
        members, generation, inject = list(self.members), self.generation, self._inject

        def injected(call: Call) -> None:
            self._check(members[call.rank])
            if inject is not None:
                inject(members[call.rank], generation, call)

        return Group(len(members), injected)

    def backend(self, worker: int) -> LocalBackend:
        """Return the communicator of the present generation."""
        backend = LocalBackend(self._group, range(len(self.members)), self.members.index(worker))
        luck = self._luck
        if self.generation or luck is None or luck.of != worker:
            return backend
        backend.__class__ = Unlucky
        backend.first_lost, backend.lose = luck.call, lambda: self.end(luck.victim, "is lost")  # type: ignore
        return backend

    def _check(self, worker: int) -> None:
        """Raise :class:`Killed` on a worker that is lost."""
        if worker not in self._living:
            raise Killed

    def end(self, worker: int, why: str) -> None:
        """Record that a worker is gone."""
        with self._changed:
            self._living.discard(worker)
            if worker in self.members:
                self._group.leave(self.members.index(worker), why)
            self._form()

    def regroup(self, worker: int) -> LocalBackend:
        """Collective. Leave the present generation, and return the communicator of the next one."""
        with self._changed:
            self._check(worker)
            self._group.leave(self.members.index(worker), "has given this group up")
            now = self.generation
            self._asking.add(worker)
            self._form()
            assert self._changed.wait_for(lambda: self.generation > now, timeout=30), "no quorum"
            self._check(worker)  # it may have been lost while it waited
            return self.backend(worker)

    def _form(self) -> None:
        if self._asking and self._asking >= self._living:
            self.members = [worker for worker in self.members if worker in self._living]
            self._asking = set()
            self.generation += 1
            self._group = self._open()
            self._changed.notify_all()


def run(
    size: int,
    fn: Callable[[int], T],
    inject: Inject | None = None,
    luck: BadLuck | None = None,
    around: Callable[[int, LocalBackend, Lighthouse], Backend] = lambda worker, backend, lighthouse: backend,
) -> list[T | BaseException]:
    """Call ``fn(worker)`` on threads of an elastic group; return results and errors by worker, :class:`Killed` too.

    ``around``: what a worker uses in place of its communicator of a generation.
    """
    lighthouse = Lighthouse(size, inject, luck)
    results: list[T | BaseException] = [AssertionError("has not ended")] * size

    def body(worker: int) -> None:
        first = around(worker, lighthouse.backend(worker), lighthouse)
        workers.bind(first, lambda lets_in: around(worker, lighthouse.regroup(worker), lighthouse))
        try:
            results[worker] = fn(worker)
        except BaseException as error:
            results[worker] = error
        lighthouse.end(worker, "has ended")

    threads = [threading.Thread(target=body, args=(worker,), daemon=True) for worker in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results
