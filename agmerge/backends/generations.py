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

from agmerge.backends import addresses, left_behind, staging, torch_store
from agmerge.backends.bare_gloo import BareGloo, Broken, unless
from agmerge.backends.base import Backend
from agmerge.backends.membership import ENDS, GOES, Generation, Membership, Worker
from agmerge.errors import AGMergeError, NoAnswer

BEAT = 0.2  # seconds between two signs of life
ATTEMPT = 1.0  # seconds for which a lighthouse that is gone is looked for at a time
READY = "ready"  # key in the store, since:
SETTLES = 3.0  # seconds after its start in which a lighthouse lets no newcomers in: a job may be looking for it
NEWCOMERS = "newcomers are let in"
TELLS = 5.0  # seconds after which a worker that waits says so
NO_ADDRESS = "its name has no address"
TO_BE_LET_IN = "init() waits to be let in to the job of the lighthouse at {host}:{port}"
FOR_AN_ANSWER = "init() looks for a lighthouse at {host}:{port}, where none answers, for {patience:g} s"
FOR_A_GROUP = "waits for the next group of workers, of at least {least} (min_workers), for {patience:g} s"
GONE = "the lighthouse is gone, and looked for; training goes on. Start it again at its address, for deaths or arrivals"


@dataclass(frozen=True)
class Elastic:
    """Options of an elastic job, see docs/elastic.md.

    ``lighthouse``: host:port of ``python -m agmerge lighthouse``; empty: as ``AGMERGE_LIGHTHOUSE`` says.
    ``min_workers``: with fewer of them none trains. ``suspect``: seconds without a sign of life after which a worker
    counts as lost. ``patience``: seconds to wait for the lighthouse, and for ``min_workers``.
    """

    lighthouse: str = ""
    min_workers: int = 1
    suspect: float = 5.0
    patience: float = 600.0


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
        host, _, port = options.lighthouse.rpartition(":")
        self._lighthouse = host, int(port)
        try:
            own = _own_address(host)
        except socket.gaierror as error:
            raise self._no_lighthouse(NO_ADDRESS) from error
        name = addresses.interface(own)
        if name and not os.environ.get(torch_store.INTERFACE):
            os.environ[torch_store.INTERFACE] = name  # else Gloo listens where this machine's name leads
        torch_store.check_interface()
        # Serves the group of each generation in which this worker is the oldest.
        self._server = self._dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
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
        self._threads[1].start()
        # A thread that comes back from torch's C++ once the interpreter has ended would end the process by SIGABRT.
        atexit.register(self.close)

    def _asking(self) -> Membership:
        """Return a place among those that ask to be let in, once a lighthouse that was started just now is ready."""
        store = self._connect(self._options.patience)
        with suppress(RuntimeError):  # a lighthouse that is not ready for so long: let it be
            store.wait([READY], timedelta(seconds=10 * SETTLES))
        port, least = self._server.port, self._options.min_workers
        own = socket.gethostname(), self._address, port
        return Membership(store, *own, least, _answers, self._options.suspect)

    def _joined(self) -> Group:
        """Collective. Return this worker's first generation, also where the lighthouse is started again meanwhile."""
        with self._telling(TO_BE_LET_IN):
            while True:
                try:
                    return self._formed(None, lets_in=False)
                except AGMergeError:
                    raise
                except RuntimeError:  # the lighthouse is gone, and with it this worker's place
                    self._membership = self._asking()

    @contextmanager
    def _telling(self, words: str) -> Iterator[None]:
        """Write ``words``, with their fields, to standard error if the body takes more than ``TELLS`` seconds."""
        host, port = self._lighthouse
        options = self._options
        told = words.format(host=host, port=port, patience=options.patience, least=options.min_workers)
        is_over = threading.Event()

        def tell() -> None:
            if not is_over.wait(TELLS):
                sys.stderr.write(f"agmerge: {told}\n")

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
                self._error = self._no_lighthouse()
            if self._error is not None:
                raise self._error
            return self._group

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

    def _connect(self, patience: float) -> Any:
        """Return a connection to the job's store. Raises :class:`agmerge.AGMergeError` where there is none."""
        try:
            with self._telling(FOR_AN_ANSWER):
                return self._connected(patience)
        except RuntimeError as error:
            raise self._no_lighthouse() from error

    def _connected(self, seconds: float) -> Any:
        """Return a connection to the job's store. Raises ``RuntimeError`` if it cannot be had within ``seconds``."""
        host, port = self._lighthouse
        end = time.monotonic() + seconds
        while not addresses.answers(host, port, ATTEMPT):  # torch's own attempts write stacks of C++ into the log
            if time.monotonic() > end:
                raise RuntimeError(f"nobody answers at {host}, port {port}")
            time.sleep(BEAT)
        return self._dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )

    def _no_lighthouse(self, why: str = "") -> AGMergeError:
        host, port = self._lighthouse
        return AGMergeError(
            f"no lighthouse answers at {host}, port {port}, {why or f'within {self._options.patience:g} s'}: start one "
            f"there, by `python -m agmerge lighthouse --port {port}`, or set AGMERGE_LIGHTHOUSE to where it is"
        )

    # -- threads ------------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        """Give signs of life until the end."""
        store = self._connect(self._options.patience)
        while not self._closing:
            try:
                store.add(f"beat/{self._membership.own.number}", 1)
            except RuntimeError:  # the lighthouse is gone, perhaps for a moment
                with suppress(RuntimeError):
                    store = self._connected(ATTEMPT)
            time.sleep(BEAT)

    def _watch(self) -> None:
        """Look for workers that are lost, and form the next generation whenever this one has broken."""
        away = False  # the lighthouse is gone: training goes on without it, and no generation is formed
        while not self._closing:
            self._wake.wait(BEAT)
            left_behind.release()
            try:
                if away:
                    self._membership.reconnect(self._connected(ATTEMPT), self._group.generation)
                    away = False
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
            except RuntimeError:
                if not away:
                    self._tell(GONE)
                away = True
                if self._group.broken.seconds > self._options.patience:
                    self._end_with(self._no_lighthouse())
                    return
                continue
            with self._changed:
                self._group = formed
                self._newcomers_wait = False  # else each of many short steps would form a group before we look
                self._changed.notify_all()

    def _tell(self, what: str) -> None:
        """Write a line, on the oldest worker alone."""
        if self._group.generation.own == 0:
            sys.stderr.write(f"agmerge: {what}\n")

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
    """Return a store for the workers of a job, which this process serves as long as it is referred to.

    Newcomers come in after ``SETTLES`` seconds: first come the workers of a job whose lighthouse was started again.
    """
    store = _torch_distributed().TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)

    def let_in() -> None:
        time.sleep(SETTLES)
        store.set(READY, "")

    threading.Thread(target=let_in, name="agmerge lets in", daemon=True).start()
    return store


def _torch_distributed() -> Any:
    import torch.distributed as dist

    return dist
