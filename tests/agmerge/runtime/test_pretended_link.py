# SPDX-License-Identifier: Apache-2.0
"""A pretended link: what each collective takes on it, by a clock of the test's own, and what it does not change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import agmerge
from agmerge import testing
from agmerge.backends import Backend, Handle
from agmerge.backends.local import alone
from agmerge.runtime import workers
from agmerge.runtime.pretended_link import LinkedBackend, LinkedHandle, Port, bytes_a_second, linked


class Clock:
    """Clock that goes on while a rank sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


CALLS: dict[str, tuple[Callable[[Backend], Handle], float]] = {  # of 3 ranks, at 100 bytes a second: seconds
    "all_reduce": (lambda comm: comm.all_reduce(torch.ones(75), "a"), 4.0),  # 2 (W - 1) / W of 300 bytes
    "all_gather": (lambda comm: comm.all_gather(torch.empty(75), torch.ones(25), "a"), 2.0),  # W - 1 copies
    "all_to_all": (
        lambda comm: comm.all_to_all(torch.empty(75), torch.ones(75), [25] * 3, [25] * 3, "a"), 2.0,
    ),
    "broadcast": (lambda comm: comm.broadcast(torch.ones(25), 0, "a"), 1.0),
    "barrier": (lambda comm: comm.barrier("a"), 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_takes_what_its_bytes_take(name: str) -> None:
    call, expected = CALLS[name]

    def body(rank: int) -> tuple[float, float]:
        clock = Clock()
        comm = LinkedBackend(workers.world(), Port(100.0, clock, clock.sleep))
        call(comm).wait(10.0)
        once = clock.seconds
        handles = [call(comm), call(comm)]  # one after the other, through one port
        handles[1].wait(10.0)
        assert handles[0].done()
        handles[0].wait(10.0)
        return once, clock.seconds

    for once, thrice in testing.run(3, body):
        assert once == pytest.approx(expected) and thrice == pytest.approx(3 * expected)


def test_copies_share_the_port_of_their_rank() -> None:
    def body(rank: int) -> float:
        clock = Clock()
        comm = LinkedBackend(workers.world(), Port(100.0, clock, clock.sleep))
        other = comm.duplicate("copy", 10.0)
        first, second = comm.all_reduce(torch.ones(75), "a"), other.all_reduce(torch.ones(75), "b")
        second.wait(10.0)
        first.wait(10.0)
        return clock.seconds

    assert testing.run(3, body) == [pytest.approx(8.0)] * 3


def test_it_is_not_done_before_its_time() -> None:
    clock = Clock()
    port = Port(100.0, clock, clock.sleep)
    handle = LinkedHandle("a", alone().barrier("a"), port, port.send(100))
    assert not handle.done()
    clock.seconds = 1.0
    assert handle.done()


@pytest.mark.parametrize(("rate", "expected"), [("200mbit", 25e6), ("1gbit", 125e6), ("1.5Mbit", 187500.0)])
def test_rates_are_read_as_tc_writes_them(rate: str, expected: float) -> None:
    assert bytes_a_second(rate) == expected


@pytest.mark.parametrize("rate", ["fast", "200", "0mbit", "200MB", "-1mbit"])
def test_other_rates_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=r"AGMERGE_LINK=.*200mbit"):
        bytes_a_second(rate)


def test_without_a_rate_nothing_is_wrapped() -> None:
    backend = alone()
    assert linked(backend, "") is backend


def test_training_on_it_comes_to_the_same_bits() -> None:
    def body(rank: int) -> torch.Tensor:
        model = torch.nn.Linear(8, 4, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.5)
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression="int8"
        )
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 8), float(rank + step))).square().sum().backward()
            optimizer.step()
        assert testing.calls()
        return model.weight.detach().clone()

    plain, slow = testing.run(2, body), testing.run(2, body, link="10gbit")
    assert torch.equal(plain[0], slow[0]) and torch.equal(slow[0], slow[1])
