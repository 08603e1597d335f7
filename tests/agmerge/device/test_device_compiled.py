# SPDX-License-Identifier: Apache-2.0
"""Compiled autograd on a pretended device: it calls the hooks as they are, and so a training is that of the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pretend import tensors
from pretend.books import HOOK
from support.device_training import Given, train

from agmerge.engine.grad_hooks import BackwardPasses

COMPILING = threading.Lock()  # the compiler belongs to the process, and ranks are threads


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.slow
def test_hooks_come_and_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[bool] = []
    on_gradient = BackwardPasses.on_gradient

    def watching(passes: BackwardPasses, *arguments: Any) -> None:
        traced.append(torch.compiler.is_compiling())
        on_gradient(passes, *arguments)

    def compiled(optimizer: Any, model: Given, rank: int, step: int) -> None:
        optimizer.zero_grad()
        loss = model(rank, step)
        with COMPILING, torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        optimizer.step()

    monkeypatch.setattr(BackwardPasses, "on_gradient", watching)
    # What the pretended device does is no graph's, either: on a GPU it is what torch does below Python.
    monkeypatch.setattr(tensors, "perform", torch.compiler.disable(tensors.perform))
    ours = train(2, each=compiled, compression="topk", exchange="sparse", kernels=True, steps=3)
    assert len(traced) == 2 * 3 * 4 and not any(traced)  # ranks, steps, parameters
    monkeypatch.undo()
    theirs = train(2, "cpu", compression="topk", exchange="sparse", steps=3)
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters, other.parameters, strict=True))
    for books in ours[0].books[1:]:
        assert books.count(HOOK) and not books.waits_in(HOOK) and not books.races
