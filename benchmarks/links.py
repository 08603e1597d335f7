# SPDX-License-Identifier: Apache-2.0
"""Is a link as fast as it says, and full duplex or shared? Bytes one way, then both ways at once, between two workers.

    python benchmarks/links.py                       # 200 Mbit/s, both kinds of network.py
    python benchmarks/links.py --rates 1gbit --link duplex

On a full-duplex link each direction keeps its rate when the other is in use; on a shared one each gets half. Plain
sockets, no library. Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from pathlib import Path

from lab.network import LINKS, UNITS, named
from lab.worker_results import received_results, send_result

SECONDS, PIECE = 2.0, 1 << 16


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="rates of shaped links, one way and both ways at once")
    parser.add_argument("--rates", nargs="+", default=["200mbit"], help="as tc writes them")
    parser.add_argument("--link", nargs="+", choices=LINKS, default=list(LINKS))
    return parser.parse_args()


def received(line: socket.socket) -> float:
    """Bits a second that come in until the other side has sent all; from the first piece on."""
    count, start = 0, 0.0
    while piece := line.recv(PIECE):
        count += len(piece) if start else 0
        start = start or time.perf_counter()
    return 8 * count / max(time.perf_counter() - start, 1e-9)


def send(line: socket.socket) -> None:
    """As much as the link takes, for a while."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)  # little that is still to go when the time is over
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        line.sendall(bytes(PIECE))
    line.shutdown(socket.SHUT_WR)


def worker() -> None:
    """One end: two connections, one for each test. The first worker sends in both tests, the second in the second."""
    first, address = os.environ["RANK"] == "0", (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    found = {}
    for number, test in enumerate(("one way", "both ways")):
        at = (address[0], address[1] + number)
        if first:
            with socket.create_server(at) as server:
                line, _ = server.accept()
        else:
            line = connected(at)
        with line:
            sends, receives = first or test == "both ways", not first or test == "both ways"
            sender = threading.Thread(target=send, args=(line,))
            if sends:
                sender.start()
            if receives:
                found[test] = received(line)
            if sends:
                sender.join()
            if not receives:
                line.recv(1)  # the other has everything once it hangs up
    send_result(found)


def connected(at: tuple[str, int]) -> socket.socket:
    """A connection to a server that may not listen yet."""
    for _ in range(200):
        try:
            return socket.create_connection(at)
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"nobody listens at {at}")


def main() -> None:
    """Measure each link, and print a row for it."""
    if "RANK" in os.environ:
        worker()
        return
    args = arguments()
    print("| link | one way, Mbit/s | both ways at once, Mbit/s each |\n|---|---|---|")
    for rate in args.rates:
        for link in args.link:
            with LINKS[link](2, rate) as network:
                outputs = network.run([sys.executable, str(Path(__file__).resolve())], timeout=60)
            ends = [received_results(output)[0] for output in outputs]
            both = " and ".join(f"{end['both ways'] / UNITS['mbit']:.0f}" for end in ends)
            print(f"| {named(rate, link)} | {ends[1]['one way'] / UNITS['mbit']:.0f} | {both} |", flush=True)


if __name__ == "__main__":
    main()
