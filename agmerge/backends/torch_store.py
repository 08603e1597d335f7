# SPDX-License-Identifier: Apache-2.0
"""Gather addresses of ranks of torch.distributed in the launcher's store, before Gloo connects them.

Gloo knows neither why it could not connect nor a deadline: it tries each rank for five times its time-out, and listens
at whatever address the machine's name leads to, which on Debian and Ubuntu is a loopback. So the ranks meet here first.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from agmerge.backends import addresses, open_files, status, timeouts
from agmerge.errors import AGMergeError, CollectiveTimeout, PeerLost, printable

INTERFACE = "GLOO_SOCKET_IFNAME"
PORT = "29500"
SECOND = (
    "Read its output. If it finished normally, this process is left over from another job, or is a second process "
    "with its rank."
)
AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # "True": torchrun's agent serves the store, and has given out the ranks

_opened = 0  # how often this process has met the others: a store outlives the group; written by Meeting alone


class Meeting:
    """Meeting of all launched ranks in the launcher's store, within ``timeout`` seconds.

    ``dist``: the module ``torch.distributed``. ``env``: the launcher's variables. Raises :class:`agmerge.AGMergeError`
    if rank 0 cannot serve, :class:`agmerge.CollectiveTimeout` if others cannot reach it.
    """

    def __init__(self, dist: Any, env: Mapping[str, str], timeout: float) -> None:
        global _opened
        self._dist, self._timeout, self._end = dist, timeout, time.monotonic() + timeout
        self.rank, self.size = int(env["RANK"]), int(env["WORLD_SIZE"])
        self._host, self._port = env["MASTER_ADDR"], int(env.get("MASTER_PORT") or PORT)
        _opened += 1
        # Also torchrun's attempts after a restart: the agent's store outlives its workers, and torch gives each attempt
        # the same keys in it: a worker would try to reach one of the last attempt by its old address. (With several
        # machines attempts are counted by each; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun there.)
        alone = env.get("GROUP_WORLD_SIZE") == "1"
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
        shared = env.get(AGENT) == "True"
        try:
            store = timeouts.bounded(lambda: self._store(shared), timeout + 1.0, "init()")
        except CollectiveTimeout as error:
            raise self._unreachable(error) from error
        self.store = dist.PrefixStore(f"agmerge {attempt}.{_opened}", store)
        self._last_key = ""  # under which this rank's text of the last gathering lies; empty: there was none
        if not shared:
            self._claim_rank()

    @property
    def left(self) -> float:
        """Return the seconds that remain of the time-out."""
        return max(0.1, self._end - time.monotonic())

    def _store(self, shared: bool) -> Any:
        """Return a connection to the launcher's store, which rank 0 serves; ``shared``: torchrun's agent does."""
        serves = self.rank == 0 and not shared
        try:
            store = self._dist.TCPStore(
                self._host,
                self._port,
                self.size,
                is_master=serves,
                timeout=timedelta(seconds=self._timeout),
                wait_for_workers=False,
                multi_tenant=not shared,
            )
            if serves:
                open_files.close_in_children(store.port)
            return store
        except RuntimeError as error:
            if serves and "server socket" in str(error):
                advice = open_files.advice(self.size) or "Set MASTER_PORT to a port that is free on this host."
                raise AGMergeError(
                    f"AGM202: init(): rank 0, on host {socket.gethostname()}, cannot serve at {self._where}. {advice} "
                    f"({error})"
                ) from error
            raise CollectiveTimeout("init()", error) from error

    def _claim_rank(self) -> None:
        """Raise :class:`agmerge.AGMergeError` if another process is this rank already: a job at the same port, say."""
        own = f"host {socket.gethostname()}, pid {os.getpid()}"
        try:
            holder = self.store.compare_set(f"process/{self.rank}", "", own).decode(errors="replace")
        except RuntimeError as error:
            raise self._ended(error) from error
        if holder != own:
            raise AGMergeError(
                f"AGM204: init(): two processes connected to {self._where} as rank {self.rank}: first "
                f"{printable(holder)}, then {own}, this one. Set a different MASTER_PORT for each job, and a "
                "different RANK for each of its processes."
            )

    @property
    def _where(self) -> str:
        """Return where rank 0 is to be found, in words."""
        return f"{self._host}, port {self._port} (MASTER_ADDR, MASTER_PORT)"

    def _unreachable(self, error: CollectiveTimeout) -> CollectiveTimeout:
        """Return the error that says why rank 0 cannot be reached, and what to do."""
        why = addresses.why_unreachable(self._host, self._port)
        others = {name: address for name, address in addresses.interfaces().items() if not addresses.only_here(address)}
        if self.rank == 0 and others:
            shown = ", ".join(f"{address} ({name})" for name, address in others.items())
            why += f". MASTER_ADDR must be an address of this host, on which rank 0 runs: it has {shown}"
        why = open_files.advice(self.size).rstrip(".") or why
        return CollectiveTimeout(
            f"AGM202: init(): rank {self.rank}, on host {socket.gethostname()}, cannot reach "
            f"{'rank 0' if self.rank else 'itself'} at {self._where} within {self._timeout:g} s: {why}. "
            f"{timeouts.VARIABLE} sets a longer timeout" + (f" ({error.words})" if error.words else "")
        )

    def gather(self, text: bytes, name: str) -> list[bytes]:
        """Collective. Return every rank's ``text``, as :func:`agmerge.backends.handshake.gather_texts` gives it.

        Every process that reaches the store's port can read its entries, for the whole run, and tokens are among these
        texts. So each rank deletes its own as soon as all have read it: when they have come to the next gathering.
        """
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        with status.waiting_for("init()", ()):
            try:
                self.store.set(keys[self.rank], b"=" + text)
                self.store.wait(keys, timedelta(seconds=self.left))
                texts = [bytes(value[1:]) for value in self.store.multi_get(keys)]
            except RuntimeError as error:
                raise self._missing(keys, error) from error
        if self._last_key:
            with suppress(RuntimeError):  # the store is gone, and what lay in it; the next call will say so
                self.store.delete_key(self._last_key)
        self._last_key = keys[self.rank]
        return texts

    def _ended(self, error: RuntimeError) -> PeerLost:
        """Return the error that says that the store is served no more."""
        return PeerLost(f"AGM205: init(): rank 0, at {self._where}, has ended. {SECOND}", error)

    def _missing(self, keys: list[str], error: RuntimeError) -> PeerLost | CollectiveTimeout:
        """Return the error that names the ranks without an entry among ``keys``."""
        try:
            missing = tuple(rank for rank, key in enumerate(keys) if not self.store.check([key]))
        except RuntimeError:
            return self._ended(error)
        return CollectiveTimeout(
            f"AGM203: init(): no sign of rank {', '.join(map(str, missing))} of {self.size} within {self._timeout:g} "
            f"s: it was not started, ended before init(), or cannot reach {self._where}. Read its output. "
            f"{timeouts.VARIABLE} sets a longer timeout",
            missing=missing,
        )


def check_interface() -> None:
    """Raise :class:`agmerge.AGMergeError` where the user has chosen an interface for Gloo that is not there."""
    given = os.environ.get(INTERFACE) or ""
    there = addresses.interfaces()
    if not set(given.split(",")) <= {"", *there}:
        shown = ", ".join(f"{name} ({address})" for name, address in there.items() if address)
        raise AGMergeError(
            f"AGM202: init(): {INTERFACE}={given}, but host {socket.gethostname()} has no such interface; it has "
            f"{shown}. Set it on every host to the interface that reaches the other machines, or unset it."
        )


def choose_interface(address: str) -> None:
    """Make Gloo listen at ``address``, at which other machines reach this one, if it would listen at a loopback.

    By the environment, so that groups of the script's own do too. Nothing happens where the user has chosen.
    """
    name = addresses.interface(address)
    if name and not os.environ.get(INTERFACE) and addresses.only_here(addresses.of_name(socket.gethostname())):
        os.environ[INTERFACE] = name


def advice(address: str) -> str:
    """Return what to do when Gloo could not connect to other machines, which reach this one at ``address``."""
    host, given = socket.gethostname(), os.environ.get(INTERFACE)
    listens = addresses.of_interface(given.split(",")[0]) if given else addresses.of_name(host)
    because = f"{INTERFACE}={given}" if given else "the address of its host name"
    text = f"Every rank must make this call. On host {host}, Gloo listens at {listens or 'no address'} ({because})"
    better = addresses.interface(address)
    if address and listens != address:
        return (
            f"{text}, but other machines reach it at {address}. Set {INTERFACE}={better or '<its interface>'} on this "
            "host"
        )
    return (
        f"{text}, at a random port. Open all TCP ports between the machines of the job, or set "
        f"{INTERFACE}=<interface> on each to use another network"
    )
