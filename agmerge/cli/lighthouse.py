# SPDX-License-Identifier: Apache-2.0
"""Serve the store of an elastic job: ``python -m agmerge lighthouse``."""

from __future__ import annotations

import signal
import socket
import sys
import threading

from agmerge.backends import generations


def main(port: int) -> int:
    """Serve at ``port`` until the process is interrupted or told to end; return the exit code."""
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    try:
        store = generations.serve(port)
    except RuntimeError as error:
        sys.stderr.write(f"lighthouse: cannot serve at port {port}; give another one by --port ({error})\n")
        return 1
    sys.stdout.write(f"AGMERGE_LIGHTHOUSE={socket.gethostname()}:{store.port}\n")
    sys.stdout.flush()
    over.wait()
    return 0
