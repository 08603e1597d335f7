# SPDX-License-Identifier: Apache-2.0
"""Gloo without a world of torch.distributed: process groups that can be left behind when one of their ranks is lost."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from agmerge.backends import timeouts
from agmerge.backends.base import Backend, Handle
from agmerge.backends.torch import AT_ONCE, LEAST_BY_NEIGHBOURS
from agmerge.backends.torch_groups import translated
from agmerge.errors import CollectiveTimeout, NoAnswer, PeerLost

SLICE = 0.1  # seconds between two looks whether others have given the group up
LOOKS = 0.05  # likewise, while it connects
LOST = "AGM211: {}: a worker of this group failed ({})"


class Broken:
    """Whether a group has been given up, and why: the same object for all communicators of a generation."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._since = 0.0  # seconds of the monotonic clock
        self.has_raised = False  # an error has told this worker's script, or a step
        self.why = ""

    def __bool__(self) -> bool:
        return self._event.is_set()

    @property
    def seconds(self) -> float:
        """Return for how long it has been given up; 0: it has not."""
        return time.monotonic() - self._since if self else 0.0

    def error(self, name: str) -> PeerLost:
        """Return the error of collective ``name``, to be raised."""
        self.has_raised = True
        return PeerLost(LOST.format(name, self.why))

    def give_up(self, why: str) -> None:
        """Give the group up, for good: its collectives raise."""
        if not self:
            self.why, self._since = why, time.monotonic()
            self._event.set()


class BareHandle(Handle):
    """Handle of Gloo's work that also ends where others have given the group up. Keeps its tensors alive.

    ``under_way``: the works of its group that have not ended, as far as is known; this one is among them until it has.
    """

    def __init__(
        self,
        work: Any,
        name: str,
        ranks: Sequence[int],
        broken: Broken,
        under_way: set[Any],
        *tensors: torch.Tensor,
    ) -> None:
        super().__init__(name, ranks)
        self._work, self._broken, self._under_way, self._tensors = work, broken, under_way, tensors
        under_way.add(work)

    def done(self) -> bool:
        return bool(self._broken) or bool(self._work.is_completed())

    def _wait(self, timeout: float) -> None:
        left = timeout
        while True:
            if self._broken and not self._work.is_completed():
                raise self._broken.error(self._name)
            try:
                with translated(self._name, f" within {timeout:g} s"):
                    self._work.wait(timedelta(seconds=min(SLICE, left)))
            except CollectiveTimeout:
                left -= SLICE
                if left <= 0:
                    raise
            except PeerLost as error:
                self._broken.give_up(error.words)
                raise self._broken.error(self._name) from error
            else:
                self._tensors = ()
                self._under_way.discard(self._work)
                return


