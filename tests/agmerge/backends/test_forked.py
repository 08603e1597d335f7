# SPDX-License-Identifier: Apache-2.0
"""Forked children keep no socket at which their parent would seem to answer."""

from __future__ import annotations

import os
import socket

import pytest
import torch.distributed as dist

from agmerge.backends import addresses, open_files


class Part:
    """Part in a job that a child must not play."""

    forgotten = False

    def forget(self) -> None:
        self.forgotten = True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_serves_nothing_in_place_of_its_parent() -> None:
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    part = Part()
    open_files.close_in_children(store.port, part)
    scripts = socket.create_server(("127.0.0.1", 0))  # of the script's own, for its children perhaps
    [file] = [one for one in open_files._open_files() if open_files._listens_at(one, store.port)]
    assert not os.get_inheritable(file), "in children that run another program"
    child = os.fork()
    if child == 0:
        is_held = any(open_files._listens_at(one, store.port) for one in open_files._open_files())
        keeps = open_files._listens_at(scripts.fileno(), scripts.getsockname()[1])
        os._exit(is_held + 2 * (not part.forgotten) + 4 * (not keeps))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not part.forgotten and addresses.answers("127.0.0.1", store.port, 5.0)
    store.set("key", "value")
    assert store.get("key") == b"value"
    scripts.close()


def test_a_file_that_was_closed_and_is_another_one_now_is_left_alone() -> None:
    """A store's file has a number that the system gives to the next file once it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, file = server.getsockname()[1], server.fileno()
        assert open_files._listens_at(file, port) and not open_files._listens_at(file, port + 1)
    reader, writer = os.pipe()
    assert not open_files._listens_at(reader, port) and not open_files._listens_at(10**6, port)
    before = len(open_files._open_files())
    open_files._listens_at(writer, port)
    assert len(open_files._open_files()) == before, "the look itself opens a file, and closes it"
    os.close(reader)
    os.close(writer)
