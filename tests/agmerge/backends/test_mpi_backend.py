# SPDX-License-Identifier: Apache-2.0
"""What the mpi backend says where ranks do not find each other; with them it is run by tests/distributed."""

from __future__ import annotations

import pytest

from agmerge.backends import mpi
from agmerge.backends.streams import Call, Progress
from agmerge.errors import CollectiveTimeout


class Stuck(Progress):
    """Makes no call: what was started never ends."""

    def __init__(self) -> None:
        pass

    def start(self, make: object) -> Call:
        return Call(lambda: None)  # nobody runs it


def test_who_is_missing_at_init_may_be_on_another_network() -> None:
    with pytest.raises(CollectiveTimeout, match=r"within 0.01 s.* Open MPI may use .* btl_tcp_if_include") as told:
        mpi._result(Stuck(), lambda: None, 0.01, "init()")
    assert "`ip -brief address`" in str(told.value)


def test_who_is_missing_later_is_not() -> None:
    with pytest.raises(CollectiveTimeout) as told:
        mpi._result(Stuck(), lambda: None, 0.01, "duplicate")
    assert "btl_tcp" not in str(told.value)
