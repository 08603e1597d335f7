"""What a step leaves to chance between streams: nothing. And each wait that it makes is missed where it is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from device_harness import backward, plain_steps, train
from pretend.device import current
from torch import Tensor

from agmerge.errors import AGMergeError

Each = Callable[[Any, Sequence[Tensor], int, int], None]


def two_streams(optimizer: Any, parameters: Sequence[Tensor], rank: int, step: int) -> None:
    """Gradients of one merge buffer come in different streams, as with a forward under streams of the script."""
    device = current()
    mine = device.new_stream("the script's")
    optimizer.zero_grad()
    mine.wait(device.stream.clock)
    moved = [InStream.apply(p, mine if number % 2 else device.default) for number, p in enumerate(parameters)]
    backward(moved, rank, step)
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


def accumulated(optimizer: Any, parameters: Sequence[Tensor], rank: int, step: int) -> None:
    """Two backward passes a step."""
    optimizer.zero_grad()
    backward(parameters, rank, 2 * step)
    backward(parameters, rank, 2 * step + 1)
    optimizer.step()


def discarded(optimizer: Any, parameters: Sequence[Tensor], rank: int, step: int) -> None:
    """A round comes to nothing after its messages have left."""
    optimizer.zero_grad()
    backward(parameters, rank, step)
    if step:
        optimizer.synchronize()
        optimizer.zero_grad()  # without step(): the update is discarded
        backward(parameters, rank, step)
    optimizer.step()


def closed(optimizer: Any, parameters: Sequence[Tensor], rank: int, step: int) -> None:
    """The optimizer is closed between backward and step, at last."""
    optimizer.zero_grad()
    backward(parameters, rank, step)
    if step < 3:
        optimizer.step()
    else:
        optimizer.close()
        for parameter in parameters:
            parameter.grad = None  # it may not have been read yet


CASES: dict[str, tuple[Each, dict[str, Any]]] = {
    "sparse": (plain_steps, {"compression": "topk", "exchange": "sparse"}),
    "dense": (plain_steps, {"compression": "none"}),
    "momentum": (plain_steps, {"compression": "dgc", "exchange": "sparse"}),
    "low rank": (plain_steps, {"compression": "powersgd"}),
    "accumulation": (accumulated, {"compression": "topk", "exchange": "sparse", "backward_passes_per_step": 2}),
    "discarded": (discarded, {"compression": "topk", "exchange": "sparse"}),
    "closed": (closed, {"compression": "topk", "exchange": "sparse"}),
}


def what_is_wrong(case: str, leave_out: str = "") -> tuple[list[str], set[str]]:
    """The races of a case, or the error that it ends with; and the lines of the library that wait for events."""
    each, options = CASES[case]
    lines: set[str] = set()

    def watching(optimizer: Any, parameters: Sequence[Tensor], rank: int, step: int) -> None:
        try:
            each(optimizer, parameters, rank, step)
        finally:
            lines.update(current().waiting_lines)

    try:
        found = train(2, each=watching, leave_out=leave_out, **options)
    except AGMergeError as error:  # what the host has read before it was there
        return [str(error)], lines
    return [str(race) for books in found[0].books for race in books.races], lines


@pytest.mark.parametrize("case", CASES)
def test_events_order_all_that_streams_do_to_the_same_bytes(case: str) -> None:
    assert what_is_wrong(case)[0] == []


def test_gradients_of_one_merge_buffer_may_come_in_several_streams() -> None:
    assert [race for books in train(2, each=two_streams, compression="topk")[0].books for race in books.races] == []


def test_each_wait_that_is_left_out_is_missed() -> None:
    waits = [(line, case) for case in CASES for line in what_is_wrong(case)[1]]
    missed: set[str] = set()  # in one case or another
    for line, case in waits:
        if line not in missed and what_is_wrong(case, leave_out=line)[0]:
            missed.add(line)
    # Times are read a step late, when the device has got there: that wait is for who asks earlier.
    lines = {line for line, _ in waits if "step_times.py" not in line}
    assert lines and lines - missed == set()