class BareGloo(Backend):
    """Backend over a ``ProcessGroupGloo`` of its own.

    ``dist``: the module ``torch.distributed``. ``store``: of the group's own, which all ranks use. ``place``: (local
    rank, local size). ``broken``: of the generation.
    """

    name = "torch"

    def __init__(
        self, dist: Any, store: Any, rank: int, size: int, place: tuple[int, int], timeout: float, broken: Broken
    ) -> None:
        self._dist, self._store, self._timeout, self._broken = dist, store, timeout, broken
        self.rank, self.size, (self.local_rank, self.local_size) = rank, size, place
        self._children = 0
        self._under_way: set[Any] = set()  # works of torch's
        self._group: Any = None  # if it cannot be made
        with translated("init()"):
            self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))

    @property
    def has_failed(self) -> bool:
        return self._broken.has_raised

    @property
    def through_host(self) -> bool:
        return True

    def scatters_by_all_reduce(self, tensor: torch.Tensor) -> bool:
        return True

    def _start(self, name: str, start: Callable[[], Any], *tensors: torch.Tensor) -> Handle:
        if self._broken:
            raise self._broken.error(name)
        try:
            with translated(name):
                work = start()
        except PeerLost as error:
            self._broken.give_up(error.words)
            raise self._broken.error(name) from error
        return BareHandle(work, name, range(self.size), self._broken, self._under_way, *tensors)

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        kind = getattr(self._dist.ReduceOp, op.upper())
        return self._start(name, lambda: self._group.allreduce([tensor], kind), tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        if 2 < self.size <= AT_ONCE and 0 < tensor.nbytes < LEAST_BY_NEIGHBOURS:
            copies = tensor.repeat(self.size)
            return self._start(name, lambda: self._group.alltoall_base(out, copies, [], []), out, copies)
        return self._start(name, lambda: self._group._allgather_base(out, tensor), out, tensor)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        lengths = list(out_splits), list(splits)
        return self._start(name, lambda: self._group.alltoall_base(out, tensor, *lengths), out, tensor)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        return self._start(name, lambda: self._group._reduce_scatter_base(out, tensor), out, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Handle:
        return self._start(name, lambda: self._group.broadcast(tensor, root), tensor)

    def barrier(self, name: str) -> Handle:
        return self.all_reduce(torch.zeros(1), name)

    def duplicate(self, label: str, timeout: float) -> BareGloo:
        self._children += 1
        store = self._dist.PrefixStore(f"copy {self._children}", self._store)
        return self._connected(store, self.rank, self.size, label, timeout)

    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> BareGloo | None:
        self._children += 1
        if self.rank not in ranks:
            return None
        store = self._dist.PrefixStore(f"part {self._children} of {list(ranks)}", self._store)
        return self._connected(store, list(ranks).index(self.rank), len(ranks), label, timeout)

    def _connected(self, store: Any, rank: int, size: int, label: str, timeout: float) -> BareGloo:
        """Collective. Return a communicator of ranks of this group.

        Raises as soon as this group is given up: by itself Gloo would wait for one that is lost until ``timeout``.
        """
        place, broken = (self.local_rank, self.local_size), self._broken
        try:
            return unless(
                lambda: broken.why,
                lambda: BareGloo(self._dist, store, rank, size, place, timeout, broken),
                timeout,
            )
        except NoAnswer as error:
            broken.give_up(str(error))
            raise broken.error(label) from error

    def drop(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            leave_behind(group, self._under_way)

    def __del__(self) -> None:
        self.drop()  # to forget a group is to wait in its destructor

    def close(self) -> None:
        self.drop()


def unless(why: Callable[[], str], call: Callable[[], BareGloo], timeout: float) -> BareGloo:
    """Return the result of ``call()``, on a thread; raise once ``why()`` says why it will not come, or too late."""
    thread, results, errors = timeouts.on_thread(call, "agmerge connects")
    end = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < end:
        thread.join(LOOKS)
        reason = why() if thread.is_alive() else ""
        if reason:
            raise NoAnswer(f"AGM211: init(): the workers of the new group could not connect: {reason}")
    if results:
        return results[0]
    if errors and isinstance(errors[0], NoAnswer):
        raise errors[0]
    raise NoAnswer(
        f"AGM211: init(): the workers of the new group could not connect ({errors[0] if errors else 'timeout'})"
    )


# Groups that are used no more, with collectives under way: destroyed when these have ended.
#
# Gloo's destructor waits for them, perhaps for a worker that is lost, up to its time-out. Not to destroy a group at all
# costs five open files and three threads, and an elastic job leaves several of them behind at each change.

# (group, works under way when it was left). Each is referred to once more than Python knows of: at the end of the
# process it is not destroyed. Without a lock: a destructor may leave a group at any moment, on any thread.
_left: deque[tuple[Any, list[Any]]] = deque()


def leave_behind(group: Any, works: Iterable[Any]) -> None:
    """Drop a process group of torch's, now or when its ``works`` have ended. The caller keeps no reference to it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _left.append((group, list(works)))
    release_left()


def release_left() -> None:
    """Destroy those groups of which all works have ended; how long that takes does not depend on other workers."""
    for _ in range(len(_left)):
        try:
            entry = _left.popleft()
        except IndexError:  # another thread has it
            return
        if all(work.is_completed() for work in entry[1]):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(entry[0]))
        else:
            _left.append(entry)


def count_left() -> int:
    """Return how many groups are left behind now."""
    return len(_left)
