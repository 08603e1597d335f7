# SPDX-License-Identifier: Apache-2.0
"""Workers that share a GPU go through the host's memory, all of the world alike, and one line says so."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from support.recorded_cuda import Cuda

from agmerge.backends import streams, torch_groups

DIST = SimpleNamespace(is_nccl_available=lambda: True)


@pytest.mark.parametrize(
    "seen, says",
    [
        ([["a", "b"], ["a", "b"]], ""),
        ([["a"], ["a"]], "2 workers share one GPU"),
        ([["a"], ["b"]], ""),  # a GPU each, as srun --gpus-per-task=1 and Kubernetes give
        ([["a", "b"]] * 5, "5 workers share 2 GPUs"),
        ([["a", "b"], ["b", "a"], ["c"], ["c"]], "2 workers share one GPU"),
        ([[], []], ""),
        ([[], [], ["a"]], ""),
        ([["a"]], ""),
    ],
)
def test_gpus_are_shared_where_more_workers_see_them_than_there_are(seen: list[list[str]], says: str) -> None:
    found = streams.why_shared(seen)
    assert found.startswith(f"AGM708: {says} ") if says else found == ""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("others, kinds", [(["cuda 0", "cuda 1"], "gloo"), (["another"], "cpu:gloo,cuda:nccl")])
def test_a_world_with_shared_gpus_is_made_without_nccl_and_rank_0_says_why(
    rank: int, others: Sequence[str], kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cuda().install(monkeypatch)
    properties = torch.cuda.get_device_properties
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(**vars(properties(i)), uuid=f"cuda {i}")
    )
    monkeypatch.setattr(streams, "_shared", False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        streams.settle_shared_gpus(rank, lambda own, name: [own, own, json.dumps(others).encode()])
    assert torch_groups.kinds(DIST) == kinds and torch_groups.has_nccl(DIST) is ("nccl" in kinds)
    shared = kinds == "gloo"
    assert ["3 workers share 2 GPUs" in str(one.message) for one in said] == [True] * (shared and rank == 0)


def test_a_world_without_gpus_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_shared", True)  # of a world before
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    streams.settle_shared_gpus(0, lambda own, name: [own, own])
    assert not streams.gpus_are_shared()


@pytest.mark.parametrize("hosts, shared", [(["", ""], True), (["a", "a"], True), (["a", "b"], False)])
def test_workers_whom_nccl_takes_for_those_of_two_hosts_share_no_gpu(
    hosts: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL_HOSTID is how several workers try NCCL on one GPU."""
    Cuda(1).install(monkeypatch)
    seen = []
    for host in hosts:
        monkeypatch.setenv("NCCL_HOSTID", host)
        seen.append(streams.visible())
    assert bool(streams.why_shared(seen)) is shared
