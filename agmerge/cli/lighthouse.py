# SPDX-License-Identifier: Apache-2.0
"""Serve the store of an elastic job: ``python -m agmerge lighthouse``."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

from agmerge.backends import addresses, generations


def main(port: int) -> int:
    """Serve at ``port`` until the process is interrupted or terminated; return the exit code."""
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    try:
        store = generations.serve(port)
    except RuntimeError as error:
        sys.stderr.write(
            f"agmerge lighthouse: cannot listen on port {port} ({error}). Pass another port with --port.\n"
        )
        return 1
    sys.stdout.write(f"AGMERGE_LIGHTHOUSE={address()}:{store.port}\n")
    sys.stdout.flush()
    over.wait()
    return 0


def address() -> str:
    """Return an address of this machine for workers on others: a name need not lead anywhere there.

    The loopback where this machine has no other one; its name where that leads to an address of IPv6 alone.
    """
    try:
        return addresses.reachable([], os.environ)
    except OSError:
        name = socket.gethostname()
        return "127.0.0.1" if addresses.only_here(addresses.of_name(name)) else name
