# SPDX-License-Identifier: Apache-2.0
"""Each communicator is connected before its first message, on each device, with every kind of call."""

from __future__ import annotations

import torch

from agmerge import testing
from agmerge.backends.torch import NAME, warm_up
from agmerge.runtime import workers

CPU = torch.device("cpu")
WAIT = 30.0


def started(size: int, *devices: torch.device) -> list[list[tuple[str, str, int]]]:
    """What each rank calls."""

    def body(rank: int) -> list[tuple[str, str, int]]:
        warm_up(workers.world(), devices, WAIT)
        return testing.calls()

    return testing.run(size, body)


def test_every_kind_of_call_is_made_on_every_device() -> None:
    first, second = started(2, CPU, CPU)
    assert first == second and first[:4] == first[4:]
    assert [kind for kind, _, _ in first[:4]] == ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
    assert all(name.startswith(NAME) for _, name, _ in first)


def test_nothing_is_called_alone_or_for_the_host() -> None:
    assert started(1, CPU) == [[]]
    assert started(2) == [[], []]
