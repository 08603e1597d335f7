# SPDX-License-Identifier: Apache-2.0
"""``torch.compile``, of whole models and of blocks: the same bits as without it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import Blocks, agreed, batch, digest, on_ranks, seeded, sgd, wrap
from torch.nn import functional as F

import agmerge
from agmerge import testing

COMPILING = threading.Lock()  # the compiler belongs to the process, and ranks are threads


MODEL = seeded(Blocks)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(model: Blocks, rank: int, backend: str | None, part: str, wrap_first: bool, compression: str) -> list[str]:
    optimizer = wrap(model, compression=compression) if wrap_first else None
    forward = model
    if backend and part == "model":
        forward = torch.compile(model, backend=backend)
    elif backend:
        for block in model.blocks:
            block.compile(backend=backend)
    optimizer = optimizer or wrap(model, compression=compression)
    seen = []
    for step in range(4):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with COMPILING:  # nothing waits for another rank in here: the local group only starts messages
            F.cross_entropy(forward(x), y).backward()
        optimizer.step()
        seen.append(digest(model))
    return seen


@pytest.mark.parametrize("compression", ["none", "topk", "eden"])
@pytest.mark.parametrize("part", ["model", "blocks"])
@pytest.mark.parametrize("wrap_first", [True, False], ids=["wrapped first", "compiled first"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_train_to_the_same_bits(backend: str, wrap_first: bool, part: str, compression: str) -> None:
    plain, compiled = (
        agreed(on_ranks(2, MODEL, lambda r, m, b=b: run(m, r, b, part, wrap_first, compression)))
        for b in (None, backend)
    )
    assert plain == compiled and len(set(plain)) == 4


def test_messages_leave_during_the_backward_of_compiled_blocks() -> None:
    def body(rank: int, model: Blocks) -> int:
        for block in model.blocks:
            block.compile(backend="aot_eager")
        optimizer = wrap(model, merging="layerwise")
        for step in range(2):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            before = len(testing.calls())
            with COMPILING:
                F.cross_entropy(model(x), y).backward()
            left = len(testing.calls()) - before
            optimizer.step()
        return left

    assert agreed(on_ranks(2, MODEL, body)) == len(list(MODEL.parameters()))


def compiled_step(model: Blocks, rank: int, what: str, options: dict[str, Any]) -> list[str]:
    """Train with a compiled ``optimizer.step``, as PyTorch's own recipe has it, or a compiled whole step."""
    optimizer: Any = agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    step_it = torch.compile(optimizer.step, backend="aot_eager") if what == "optimizer.step" else optimizer.step

    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        step_it()

    whole = torch.compile(train_step, backend="aot_eager") if what == "whole step" else train_step
    seen = []
    for step in range(4):
        whole(*batch(rank, step))
        seen.append(digest(model))
    return seen


OPTIONS: list[dict[str, Any]] = [{"compression": "none"}, {"compression": "topk"}, {"compression": "eden"}]


@pytest.mark.parametrize("options", [*OPTIONS, {"compression": "topk", "sync": "updates"}], ids=str)
@pytest.mark.parametrize("what", ["optimizer.step", "whole step"])
def test_a_compiled_step_trains_to_the_same_bits(what: str, options: dict[str, Any]) -> None:
    plain, compiled = (on_ranks(1, MODEL, lambda r, m, w=w: compiled_step(m, r, w, options)) for w in ("", what))
    assert plain == compiled and len(set(plain[0])) == 4


def test_a_compiled_step_among_two_workers() -> None:
    plain, compiled = (
        agreed(on_ranks(2, MODEL, lambda r, m, w=w: compiled_step(m, r, w, {"compression": "topk", "timeout": 60.0})))
        for w in ("", "optimizer.step")
    )
    assert plain == compiled and len(set(plain)) == 4


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["model", "blocks"])
def test_inductor_keeps_replicas_equal(part: str) -> None:
    seen = agreed(on_ranks(2, MODEL, lambda r, m: run(m, r, "inductor", part, True, "topk")))
    assert len(set(seen)) == 4
