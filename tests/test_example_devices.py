# SPDX-License-Identifier: Apache-2.0
"""The device that an example's worker takes, on machines with as many GPUs as workers, fewer, and none."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from support.recorded_cuda import Cuda
from training.assemble import device_of

import agmerge


@pytest.mark.parametrize("count, found", [(4, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (1, [0, 0, 0, 0])])
def test_workers_take_gpus_in_turn(count: int, found: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(count)
    cuda.install(monkeypatch)
    for rank, index in enumerate(found):
        monkeypatch.setattr(agmerge, "local_rank", lambda rank=rank: rank)
        assert device_of(Namespace(no_cuda=False)) == torch.device("cuda", index) and cuda.device == index
    assert device_of(Namespace(no_cuda=True)) == torch.device("cpu")


def test_without_a_gpu_a_worker_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(Namespace(no_cuda=False)) == torch.device("cpu")
