# SPDX-License-Identifier: Apache-2.0
"""Generations of an elastic job over Gloo: a thread watches the workers of this one, and forms the next.

It forms it even while the script computes, in a long backward pass say: the script finds the new group at its next
exchange.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from agmerge.backends import addresses, lighthouse, open_files, staging, status, torch_store
from agmerge.backends.bare_gloo import BareGloo, Broken, release_left, unless
from agmerge.backends.base import Backend
from agmerge.backends.job_store import Worker
from agmerge.backends.lighthouse import ATTEMPT, BEAT, READY, SETTLES, BoundedStore, Lighthouse
from agmerge.backends.membership import ENDS, GOES, RESTART, Generation, Membership
from agmerge.errors import AGMergeError, NoAnswer, warn

LONGEST_ATTEMPT = 30.0  # seconds: attempts become longer, for one without an answer leaves a thread behind
NEWCOMERS = "newcomers are let in"
TELLS = 5.0  # seconds after which a worker that waits says so
NO_ADDRESS = "its name has no address"
TO_BE_LET_IN = "init() waits to join the job of the lighthouse at {host}:{port}"
FOR_AN_ANSWER = "init() waits for a lighthouse at {host}:{port}, which does not answer, for {patience:g} s"
FOR_A_GROUP = "waits for the next group of workers, of at least {least} (min_workers), for {patience:g} s"
PUZZLED = (
    "the answer of the lighthouse at {host}:{port} cannot be used ({error}). Training continues, and agmerge asks again"
)
NO_RECORD = "AGM211: init(): the record of worker {number}, which serves this group, cannot be read"
GONE = (
    "the lighthouse does not respond. Training continues, but workers cannot join or be replaced until you restart it "
    "at the same address"
)


@dataclass(frozen=True)
class Elastic:
    """Options of an elastic job, for ``agmerge.init(elastic=agmerge.Elastic(...))`` (docs/elastic.md).

    Args:
        lighthouse (str): ``host:port`` of ``python -m agmerge lighthouse``. Default: the environment variable
            ``AGMERGE_LIGHTHOUSE``.
        min_workers (int): Training pauses with fewer workers. Default: 1.
        first_workers (int): Training begins with at least so many workers. Default: ``min_workers``.
        suspect (float): Seconds without a sign of life after which a worker counts as failed. Default: 5. Raise it if
            workers may stall longer, for example on a busy machine.
        patience (float): Seconds to wait for the lighthouse and for ``min_workers``. Default: 600.
        survives (bool): A step goes on without a failed worker. With False its calls raise
            :class:`agmerge.NoAnswer`, for scripts that return to a state of their own. Default: True.
        restart (bool): If the last worker that has the job's state fails, the others start again from the beginning,
            with a warning. With False they raise an error. Default: True.
    """

    lighthouse: str = ""
    min_workers: int = 1
    suspect: float = 5.0
    patience: float = 600.0
    restart: bool = True
    survives: bool = True
    first_workers: int = 0


@dataclass(frozen=True)
class Group:
    """Generation, and this worker's communicator in it."""

    generation: Generation
    backend: Backend  # Gloo's, which takes tensors of devices, too
    broken: Broken


