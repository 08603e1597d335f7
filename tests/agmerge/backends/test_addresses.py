# SPDX-License-Identifier: Apache-2.0
"""What is said of an address that does not answer, and of an interface that is not there."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from agmerge.backends import addresses, torch_store
from agmerge.cli import lighthouse
from agmerge.errors import AGMergeError


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "of_interface", {"lo": "127.0.0.1", "eth1": "10.0.0.7", "ib0": ""}.__getitem__)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth1"), (3, "ib0")])
    for given in ("", "eth1", "ib0,eth1"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
        torch_store.check_interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1,eth0")
    with pytest.raises(AGMergeError, match=r"has no such interface; it has lo \(127.0.0.1\), eth1 \(10.0.0.7\)"):
        torch_store.check_interface()


def test_why_a_port_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "accepts connections now: rank 0 started late," in addresses.why_unreachable("127.0.0.1", port)
    own = "127.0.0.1, this machine itself, refuses connections: rank 0 does not run there"
    said = addresses.why_unreachable("127.0.0.1", port)
    assert own in said and "Rank 0 may also have ended: then this process" in said, (
        "which of the two it is cannot be known here"
    )
    for error, words in (
        (TimeoutError(), "192.0.2.1 does not answer: a firewall"),
        (OSError(113, "No route to host"), "no route to 192.0.2.1 (No route to host)"),
    ):

        def fail(*given: object, error: OSError = error, **more: object) -> socket.socket:
            raise error

        monkeypatch.setattr(socket, "create_connection", fail)
        assert words in addresses.why_unreachable("192.0.2.1", port)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert addresses.why_unreachable("node", port) == "the name node has no address on this machine"


def test_a_lighthouse_prints_an_address_and_no_name_that_need_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(host: str, *_: object, **__: object) -> list[Any]:
        if not host[0].isdigit():
            raise OSError("no such name")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (host, 9))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)  # of a machine whose own name leads nowhere
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth1")])
    monkeypatch.setattr(addresses, "of_interface", {"lo": "127.0.0.1", "eth1": "10.0.0.7"}.__getitem__)
    monkeypatch.setattr(addresses, "towards", lambda host: "")  # no route
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert lighthouse.address() == "10.0.0.7"
    monkeypatch.setattr(addresses, "of_interface", {"lo": "127.0.0.1", "eth1": ""}.__getitem__)
    assert lighthouse.address() == "127.0.0.1"
