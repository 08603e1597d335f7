# SPDX-License-Identifier: Apache-2.0
"""Sockets of this process that its forked children must not keep: one that outlives it would answer in its place."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress
from typing import Protocol

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
