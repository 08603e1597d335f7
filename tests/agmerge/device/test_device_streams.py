# SPDX-License-Identifier: Apache-2.0
"""What a step leaves to chance between streams: nothing. And each wait that it makes is missed where it is left out."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from pretend.device import current
from support.device_training import Each, Given, loss, plain_step, train
from torch import Tensor

from agmerge.errors import AGMergeError


def two_streams(optimizer: Any, model: Given, rank: int, step: int) -> None:
    """Gradients of one merge buffer come in different streams, as with a forward under streams of the script."""
    device = current()
    mine = device.new_stream("the script's")
    optimizer.zero_grad()
    mine.wait(device.stream.clock)
    moved = [InStream.apply(p, mine if number % 2 else device.default) for number, p in enumerate(model.given)]
    loss(moved, rank, step).backward()
    device.default.wait(mine.clock)  # as autograd does for the stream that backward() was called in
    InStream.kept.clear()
    optimizer.step()


class InStream(torch.autograd.Function):
    """Let what autograd does of a tensor from here on be queued in another stream."""

    kept: ClassVar[list[Tensor]] = []  # what another stream still reads, as autograd keeps it

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stream: Any) -> Tensor:
        ctx.stream = stream
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        device = gradient.owner  # type: ignore[attr-defined]
        ctx.stream.wait(device.default.clock)  # where what it is given was computed
        device.enter(ctx.stream)
        InStream.kept.append(gradient)
        return gradient.clone(), None


def accumulated(optimizer: Any, model: Given, rank: int, step: int) -> None:
    """Two backward passes a step."""
    optimizer.zero_grad()
    model(rank, 2 * step).backward()
    model(rank, 2 * step + 1).backward()
    optimizer.step()


def discarded(optimizer: Any, model: Given, rank: int, step: int) -> None:
    """A round comes to nothing after its messages have left."""
    optimizer.zero_grad()
    model(rank, step).backward()
    if step:
        optimizer.synchronize()
        optimizer.zero_grad()  # without step(): the update is discarded
        model(rank, step).backward()
    optimizer.step()


def measured(optimizer: Any, model: Given, rank: int, step: int) -> None:
    """The script asks for figures of a step that the device may still be at."""
    plain_step(optimizer, model, rank, step)
    optimizer.stats()


def closed(optimizer: Any, model: Given, rank: int, step: int) -> None:
    """The optimizer is closed between backward and step, at last."""
    optimizer.zero_grad()
    model(rank, step).backward()
    if step < 3:
        optimizer.step()
    else:
        optimizer.close()
        for parameter in model.parameters():
            parameter.grad = None  # it may not have been read yet


CASES: dict[str, tuple[Each, dict[str, Any]]] = {
    "sparse": (plain_step, {"compression": "topk", "exchange": "sparse"}),
    "dense": (plain_step, {"compression": "none"}),
    "momentum": (plain_step, {"compression": "dgc", "exchange": "sparse"}),
    "kernels": (plain_step, {"compression": "adtopk", "exchange": "sparse", "kernels": True}),
    "kernels, discarded": (discarded, {"compression": "dgc", "exchange": "sparse", "kernels": True}),
    "low rank": (plain_step, {"compression": "powersgd"}),
    "accumulation": (accumulated, {"compression": "topk", "exchange": "sparse", "backward_passes_per_step": 2}),
    "measured": (measured, {"compression": "powersgd"}),
    "discarded": (discarded, {"compression": "topk", "exchange": "sparse"}),
    "dear": (plain_step, {"compression": "none", "merging": "dear"}),
    "updates": (plain_step, {"sync": "updates", "compression": "topk"}),
    "closed": (closed, {"compression": "topk", "exchange": "sparse"}),
}


def what_is_wrong(case: str, leave_out: str = "") -> tuple[list[str], set[str]]:
    """The races of a case, or the error that it ends with; and the lines of the library that wait for events."""
    each, options = CASES[case]
    lines: set[str] = set()

    def watching(optimizer: Any, model: Given, rank: int, step: int) -> None:
        try:
            each(optimizer, model, rank, step)
        finally:
            lines.update(current().waiting_lines)

    try:
        found = train(2, each=watching, leave_out=leave_out, **options)
    except (AGMergeError, RuntimeError) as error:  # what the host has read before it was there
        return [str(error)], lines
    return [str(race) for books in found[0].books for race in books.races], lines


@pytest.mark.parametrize("case", CASES)
def test_events_order_all_that_streams_do_to_the_same_bytes(case: str) -> None:
    assert what_is_wrong(case)[0] == []


def test_gradients_of_one_merge_buffer_may_come_in_several_streams() -> None:
    for kernels in (False, True):
        trained = train(2, each=two_streams, compression="topk", kernels=kernels)
        assert [race for books in trained[0].books for race in books.races] == []


@pytest.mark.long
def test_each_wait_that_is_left_out_is_missed() -> None:
    cases: dict[str, list[str]] = {}  # by line that waits
    for case in CASES:
        for line in what_is_wrong(case)[1]:
            cases.setdefault(line, []).append(case)
    assert cases
    assert [line for line in cases if not any(what_is_wrong(case, leave_out=line)[0] for case in cases[line])] == []
