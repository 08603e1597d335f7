# SPDX-License-Identifier: Apache-2.0
"""Answer for one host: ``python -m agmerge doctor --hosts`` sends this file there over ssh and asks it.

It needs nothing but Python. Every line of its input is a call, as JSON; every answer is a line that opens with
``MARK``, for lines that a login prints come before. It ends with its input.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import os
import platform
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from typing import Any

MARK = "agmerge doctor: "
VERSIONS = ("torch", "horovod", "mpi4py")
# The agmerge that a worker of this Python imports, and the best instruction set of its compiled loops, or "none".
WORKER = (
    "from agmerge.version import __version__; from sparsifiers import kernel; "
    "print(__version__, kernel.LEVELS[kernel.set_level(len(kernel.LEVELS) - 1)] if kernel.available() else 'none')"
)
PINGS, PIECE = 50, 1 << 18  # round trips; bytes that are sent at once
SLOW = 60.0  # seconds for what was sent to arrive: there are megabytes in buffers
REFUSED, SILENT = "refused", "silent"  # why a port cannot be connected to; other reasons are in words


def facts(folder: str, patience: float) -> dict[str, Any]:
    """Return the software that is installed on this host, and its addresses on networks.

    ``folder``: is looked for. ``patience``: seconds for each program that is started.
    """
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    worker, error = _said([sys.executable, "-c", WORKER], patience)
    own, level = (worker.split() + ["", ""])[:2]
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "agmerge": own,
        "problem": error,  # why agmerge cannot be imported; empty: it can
        "loops": level,
        **{name: _version(name) for name in VERSIONS},
        "mpirun": _said(["mpirun", "--version"], patience)[0] if shutil.which("mpirun") else "",
        "folder": os.path.isdir(folder),
        "networks": networks(),
        "own": _address(socket.gethostname()),
    }


def clock() -> float:
    """Return the time, in seconds since the epoch."""
    return time.time()


def networks() -> dict[str, dict[str, Any]]:
    """Return, by interface with an IPv4 address, that address, its network and the speed in Mbit/s (None: not told)."""
    found = {}
    for _, name in socket.if_nameindex():
        address, mask = _of_interface(name, 0x8915), _of_interface(name, 0x891B)  # SIOCGIFADDR, SIOCGIFNETMASK
        if address and not address.startswith("127."):
            network = str(ipaddress.ip_network(f"{address}/{mask or 32}", strict=False))
            found[name] = {"address": address, "network": network, "speed": _speed(name)}
    return found


def listen() -> int:
    """Open a port to all and return its number. It sends the bytes of a connection back, or counts them."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    server = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=64)
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return int(server.getsockname()[1])


def connect(host: str, port: int, patience: float, seconds: float) -> dict[str, Any]:
    """Return the connection from here to ``port`` of ``host``.

    ``patience``: seconds for the connection. ``seconds``: how long to send; 0: only connect. The answer has ``error``
    (``REFUSED``, ``SILENT`` or words; empty: it is reached), ``to`` and ``via``, the addresses of both ends, and where
    something was sent ``latency``, seconds of half a round trip, and ``rate``, bits a second.
    """
    found: dict[str, Any] = {"error": "", "to": _address(host), "via": ""}
    try:
        with socket.create_connection((host, port), timeout=patience) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found.update(to=_plain(link.getpeername()[0]), via=_plain(link.getsockname()[0]))
            if seconds:
                link.settimeout(SLOW)
                found["latency"] = _latency(link)
                found["rate"] = _rate(link, seconds)
    except ConnectionRefusedError:
        found["error"] = REFUSED
    except TimeoutError:
        found["error"] = SILENT
    except OSError as error:
        found["error"] = str(error)
    return found


def _serve(server: socket.socket) -> None:
    """Give every connection a thread."""
    while True:
        link, _ = server.accept()
        threading.Thread(target=_answer, args=(link,), daemon=True).start()


def _answer(link: socket.socket) -> None:
    """Send bytes back while they are single; then count up to the end, and tell how many there were."""
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            link.sendall(link.recv(1))
        count = 0
        for size in iter(lambda: len(link.recv(PIECE)), 0):
            count += size
        link.sendall(struct.pack("!q", count))


def _latency(link: socket.socket) -> float:
    """Return seconds of half a round trip, the median."""
    took = []
    for _ in range(PINGS):
        start = time.perf_counter()
        link.sendall(b".")
        _received(link, 1)
        took.append(time.perf_counter() - start)
    return statistics.median(took) / 2


def _rate(link: socket.socket, seconds: float) -> float:
    """Return bits a second, up to the moment at which the other end has everything."""
    piece, start = bytes(PIECE), time.perf_counter()
    while time.perf_counter() - start < seconds:
        link.sendall(piece)
    link.shutdown(socket.SHUT_WR)
    count = struct.unpack("!q", _received(link, 8))[0]
    return 8.0 * int(count) / (time.perf_counter() - start)


def _received(link: socket.socket, count: int) -> bytes:
    """Return ``count`` bytes; raise ``ConnectionError`` where the connection ends before."""
    data = link.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise ConnectionError("the connection was closed by the other end, which is no doctor's, or has ended")
    return data


def _address(host: str) -> str:
    """Return the first address that a name leads to here; empty: none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _plain(address: str) -> str:
    """Return an IPv4 address as it is written."""
    return address.removeprefix("::ffff:")


def _of_interface(name: str, question: int) -> str:
    """Return an address of an interface of Linux; empty if it has none."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            packed = fcntl.ioctl(probe.fileno(), question, struct.pack("256s", name[:15].encode()))
        return socket.inet_ntoa(packed[20:24])
    except (ImportError, OSError):
        return ""


def _speed(name: str) -> int | None:
    """Return the speed of an interface in Mbit/s; None where it is not told."""
    try:
        with open(f"/sys/class/net/{name}/speed") as file:
            return max(0, int(file.read())) or None
    except (OSError, ValueError):
        return None


def _version(name: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _said(command: list[str], patience: float) -> tuple[str, str]:
    """Return the first line that a command prints, and why it prints none."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {patience:g} s"
    except OSError as error:
        return "", str(error)
    complaints = [line for line in ended.stderr.splitlines() if line.strip()] or [f"exit code {ended.returncode}"]
    return next(iter(ended.stdout.splitlines()), ""), "" if ended.returncode == 0 else complaints[-1].strip()


def main() -> None:
    """Answer calls until the input ends."""
    calls: dict[str, Any] = {call.__name__: call for call in (facts, clock, listen, connect)}
    for line in sys.stdin:
        asked = json.loads(line)
        sys.stdout.write(MARK + json.dumps(calls[asked["call"]](**asked["arguments"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