class Generations:
    """This worker's way through the generations of one job.

    Collective: returns from the constructor when this worker is in a generation. ``timeout``: seconds, for connecting,
    and longest of a collective.
    """

    def __init__(self, options: Elastic, timeout: float) -> None:
        self._dist = _torch_distributed()
        self._options, self._timeout = options, timeout
        self._lighthouse = Lighthouse(self._dist, options.lighthouse, options.patience)
        try:
            own = _own_address(self._lighthouse.host)
        except (socket.gaierror, UnicodeError) as error:
            raise self._lighthouse.missing(within=NO_ADDRESS) from error
        name = addresses.interface(own)
        if name and not os.environ.get(torch_store.INTERFACE):
            os.environ[torch_store.INTERFACE] = name  # else Gloo listens where this machine's name leads
        torch_store.check_interface()
        # Serves the group of each generation in which this worker is the oldest.
        self._server = self._dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        open_files.close_in_children(self._server.port, self)
        self._address = own
        self._membership = self._asking()
        self._line = staging.Line(BareGloo.name, staging.Copies())  # one thread for all generations
        self._changed = threading.Condition()
        self._error: BaseException | None = None  # with which the thread has ended
        self.leaves = False  # this worker has announced that it will
        self._newcomers_wait = self._closing = False
        self._wake = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"agmerge {name}", daemon=True)
            for name, run in (("lives", self._live), ("watches", self._watch))
        ]
        self._threads[0].start()
        self._group = self._joined()
        self._say_lost(self._group.generation)
        self._threads[1].start()
        # A thread that comes back from torch's C++ once the interpreter has ended would end the process by SIGABRT.
        atexit.register(self.close)

    def _asking(self) -> Membership:
        """Return a place among those that ask to be let in, once a lighthouse that was started just now is ready."""
        options, port, end = self._options, self._server.port, time.monotonic() + self._options.patience
        while True:
            store = self._connect(max(end - time.monotonic(), ATTEMPT))
            try:
                with suppress(RuntimeError):  # a lighthouse that is not ready for so long: let it be
                    store.wait([READY], timedelta(seconds=min(10 * SETTLES, options.patience)))
                own, least = (socket.gethostname(), self._address, port), options.min_workers
                return Membership(
                    store, *own, least, _answers, suspect=options.suspect, restart=options.restart, tell=_write,
                    first=options.first_workers,
                )  # fmt: skip
            except RuntimeError as error:
                if time.monotonic() > end:
                    raise self._lighthouse.missing(str(error)) from error

    def _joined(self) -> Group:
        """Collective. Return this worker's first generation, also where the lighthouse is started again meanwhile."""
        end = time.monotonic() + 2 * self._options.patience  # each generation is waited for that long by itself
        with self._telling(TO_BE_LET_IN):
            while True:
                try:
                    return self._formed(None, lets_in=False)
                except AGMergeError:
                    raise
                except RuntimeError as error:  # the lighthouse is gone, and with it this worker's place
                    if time.monotonic() > end:
                        raise self._lighthouse.missing(str(error)) from error
                    self._membership = self._asking()

    @contextmanager
    def _telling(self, words: str) -> Iterator[None]:
        """Write ``words``, with their fields, to standard error if the body takes more than ``TELLS`` seconds."""
        place, options = self._lighthouse, self._options
        told = words.format(host=place.host, port=place.port, patience=options.patience, least=options.min_workers)
        is_over = threading.Event()

        def tell() -> None:
            if not is_over.wait(TELLS):
                _write(told)

        threading.Thread(target=tell, name="agmerge tells", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    @property
    def group(self) -> Group:
        """Return the present generation."""
        return self._group

    @property
    def newcomers_wait(self) -> bool:
        """Return whether workers wait to be let in."""
        return self._newcomers_wait

    @property
    def survives(self) -> bool:
        """Return whether steps go on without a worker that is lost."""
        return self._options.survives

    def announce_leaving(self) -> None:
        """Record that this worker will leave."""
        self.leaves = True

    def announce_begun(self) -> None:
        """Tell the others that this worker has the job's state."""
        with suppress(RuntimeError):  # the lighthouse is gone
            self._membership.begin()

    @property
    def min_workers(self) -> int:
        """Return with how many workers at least the job trains; fewer may end the step that is under way."""
        return self._options.min_workers

    def after(self, present: Backend, why: str = "a worker is lost") -> Group:
        """Collective. Give the group of ``present`` up, and return the one that follows it.

        ``why``: ``NEWCOMERS`` lets in those that wait. Raises what has ended the search for one, such as
        :class:`agmerge.TooFewWorkers`.
        """
        with self._changed:
            if self._group.backend is present:
                self._group.broken.give_up(why)
                self._wake.set()
            # The thread raises after `patience`, unless it hangs where the network lets nothing through.
            with self._telling(FOR_A_GROUP):
                self._changed.wait_for(
                    lambda: self._group.backend is not present or self._error is not None,
                    self._options.patience + 10 * ATTEMPT,
                )
            if self._error is None and self._group.backend is present:
                self._error = self._lighthouse.missing()
            if self._error is not None:
                raise self._error
            group = self._group
        self._say_lost(group.generation)
        return group

    def _say_lost(self, generation: Generation) -> None:
        """Warn if no worker is left that has the job's state, so that training begins again."""
        if generation.lost_steps is not None:
            warn(RESTART.format(steps=generation.lost_steps), generation.own)

    def forget(self) -> None:
        """Take no part any more, in a forked child: its parent does."""
        self._closing = True

    def close(self) -> None:
        """Leave the job: the others go on."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        says = threading.Thread(target=self._say_goodbye, name="agmerge leaves", daemon=True)
        says.start()  # on a thread: where the network lets nothing through it would never return
        for thread in (says, *self._threads):
            thread.join(5 * BEAT)

    def _say_goodbye(self) -> None:
        with suppress(RuntimeError):  # the lighthouse is gone
            self._membership.leave(GOES if self.leaves else ENDS)
            self._membership.give_up(self._group.generation.number, "a worker has left")

    def _connect(self, patience: float) -> BoundedStore:
        """Return a connection to the job's store. Raises :class:`agmerge.AGMergeError` where there is none."""
        try:
            with self._telling(FOR_AN_ANSWER):
                return self._lighthouse.connected(patience)
        except RuntimeError as error:
            raise self._lighthouse.missing(str(error)) from error

    # -- threads ------------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        """Give signs of life until the end."""
        store, attempt = None, ATTEMPT
        while not self._closing:
            try:
                store = store or self._lighthouse.connected(attempt)
                self._membership.beat(status.current().step or 0, store)
                attempt = ATTEMPT
            except Exception:  # the lighthouse is gone, perhaps for a moment
                store, attempt = None, min(2 * attempt, LONGEST_ATTEMPT)
            time.sleep(BEAT)

    def _watch(self) -> None:
        """Look for workers that are lost, and form the next generation whenever this one has broken.

        Whatever is in the store, this goes on: without it no group would be formed any more.
        """
        away, attempt = False, ATTEMPT  # away: the lighthouse is gone; training goes on, and no generation is formed
        while not self._closing:
            self._wake.wait(BEAT)
            release_left()
            try:
                if away:
                    self._membership.reconnect(self._lighthouse.connected(attempt), self._group.generation)
                    away, attempt = False, ATTEMPT
                why = self._why_broken()
                if not why or self._closing:
                    continue
                self._wake.clear()
                self._group.broken.give_up(why)
                self._membership.give_up(self._group.generation.number, why)
                formed = self._formed(self._group.generation, lets_in=why == NEWCOMERS)
            except AGMergeError as error:
                self._end_with(error)
                return
            except Exception as error:
                if not away:
                    fields = {"host": self._lighthouse.host, "port": self._lighthouse.port, "error": error}
                    self._tell(GONE if isinstance(error, RuntimeError) else PUZZLED.format(**fields))
                away, attempt = True, min(2 * attempt, LONGEST_ATTEMPT)
                if self._group.broken.seconds > self._options.patience:
                    self._end_with(self._lighthouse.missing(str(error)))
                    return
                continue
            with self._changed:
                self._group = formed
                self._newcomers_wait = False  # else each of many short steps would form a group before we look
                self._changed.notify_all()

    def _tell(self, what: str) -> None:
        """Write a line, on the oldest worker alone."""
        if self._group.generation.own == 0:
            _write(what)

    def _end_with(self, error: BaseException) -> None:
        """End the job of this worker: its next collective raises, and then ``error`` is raised."""
        self._group.broken.give_up(str(error))
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _why_broken(self) -> str:
        """Return why this generation is to be given up; empty: it is not."""
        generation, membership = self._group.generation, self._membership
        own = self._group.broken.why
        if own:
            return own
        said = membership.why_given_up(generation.number)
        if said is not None:
            return said
        membership.restore(generation)
        self._newcomers_wait = membership.newcomers_wait()
        return self._lost(generation, lambda number: membership.silence(number) > self._options.suspect)

    def _lost(self, generation: Generation, is_lost: Callable[[int], bool]) -> str:
        """Return which worker ``is_lost``, by its number, in words; empty: none is."""
        for rank, one in enumerate(generation.members):
            if rank != generation.own and is_lost(one.number):
                silence = self._membership.silence(one.number)
                return f"no sign of worker {one.number} on {one.host} for {silence:.1f} s"
        return ""

    def _formed(self, before: Generation | None, *, lets_in: bool) -> Group:
        """Collective. Return the next generation, connected. One that breaks meanwhile is followed by another."""
        while True:
            before = self._membership.next(before, self._options.patience, lets_in=lets_in)
            lets_in, broken = False, Broken()
            try:
                return Group(before, self._opened(before, broken), broken)
            except NoAnswer as error:
                self._membership.give_up(before.number, str(error))

    def _opened(self, generation: Generation, broken: Broken) -> Backend:
        """Collective. Connect the members of a generation."""
        oldest, dist = generation.members[0], self._dist
        if not oldest.port:
            raise NoAnswer(NO_RECORD.format(number=oldest.number))
        hosts = [one.host for one in generation.members]
        place = hosts[: generation.own].count(hosts[generation.own]), hosts.count(hosts[generation.own])

        def connect() -> BareGloo:
            store = dist.TCPStore(
                oldest.address, oldest.port, is_master=False, wait_for_workers=False,
                timeout=timedelta(seconds=self._timeout),
            )  # fmt: skip
            prefixed = dist.PrefixStore(f"generation {generation.number}", store)
            return BareGloo(dist, prefixed, generation.own, len(hosts), place, self._timeout, broken)

        return staging.staged(unless(lambda: self._cannot_form(generation), connect, self._timeout), self._line)

    def _cannot_form(self, generation: Generation) -> str:
        if self._closing:
            return "this worker leaves"
        return self._membership.why_given_up(generation.number) or self._lost(generation, self._membership.is_lost)


def _write(what: str) -> None:
    """Write a line for people."""
    sys.stderr.write(f"agmerge: {what}\n")


def _answers(worker: Worker) -> bool:
    return addresses.answers(worker.address, worker.port, ATTEMPT)


def _own_address(lighthouse: str) -> str:
    """Return the address at which other workers reach this one: the one that leads to the host of the lighthouse."""
    own = addresses.towards(lighthouse)
    if addresses.only_here(own) and not addresses.only_here(socket.gethostbyname(lighthouse)):
        with suppress(OSError):  # the machine's own name leads to its loopback
            own = addresses.reachable([lighthouse], os.environ)
    return own or "127.0.0.1"


def serve(port: int) -> Any:
    """Return a store for the workers of a job, see :func:`agmerge.backends.lighthouse.serve`."""
    return lighthouse.serve(_torch_distributed(), port)


def _torch_distributed() -> Any:
    import torch.distributed as dist

    return dist
