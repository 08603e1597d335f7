# SPDX-License-Identifier: Apache-2.0
"""Tensors of a nested state as a stream: the same bits on all ranks, in messages of bounded size, each tensor once."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from agmerge import testing
from agmerge.backends.local import Call
from agmerge.runtime import tensor_stream, workers

WAIT = 20.0
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def state() -> dict[str, Any]:
    """Return a state with tensors of many kinds, and other values, the same at each call."""
    source = torch.Generator().manual_seed(0)
    tied, odd, kinds, free, pairs = (torch.randn(size, generator=source) for size in ((7, 5), (6, 4), 11, 3, (3, 2)))
    return {
        "tied": [tied, tied.detach(), tied.view(-1)],
        "odd": (odd.t(), odd[:, 1:3], torch.tensor(3.0), torch.empty(0, 3), torch.empty(0)),
        "kinds": collections.OrderedDict((str(kind), (10 * kinds).to(kind)) for kind in DTYPES),
        "conjugate": [torch.view_as_complex(pairs), torch.view_as_complex(pairs).conj()],
        "stays": [free.requires_grad_(), torch.eye(3).to_sparse()],
        "else": [1, 2.5, "text", None, True, {3: (4,)}],
    }


def same(own: Any, other: Any) -> bool:
    """Return whether two states are equal to the bit."""
    if isinstance(own, torch.Tensor):
        if own.layout != torch.strided:
            return other.layout == own.layout and torch.equal(own.to_dense(), other.to_dense())
        return own.dtype == other.dtype and own.requires_grad == other.requires_grad and torch.equal(own, other)
    if isinstance(own, dict):
        return type(own) is type(other) and list(own) == list(other) and all(same(own[key], other[key]) for key in own)
    if isinstance(own, (list, tuple)):
        return type(own) is type(other) and len(own) == len(other) and all(map(same, own, other))
    return bool(own == other)


def sent(rank: int, root: int = 0) -> tuple[Any, int]:
    """Collective. Return the root's state as a rank has it, and how often the stream paused."""
    outline, tensors = tensor_stream.outlined(state())
    if rank != root:
        received, tensors = tensor_stream.unfilled(outline)
    comm = workers.world()
    pauses = len(list(tensor_stream.broadcast_tensors(comm, tensors, root, "state", WAIT)))
    return (state() if rank == root else received), pauses


@pytest.mark.parametrize("message", [16, 17, 64, 1 << 20])
def test_all_ranks_have_the_roots_state(message: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_stream, "MESSAGE", message)
    for received, _ in testing.run(3, lambda rank: sent(rank, root=1)):
        assert same(state(), received)


def test_a_tensor_in_several_places_travels_once_and_is_one_again() -> None:
    tied = torch.arange(6.0)
    outline, tensors = tensor_stream.outlined({"a": tied, "b": [tied, tied.view(2, 3)], "c": tied[:3]})
    assert [one.shape for one in tensors] == [(6,), (2, 3), (3,)]
    received, made = tensor_stream.unfilled(outline)
    assert received["a"] is received["b"][0] is made[0] and len(made) == 3


def test_a_matrix_and_its_transpose_are_two_tensors() -> None:
    """They have the same memory and the same shape, and other values in each place."""
    square = torch.arange(9.0).view(3, 3)
    outline, tensors = tensor_stream.outlined({"as it is": square, "transposed": square.t()})
    received, made = tensor_stream.unfilled(outline)
    assert len(tensors) == len(made) == 2 and received["as it is"] is not received["transposed"]


def test_messages_and_pauses_are_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages are under way at most, each of bounded size; who only waits knows how often the others pause."""
    monkeypatch.setattr(tensor_stream, "MESSAGE", 100)
    monkeypatch.setattr(tensor_stream, "PAUSE", 300)
    total = tensor_stream.size_of(tensor_stream.outlined(state())[1])
    calls: list[int] = []

    def note(call: Call) -> None:
        if call.rank == 0:
            calls.append(call.tensor.nbytes)

    for _, pauses in testing.run(2, sent, inject=note):
        assert pauses == total // 300 > 1
    # Each tensor, and each part of a larger one, begins at a multiple of 16 bytes.
    assert max(calls) <= 100 and total <= sum(calls) < 1.5 * total and len(calls) < total / 100 + 20


def test_only_a_few_messages_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending takes no copy of all tensors."""
    monkeypatch.setattr(tensor_stream, "MESSAGE", 1000)
    monkeypatch.setattr(tensor_stream, "PAUSE", 1000)
    made: list[int] = []
    empty = torch.empty

    def noted(*size: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        made.append(tensor.numel())
        return tensor

    def body(rank: int) -> None:
        tensors = [torch.full((5000,), float(1 - rank)) for _ in range(20)]
        for _ in tensor_stream.broadcast_tensors(workers.world(), tensors, 0, "state", WAIT):
            assert sum(made) <= 2 * 2 * 1000
        assert all((one == 1).all() for one in tensors)

    monkeypatch.setattr(tensor_stream.torch, "empty", noted)
    testing.run(2, body)
