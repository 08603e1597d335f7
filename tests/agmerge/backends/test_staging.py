# SPDX-License-Identifier: Apache-2.0
"""Tensors of a pretended device over backends that move the host's: in order, without a wait, and with their errors."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import pytest
import torch
from pretend import streams
from pretend.copies import LateCopies
from pretend.device import Device
from pretend.registration import install
from pretend.tensors import put

from agmerge import testing
from agmerge.backends import status
from agmerge.backends.base import Backend, Handle
from agmerge.backends.local import LocalBackend
from agmerge.backends.staging import Copies, Line, Queued, StagedBackend, StagedHandle, staged
from agmerge.errors import AGMergeError, CollectiveTimeout, PeerLost
from agmerge.runtime import workers

WAIT = 30.0  # seconds; only a failing test ever waits so long
pytestmark = pytest.mark.filterwarnings("ignore:AGM703")


def over(copies: LateCopies, backend: Backend | None = None) -> StagedBackend:
    """This rank's group, or ``backend``, for tensors of a device."""
    inner = workers.world() if backend is None else backend
    return StagedBackend(inner, Line(inner.name, copies), range(inner.size))


def pretended() -> Device:
    """A device of this thread."""
    install()
    device = Device()
    device.use()
    return device


@pytest.fixture
def device() -> Device:
    """The same, for a test of one thread."""
    return pretended()


# -- what comes out -----------------------------------------------------------------------------------------


