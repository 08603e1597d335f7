# SPDX-License-Identifier: Apache-2.0
"""What torch's backend does of tensors on a GPU, as far as that shows without one."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import AcceleratorError
from torch.distributed import DistBackendError, DistNetworkError

from agmerge import CollectiveTimeout, PeerLost
from agmerge.backends import torch as backend
from agmerge.backends import torch_groups


class Work:
    """A collective of torch's that has ended. ``waits``: with what it was waited for."""

    def __init__(self) -> None:
        self.waits: list[tuple[Any, ...]] = []

    def wait(self, *timeout: timedelta) -> None:
        self.waits.append(timeout)


@pytest.mark.parametrize("device, waits", [("cpu", [(timedelta(seconds=3),)]), ("meta", [()])])
def test_a_device_waits_without_a_time_out_that_would_keep_the_host(device: str, waits: list[tuple[Any, ...]]) -> None:
    work, finished = Work(), list[Any]()
    handle = backend.TorchHandle(work, "buffer 0", [0, 1], finished, torch.empty(2, device=device))
    handle.wait_on_stream(3.0)
    assert work.waits == waits and finished == [work]


@pytest.mark.parametrize("kinds, seconds", [("gloo", 10), ("cpu:gloo,cuda:nccl", 80)])
def test_a_watchdog_of_nccl_leaves_time_for_our_error(
    kinds: str, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_groups, "kinds", lambda dist: kinds)
    found: dict[str, Any] = {}
    torch_groups.new_group(SimpleNamespace(new_group=lambda ranks, **given: found.update(given)), 10.0)
    assert found["timeout"] == timedelta(seconds=seconds)


NCCL = "NCCL error in: NCCLUtils.cpp:94, {}, NCCL version 2.29.2\nLast error:\n{}"


@pytest.mark.parametrize(
    "error, becomes",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("NCCL error: invalid usage (run with NCCL_DEBUG=WARN). Duplicate GPU detected"), RuntimeError),
        (AcceleratorError("CUDA error: an illegal memory access was encountered"), AcceleratorError),
        (RuntimeError("CUDA error: unspecified launch failure"), RuntimeError),  # torch before 2.8
        (DistBackendError(NCCL.format("unhandled cuda error", "Cuda failure 700 'an illegal...'")), DistBackendError),
        (DistBackendError(NCCL.format("remote process exited", "socketProgress: Connection closed")), PeerLost),
        (DistNetworkError("recvValue failed: Connection reset by peer"), PeerLost),
        (RuntimeError("Timed out waiting 3000ms for recv operation to complete"), CollectiveTimeout),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4711"), PeerLost),
    ],
    ids=["memory", "usage", "kernel", "kernel before", "cuda in nccl", "nccl", "network", "time-out", "connection"],
)
def test_only_what_others_have_done_is_told_of_them(error: RuntimeError, becomes: type[Exception]) -> None:
    with pytest.raises(RuntimeError) as caught, torch_groups.translated("buffer 0"):
        raise error
    assert type(caught.value) is becomes


class Group:
    """Stand for the part of ``torch.distributed`` that gathers, for one of so many ranks, and note what is called."""

    def __init__(self, size: int) -> None:
        self.size, self.called = size, list[str]()

    def get_rank(self, group: object) -> int:
        return 0

    def get_world_size(self, group: object) -> int:
        return self.size

    def get_global_rank(self, group: object, rank: int) -> int:
        return rank

    def is_initialized(self) -> bool:
        return False

    def all_gather_into_tensor(self, *given: torch.Tensor, **how: Any) -> Work:
        return self._note("gather", *given)

    reduce_scatter_tensor = all_gather_into_tensor

    def all_to_all_single(self, *given: torch.Tensor, **how: Any) -> Work:
        return self._note("all to all", *given)

    def _note(self, name: str, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        self.called.append(f"{name} of {tensor.numel()}")
        return Work()


@pytest.mark.parametrize(
    "size, length, device, called",
    [
        (2, 8, "cpu", "gather of 8"),  # there is one hop anyway
        (3, 8, "cpu", "all to all of 24"),
        (8, (1 << 20) - 1, "cpu", f"all to all of {8 * ((1 << 20) - 1)}"),
        (8, 1 << 20, "cpu", f"gather of {1 << 20}"),  # bytes are what counts, no hops
        (9, 8, "cpu", "gather of 8"),
        (3, 8, "meta", "gather of 8"),
        (3, 0, "cpu", "gather of 0"),
    ],
)
def test_small_messages_of_few_ranks_leave_for_all_at_once(
    size: int, length: int, device: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_groups, "dropped", deque())  # where this backend puts its group in the end
    group = Group(size)
    message = torch.empty(length, dtype=torch.uint8, device=device)
    backend.TorchBackend(group, "group", 0, 1).all_gather(message.new_empty(size * length), message, "buffer 0")
    assert group.called == [called]
