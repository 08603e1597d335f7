# SPDX-License-Identifier: Apache-2.0
"""Find out whether this process may open too few files: communication libraries fail then without saying so.

Every connection is a file, and so is every loop of events. Gloo says ``enforce fail ... rv != -1``, and others that
they cannot bind a port.
"""

from __future__ import annotations

import errno
import os

SPARE = 16  # files that a group of ranks opens beside a connection to each other rank, with some left
TOO_MANY = (errno.EMFILE, errno.ENFILE)  # open files: of this process, and on this machine
RAISE = "Raise the limit on the machines of the workers, for example with `ulimit -n 65536`"


def open_files() -> tuple[int, int] | None:
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
    known = open_files()
    if known is None or known[1] - known[0] >= SPARE + ranks:
        return ""
    return f"has {known[0]} open files, and the limit is {known[1]} (ulimit -n)"


def advice(ranks: int) -> str:
    """Return a sentence about the limit that is too low here, and what to do; empty if none is known to be."""
    short = shortage(ranks)
    return f"This process {short}, which is not enough to connect {ranks} ranks. {RAISE}." if short else ""
