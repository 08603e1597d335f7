# SPDX-License-Identifier: Apache-2.0
"""Kernels on a pretended device, in all that they meet: the bits of the host, one wait, no race."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from pretend import fused
from pretend.books import HOOK, SYNCHRONIZE, Books
from pretend.device import Device
from pretend.training import on_devices
from support.device_training import PLAN, Given, Trained, host, plain_step, same_residuals, train
from torch import nn

import agmerge
import merging
import sparsifiers
from agmerge import testing
from agmerge.backends import topology
from agmerge.step.config import is_small
from agmerge.tensors.arena import Arena, accumulate_together, table_of
from agmerge.tensors.layout import Layout, TensorClass
from sparsifiers import gpu

CASES: dict[str, dict[str, Any]] = {
    "fp16": {"wire": "fp16"},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "sign": {"wire": "sign"},
    "each tensor by itself": {"sparsify": "ahead"},
    "in parts": {"merging": merging.Plan((2, 2), parts=(2, 1))},
    "two classes": {"density": {r"given\.0": 0.1, r".*": 0.02}},
    "nothing is kept": {"memory": "none"},
    "all of it": {"density": 1.0},
    "momentum": {"compression": "dgc"},
    "momentum that is not cleared": {"compression": "dgc", "memory": sparsifiers.memory("dgc", masking=False)},
    "momentum, clipped": {"compression": "dgc", "memory": sparsifiers.memory("dgc", clipping=1.0)},
    "rows": {"compression": "adtopk-row"},
    "rows, in parts": {"compression": "adtopk-row", "merging": merging.Plan((2, 2), parts=(2, 1))},
    "updates": {"sync": "updates"},
    "updates, kept by the parameters": {"sync": "updates", "carry": "hold"},
}
OTHERS = {"oktopk": 2, "masked": 2, "two-level": 4}  # ranks


def same_bits(size: int, **options: Any) -> list[Books]:
    """Train with kernels and on the host, and compare; return what was asked of rank 0's device, but for its start."""
    ours: list[Trained]
    ours, theirs = (train(size, place, **options) for place in ("pretend:0", "cpu"))
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters, other.parameters, strict=True))
        assert same_residuals(one, other)
    assert [race for books in ours[0].books for race in books.races] == []
    return ours[0].books[1:]


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_hosts(case: str) -> None:
    """Name what is sent whole, by the usual rule, as a script may: else the host rounds it, and a device does not."""
    options = {"compression": "topk", "exchange": "sparse", "kernels": True, **CASES[case]}
    options.setdefault("dense", lambda name, parameter: is_small(name, parameter))
    for books in same_bits(2, **options):
        assert not books.waits_in(HOOK) and len(books.waits_in(SYNCHRONIZE)) <= 1


@pytest.mark.parametrize("exchange", OTHERS)
def test_other_exchanges_look_at_what_is_selected(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")
    same_bits(OTHERS[exchange], exchange=exchange, compression="topk", kernels=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_any_form(dtype: torch.dtype) -> None:
    """In another order of memory, of 16 bits, of 64, which have no kernels, and missing."""

    def body(rank: int, device: Device | None = None, place: str = "pretend:0") -> list[torch.Tensor]:
        shapes = [(8, 4, 3, 3), (40, 30), (8, 4, 3, 3), (30,)]
        model = nn.ParameterList(torch.zeros(shape, dtype=dtype, device=place) for shape in shapes)
        model[0] = nn.Parameter(model[0].detach().to(memory_format=torch.channels_last))
        inner = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
        optimizer = agmerge.DistributedOptimizer(
            inner, model.named_parameters(), compression="topk", exchange="sparse", density=0.1, merging=PLAN
        )
        for step in range(4):
            optimizer.zero_grad()
            source = torch.Generator().manual_seed(10 * rank + step)
            given = [torch.randn(shape, generator=source).to(dtype) for shape in shapes]
            used = [number for number in range(4) if (rank, step, number) != (1, 2, 2)]
            torch.stack([(model[number] * given[number].to(place)).sum() for number in used]).sum().backward()
            optimizer.step()
        return [host(parameter) for parameter in model]

    with fused.installed():
        ours = on_devices(2, body)
    theirs = testing.run(2, functools.partial(body, place="cpu"))
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def test_digits_that_were_counted_for_nothing_are_not_counted_twice() -> None:
    """A round may come to nothing between adding up and selecting."""

    def body(rank: int, device: Device) -> None:
        tensor_class = TensorClass(torch.device("pretend:0"), torch.float32, sparsifiers.Kind.SPARSE)
        layout = Layout([("a", (30, 20), tensor_class), ("b", (7,), tensor_class)])
        arena = Arena(tensor_class, layout.lengths[tensor_class], layout.slots, sparsifiers.memory("residual"))
        gradients = [(slot, torch.randn(slot.shape).to(tensor_class.device)) for slot in layout.slots]
        largest, scratch = (
            gpu.LargestKey(tensor_class.device),
            gpu.Scratch(layout.lengths[tensor_class], tensor_class.device),
        )
        table = table_of(layout.slots)
        for _ in range(2):
            accumulate_together(arena, gradients, table, largest, scratch)
        assert scratch.is_counted and int(host(scratch.histogram).sum()) == layout.numel
        wide = [(slot, gradient.double()) for slot, gradient in gradients]
        accumulate_together(arena, wide, table, largest, scratch)
        assert not scratch.is_counted and not host(scratch.histogram).any()  # without kernels nothing is counted

    with fused.installed():
        on_devices(1, body)


def test_a_selection_that_is_observed_is_the_one_that_is_sent() -> None:
    """Who observes looks at it before the exchange says where it is to be written."""

    def observed(optimizer: Any, model: Given, rank: int, step: int) -> None:
        if step == 1:
            optimizer.measure_selection()
        plain_step(optimizer, model, rank, step)

    same_bits(2, each=observed, compression="topk", exchange="sparse", kernels=True)
