# SPDX-License-Identifier: Apache-2.0
"""Find an address of this machine at which the other ranks can reach it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

INTERFACES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")  # where the user has said which one to take
MASTERS = ("MASTER_ADDR", "HOROVOD_GLOO_RENDEZVOUS_ADDR")  # where launchers name an address that all reach
GONE = (
    "Rank 0 may also have ended: then this process is left over from another job, or is a second process with its rank"
)
ANYWHERE = "192.0.2.1"  # set aside for documentation (RFC 5737): nothing is sent to it, only the route counts


def network() -> str:
    """Return an identity of this network stack: ranks with the same one reach each other at 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def reachable(hosts: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the address to listen at for ranks elsewhere; ``hosts``: names or addresses of theirs.

    Raises ``OSError`` if there is none.
    """
    for address in _candidates(hosts, env):
        if not only_here(address):
            return address
    raise OSError("this machine has no network address except loopback")


def to_master(env: Mapping[str, str]) -> str:
    """Return the address from which this machine talks to the one that the launcher names; empty if it is that one."""
    own = (towards(env[key]) for key in MASTERS if env.get(key))
    return next((address for address in own if not only_here(address)), "")


def answers(host: str, port: int, seconds: float) -> bool:
    """Return whether a process accepts connections at ``port`` of ``host`` within ``seconds``."""
    try:
        with socket.create_connection((host, port), timeout=seconds):
            return True
    except (OSError, ValueError):  # the latter of a name that can be none
        return False


def only_here(address: str) -> bool:
    """Return whether ``address`` means this machine on every machine, or nothing."""
    return not address or address.startswith("127.") or address in ("::1", "0.0.0.0")


def of_name(host: str) -> str:
    """Return the address that the name of this machine leads to, if it is one of its own; else the loopback.

    That is what Gloo listens at where ``GLOO_SOCKET_IFNAME`` is not set.
    """
    try:
        for family, kind, protocol, _, target in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.bind(target)
                except OSError:
                    continue
                return str(target[0])
    except OSError:
        pass
    return "127.0.0.1"


def why_unreachable(host: str, port: int, patience: float = 1.0) -> str:
    """Return why ``port`` of ``host`` cannot be reached from here, as one more attempt shows it.

    ``patience``: seconds for it, beside those that the name takes.
    """
    address = _leads_to(host)
    if not address:
        return f"the name {host} has no address on this machine"
    where = f"{address}, this machine itself," if is_own(address) else address
    try:
        socket.create_connection((address, port), patience).close()
    except ConnectionRefusedError:
        return f"{where} refuses connections: rank 0 does not run there, or a firewall rejects them. {GONE}"
    except TimeoutError:
        return (
            f"{where} does not answer: a firewall drops the connection, or the address does not belong to rank 0's host"
        )
    except OSError as error:
        return f"there is no route to {where} ({error.strerror})"
    return f"{where} accepts connections now: rank 0 started late, or another program uses the port"


def is_own(address: str) -> bool:
    """Return whether ``address`` is one of this machine's."""
    return of_name(address) == address


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface of this machine; empty where it has none."""
    return {name: of_interface(name) for _, name in socket.if_nameindex()}


def _leads_to(host: str) -> str:
    """Return the first address that the name ``host`` leads to; empty if there is none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def interface(address: str) -> str:
    """Return the network interface that has ``address``; empty if none says so."""
    return next((name for _, name in socket.if_nameindex() if address and of_interface(name) == address), "")


def _candidates(hosts: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    """Yield addresses to listen at, the best first: of chosen interfaces, of routes to others, of any interface."""
    for name in (env[key] for key in INTERFACES if env.get(key)):
        yield of_interface(name.split(",")[0])
    for host in [*(env[key] for key in MASTERS if env.get(key)), *hosts, ANYWHERE]:
        yield towards(host)
    for _, name in socket.if_nameindex():  # no route leads there, but neighbours may
        yield of_interface(name)


def towards(host: str) -> str:
    """Return the address from which this machine talks to ``host``; empty if it cannot. Sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def of_interface(name: str) -> str:
    """Return the IPv4 address of a network interface of Linux; empty if it has none."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
        return socket.inet_ntoa(packed[20:24])
    except (ImportError, OSError):
        return ""
