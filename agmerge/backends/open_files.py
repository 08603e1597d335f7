# SPDX-License-Identifier: Apache-2.0
"""Open files of this process: too few of them, and sockets that its forked children must not keep."""

from __future__ import annotations

import errno
import os
import socket
import weakref
from contextlib import suppress
from typing import Protocol

# Too few: communication libraries fail then without saying so. Every connection is a file, and so is every loop of
# events. Gloo says ``enforce fail ... rv != -1``, and others that they cannot bind a port.

SPARE = 16  # files that a group of ranks opens beside a connection to each other rank, with some left
TOO_MANY = (errno.EMFILE, errno.ENFILE)  # open files: of this process, and on this machine
RAISE = "Raise the limit on the machines of the workers, for example with `ulimit -n 65536`"


def counted() -> tuple[int, int] | None:
    """Return how many files this process has open, and how many it may have; None where that cannot be known."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        count = len(os.listdir("/dev/fd")) - 1  # without the folder itself
    except OSError as error:
        if error.errno not in TOO_MANY:
            return None
        count = most
    return None if most == resource.RLIM_INFINITY else (count, most)


def shortage(ranks: int) -> str:
    """Return that this process has too few files left, to be read after "it"; empty if it has enough.

    ``ranks``: the number that a group would connect it to. Call this soon after a failure, which gives files back.
    """
    known = counted()
    if known is None or known[1] - known[0] >= SPARE + ranks:
        return ""
    return f"has {known[0]} open files, and the limit is {known[1]} (ulimit -n)"


def advice(ranks: int) -> str:
    """Return a sentence about the limit that is too low here, and what to do; empty if none is known to be."""
    short = shortage(ranks)
    return f"This process {short}, which is not enough to connect {ranks} ranks. {RAISE}." if short else ""


# Sockets that a forked child must not keep: one that outlives this process would answer in its place.

_served: dict[int, int] = {}  # files of sockets that listen, and their ports; written by close_in_children alone
_owners: weakref.WeakSet[Forgetful] = weakref.WeakSet()  # of these sockets; written by close_in_children alone


class Forgetful(Protocol):
    """Object with a part in a job that is the parent's alone."""

    def forget(self) -> None:
        """Take no part any more, in a forked child."""


def close_in_children(port: int, owner: Forgetful | None = None) -> None:
    """Close the socket of torch's that listens at ``port`` in children that are forked, or started, from now on.

    ``owner``: forgets its part in a forked child. Nothing happens on systems that do not list open files.
    """
    if owner is not None:
        _owners.add(owner)
    for file in _open_files():
        if _listens_at(file, port):
            os.set_inheritable(file, False)  # in children that run another program
            _served[file] = port


def _open_files() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return []


def _listens_at(file: int, port: int) -> bool:
    """Return whether a file is a socket that listens at ``port``."""
    with suppress(OSError):
        copy = os.dup(file)
        try:
            listening = socket.socket(fileno=copy)
        except OSError:  # it is no socket
            os.close(copy)
            return False
        with listening:
            if listening.family in (socket.AF_INET, socket.AF_INET6) and listening.getsockname()[1] == port:
                return bool(listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _after_fork_in_child() -> None:
    """Release the parent's sockets: their files lead to nothing, and stay open, for torch closes them once more."""
    for file, port in _served.items():
        if _listens_at(file, port):
            with suppress(OSError):
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, file, inheritable=False)
                os.close(nothing)
    _served.clear()
    for owner in list(_owners):
        owner.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