def every_collective(comm: Backend, put: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Each call twice, of tensors that ``put`` puts somewhere, with calls of the host's between; their results."""
    rank, size = comm.rank, comm.size
    results: list[torch.Tensor] = []
    handles: list[Handle] = []
    splits = [rank + other + 1 for other in range(size)]
    for turn in range(2):
        own = torch.arange(6.0).reshape(2, 3) + 10 * rank + turn
        for op in ("sum", "min", "max"):
            results.append(put(own.clone()))
            handles.append(comm.all_reduce(results[-1], f"reduce {op} {turn}", op))
        results.append(put(torch.zeros(6 * size)))
        handles.append(comm.all_gather(results[-1], put(own.view(-1)), f"gather {turn}"))
        results.append(torch.full((3,), float(rank)))
        handles.append(comm.all_reduce(results[-1], f"of the host {turn}"))
        results.append(put(torch.zeros(sum(splits), dtype=torch.int32)))
        sent = put(torch.full((sum(splits),), rank, dtype=torch.int32))
        handles.append(comm.all_to_all(results[-1], sent, splits, splits, f"to all {turn}"))
        results.append(put(torch.zeros(2)))
        handles.append(comm.reduce_scatter(results[-1], put(torch.arange(2.0 * size) + rank), f"scatter {turn}"))
        results.append(put(own.to(torch.bfloat16)))
        handles.append(comm.broadcast(results[-1], size - 1, f"from the last {turn}"))
        handles.append(comm.barrier(f"barrier {turn}"))
    for handle in handles:
        handle.wait(WAIT)
    assert all(handle.done() for handle in handles if isinstance(handle, StagedHandle))
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_every_collective_gives_what_it_gives_on_the_host(size: int) -> None:
    def body(rank: int) -> None:
        expected = every_collective(workers.world(), lambda tensor: tensor)
        device = pretended()
        with LateCopies().running(rank) as copies:
            found = every_collective(over(copies), lambda tensor: put(tensor, device))
        for own, other in zip(found, expected, strict=True):
            assert torch.equal(getattr(own, "host", own), other)

    testing.run(size, body)


def test_communicators_that_are_made_of_it_take_tensors_of_devices_too() -> None:
    def body(rank: int) -> list[list[float]]:
        device = pretended()
        with LateCopies().running(rank) as copies:
            comm = over(copies)
            members = [2, 0]
            made = [comm.duplicate("copy", WAIT), comm.subgroup(members, "some", WAIT)]
            assert (made[1] is None) is (rank not in members)
            found = []
            for one in filter(None, made):
                tensor = put(torch.tensor([float(10 + rank)]), device)
                one.broadcast(tensor, 0, "first").wait(WAIT)
                found.append(tensor.host.tolist())
            assert made[1] is None or made[1]._ranks == members
            return found

    assert testing.run(3, body) == [[[10.0], [12.0]], [[10.0]], [[10.0], [12.0]]]


# -- when -----------------------------------------------------------------------------------------------------


class Alone(LocalBackend):
    """Be alone, and write down what is started, in which order and with what."""

    def __init__(self) -> None:
        self.name, self.rank, self.size, self.local_rank, self.local_size = "alone", 0, 1, 0, 1
        self.started: list[tuple[str, list[float]]] = []
        self.error: Exception | None = None

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        self.started.append((name, tensor.tolist()))
        tensor.add_(1)
        return Ended(name, self.error)


class Ended(Handle):
    """Have ended, with ``error`` or well."""

    def __init__(self, name: str, error: Exception | None) -> None:
        super().__init__(name)
        self._error = error

    def done(self) -> bool:
        return True

    def _wait(self, timeout: float) -> None:
        if self._error is not None:
            raise self._error


def until(what: Callable[[], bool]) -> None:
    """Wait until ``what()`` holds."""
    deadline = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.mark.filterwarnings("ignore:AGM703")
def test_calls_start_in_their_order_whichever_copy_arrives_and_none_waits(device: Device) -> None:
    copies, alone = LateCopies(), Alone()
    comm = over(copies, alone)
    first, second = put(torch.tensor([1.0]), device), put(torch.tensor([2.0]), device)
    host = torch.tensor([3.0])
    handles = [comm.all_reduce(one, name) for one, name in ((first, "a"), (host, "b"), (second, "c"))]
    time.sleep(0.05)
    assert not alone.started and not any(handle.done() for handle in handles)  # no copy has been made
    copies.run_one()
    until(lambda: len(alone.started) == 2)  # "c" is behind its own copy
    copies.run_one()
    until(lambda: copies.queued == 4)  # two down, two up
    assert alone.started == [("a", [1.0]), ("b", [3.0]), ("c", [2.0])]
    for handle in handles:
        until(handle.done)
    assert (first.host.item(), host.item(), second.host.item()) == (1.0, 4.0, 2.0)  # no copy up has been made
    copies.run_one()
    copies.run_one()
    for handle in handles:
        handle.wait(WAIT)
    assert (first.host.item(), second.host.item()) == (2.0, 3.0)
    assert comm.all_reduce(host, "d").done() and alone.started[-1] == ("d", [4.0])  # at once: nothing is before it


@pytest.mark.filterwarnings("ignore:AGM703")
def test_a_copy_that_never_arrives_is_a_time_out(device: Device) -> None:
    copies = LateCopies()
    handle = over(copies, Alone()).all_reduce(put(torch.ones(2), device), "buffer 3")
    with pytest.raises(CollectiveTimeout, match="buffer 3: its tensors were not copied from the device within 0.05 s"):
        handle.wait(0.05)
    copies.run_one()


@pytest.mark.filterwarnings("ignore:AGM703")
def test_an_error_of_the_backend_is_raised_where_it_is_waited_for_and_nothing_is_copied(device: Device) -> None:
    with LateCopies().running() as copies:
        alone = Alone()
        alone.error = PeerLost("buffer 3: the connection to another rank broke")
        tensor = put(torch.ones(2), device)
        handle = over(copies, alone).all_reduce(tensor, "buffer 3")
        with pytest.raises(PeerLost, match="buffer 3: the connection to another rank broke") as caught:
            handle.wait(WAIT)
        assert caught.value.call == "buffer 3" and tensor.host.tolist() == [1.0, 1.0] and copies.queued == 1


def test_an_error_that_the_thread_has_seen_is_raised_by_every_wait() -> None:
    class Once(Ended):
        def _wait(self, timeout: float) -> None:
            error, self._error = self._error, None
            if error is not None:
                raise error

    queued = Queued(lambda: Once("buffer 3", PeerLost("gone"))).begin()
    for wait in (queued.Test, lambda: queued.result(WAIT), lambda: queued.result(WAIT)):
        with pytest.raises(PeerLost, match="gone"):
            wait()
    assert not queued.finished


def test_an_error_is_located_once() -> None:
    error = PeerLost("gone")
    for _ in range(2):
        status.annotate(error, "buffer 3", ())
    assert str(error).count("gone") == 1 and error.call == "buffer 3"
    status.reset()


# -- where ----------------------------------------------------------------------------------------------------


def test_the_first_tensor_of_a_device_warns_and_no_other(device: Device) -> None:
    with LateCopies().running() as copies:
        comm = over(copies, Alone())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comm.all_reduce(torch.ones(1), "of the host").wait(WAIT)
        with pytest.warns(UserWarning, match="'alone' has no NCCL, so tensors on pretend:0 are copied through host"):
            comm.all_reduce(put(torch.ones(1), device), "a").wait(WAIT)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comm.all_reduce(put(torch.ones(1), device), "b").wait(WAIT)


@pytest.mark.parametrize("through_host", [True, False])
@pytest.mark.parametrize("away", [True, False])
def test_only_a_backend_without_nccl_is_staged_and_only_where_there_are_devices(
    through_host: bool, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: away)
    alone = Alone()
    monkeypatch.setattr(Alone, "through_host", through_host)
    made = staged(alone)
    assert isinstance(made, StagedBackend) is (through_host and away) and (made is alone) is not (through_host and away)
    assert made.name == "alone" and made.size == 1


def test_a_kind_of_device_that_has_no_streams_is_refused() -> None:
    with pytest.raises(AGMergeError, match="Tensors on meta are not supported. Move them to the CPU"):
        over(Copies(), Alone()).all_reduce(torch.empty(3, device="meta"), "buffer 3")


def test_the_librarys_own_copies_wait_for_no_device(device: Device) -> None:
    class Ours(Copies):
        def twin(self, tensor: torch.Tensor) -> torch.Tensor:  # a CPU build pins nothing
            return device.pinned.allocate(tensor.numel(), tensor.dtype)

        def wait_on_host(self, place: torch.device, event: object) -> None:
            device.use()  # on the thread of the calls, too
            super().wait_on_host(place, event)

    with streams.installed(), pytest.warns(UserWarning, match="no NCCL"):
        tensor = put(torch.tensor([1.0, 2.0]), device)
        handle = over(Ours(), Alone()).all_reduce(tensor, "buffer 3")
        assert not device.books.waits
        handle.wait(WAIT)
    assert tensor.host.tolist() == [2.0, 3.0] and not device.books.races
