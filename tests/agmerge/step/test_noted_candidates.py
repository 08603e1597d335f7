# SPDX-License-Identifier: Apache-2.0
"""Training has the same bits whether or not what is large was noted while gradients were added up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import backward, digest, mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

from agmerge.backends import topology
from agmerge.step.merge_buffers import KernelBuffers
from agmerge.tensors.layout import Segment
from merging import Plan
from sparsifiers import largest, native
from sparsifiers.gpu import Scratch
from sparsifiers.largest import Candidates

STEPS = 24
MODEL = seeded(mlp)
OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {},
    "dgc": {"compression": "dgc", "memory": "dgc"},
    "no memory": {"memory": "none"},
    "ahead": {"sparsify": "ahead"},
    "in parts": {"merging": Plan((6,), parts=(4,))},
    "tensor by tensor": {"merging": "layerwise"},
    "warm-up": {"density": 0.02, "warmup": 6},
    "updates": {"sync": "updates"},
    "updates, int8": {"sync": "updates", "wire": "int8"},
    "two-level": {"exchange": "two-level"},
    "oktopk": {"exchange": "oktopk"},
    "local steps": {"backward_passes_per_step": 2},
    "skipped steps": {"nonfinite": "skip"},
    "16 bits": {},
}
UNUSED = {"no memory"}  # loops write nothing there

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled loops were not built")


@pytest.fixture(autouse=True)
def for_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "STREAMED", 0)
    monkeypatch.setattr(largest, "RARE", 1)


def runs(name: str) -> list[list[str]]:
    """Return the digests after each step, by rank."""
    model = copy.deepcopy(MODEL).to(torch.bfloat16 if name == "16 bits" else torch.float32)
    options = {"compression": "topk", "density": 0.05, "memory": "residual", **OPTIONS[name]}
    momentum = 0.0 if options["memory"] == "dgc" else 0.9
    if "updates" in name:
        del options["memory"]

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, sgd(model, momentum=momentum), **options)
        if name == "skipped steps":
            return poked(model, optimizer, rank)
        if "backward_passes_per_step" in options:
            return twice(model, optimizer, rank)
        return train(model, optimizer, rank, range(STEPS))

    return on_ranks(4 if name == "two-level" else 2, model, body)


def poked(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[str]:
    """Make a gradient infinite on its way, on one rank."""
    weight, step = next(iter(model.parameters())), 0

    def poke(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (torch.inf if rank == 0 and step % 5 == 3 else 1.0)

    weight.register_hook(poke)
    seen = []
    for step in range(STEPS):
        seen += train(model, optimizer, rank, [step])
    return seen


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[str]:
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, rank, 2 * step)
        backward(model, rank, 2 * step + 1)
        optimizer.step()
        seen.append(digest(model))
    return seen


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_are_those_of_a_search(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")  # ranks of a node
    spared: list[bool] = []
    gather = Candidates._gather

    def gathered(self: Candidates, bits: Any, mask: int, k: int) -> Any:
        lists = gather(self, bits, mask, k)
        spared.append(lists is not None and lists.shape[1] >= k)
        return lists

    monkeypatch.setattr(Candidates, "_gather", gathered)
    noted = runs(name)
    assert (sum(spared) > STEPS // 2) is (name not in UNUSED), f"{sum(spared)} of {len(spared)} selections"
    scratch = KernelBuffers.scratch

    def on_devices(self: KernelBuffers, segment: Segment) -> Scratch | None:
        found = scratch(self, segment)
        return found if isinstance(found, Scratch) else None

    monkeypatch.setattr(KernelBuffers, "scratch", on_devices)
    spared.clear()
    assert runs(name) == noted and not spared and len(set(noted[0])) > STEPS // 2
