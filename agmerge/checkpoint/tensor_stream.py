# SPDX-License-Identifier: Apache-2.0
"""Tensors of a nested state as a stream of messages, so that the sender needs no memory for a copy of all of them.

It fills one message while another one travels; receivers write each into tensors of their own.
"""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from agmerge.backends import Backend, Handle

MESSAGE = 1 << 23  # bytes, at most
UNDER_WAY = 2  # messages
PAUSE = 1 << 28  # bytes between two pauses of a stream: at 8 Mbit/s these take less than the default time-out
Pieces = list[torch.Tensor]  # flat parts of tensors, which one message holds


def replaced(state: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return a nested state of dictionaries, lists and tuples with ``function(tensor)`` in place of each tensor."""
    if isinstance(state, torch.Tensor):
        return function(state)
    if isinstance(state, dict):
        changed = copy.copy(state)  # that of a module has more than its items
        changed.update({key: replaced(value, function) for key, value in state.items()})
        return changed
    if type(state) in (list, tuple):
        return type(state)(replaced(value, function) for value in state)
    return state


def outlined(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return a nested state without the contents of its tensors, as bytes, and these tensors, each of them once.

    Tensors that are sparse, quantised, require gradients or are made of others stay in the outline.
    """
    tensors: list[torch.Tensor] = []
    known: dict[tuple[Any, ...], int] = {}
    numbers: list[int] = []

    def emptied(tensor: torch.Tensor) -> torch.Tensor:
        """Return the place of a tensor in the outline."""
        if not _travels(tensor):
            numbers.append(-1)
            return tensor.cpu()
        key = tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
        number = known.setdefault(key, len(tensors)) if tensor.numel() else len(tensors)
        if number == len(tensors):
            tensors.append(tensor)
        numbers.append(number)
        return torch.empty(0, dtype=tensor.dtype)

    outline = replaced(state, emptied)
    shapes = [list(tensor.shape) for tensor in tensors]
    file = io.BytesIO()
    torch.save((outline, numbers, shapes), file)
    return file.getvalue(), tensors


def unfilled(outline: bytes) -> tuple[Any, list[torch.Tensor]]:
    """Return the state of which :func:`outlined` has made ``outline``, and its tensors, which have no values yet.

    They are on the host. A tensor that was in several places is so again.
    """
    state, numbers, shapes = torch.load(io.BytesIO(outline), weights_only=True)
    made: dict[int, torch.Tensor] = {}
    place = iter(numbers)

    def full(tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of a place."""
        number = next(place)
        if number < 0:
            return tensor
        if number not in made:
            made[number] = torch.empty(shapes[number], dtype=tensor.dtype)
        return made[number]

    state = replaced(state, full)
    return state, [made[number] for number in range(len(shapes))]


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return how many bytes ``tensors`` have together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def broadcast_tensors(
    comm: Backend, tensors: Sequence[torch.Tensor], root: int, name: str, timeout: float
) -> Iterator[None]:
    """Collective. Overwrite ``tensors`` with those of rank ``root``, which have the same shapes and dtypes, in order.

    An iterator: it pauses after each ``PAUSE`` bytes, so ``size_of(tensors) // PAUSE`` times, and its messages may be
    under way meanwhile. ``timeout``: seconds, for each message. Elsewhere than on ``root`` tensors are contiguous.
    """
    space = min(MESSAGE, size_of(tensors))
    buffers = [torch.empty(space, dtype=torch.uint8) for _ in range(UNDER_WAY)]
    under_way: deque[tuple[Handle, torch.Tensor, Pieces]] = deque()
    sent = 0

    def finish() -> None:
        """Wait for the oldest message, and write its contents where they belong."""
        handle, message, pieces = under_way.popleft()
        handle.wait(timeout)
        if comm.rank != root:
            for piece, part in zip(pieces, torch.split(message, [one.nbytes for one in pieces]), strict=True):
                piece.view(torch.uint8).copy_(part)

    for number, pieces in enumerate(_messages(tensors)):
        if len(under_way) == UNDER_WAY:
            finish()
        sizes = [piece.numel() * piece.element_size() for piece in pieces]
        message = buffers[number % UNDER_WAY][: sum(sizes)]
        if comm.rank == root:
            for piece, part in zip(pieces, torch.split(message, sizes), strict=True):
                part.copy_(piece.cpu().view(torch.uint8))
        under_way.append((comm.broadcast(message, root, name), message, pieces))
        sent += len(message)
        if sent // PAUSE > (sent - len(message)) // PAUSE:
            yield
    while under_way:
        finish()


def _travels(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's contents are bytes that can be sent as they are."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not hasattr(tensor, "__tensor_flatten__")
    return plain and not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()


def _messages(tensors: Sequence[torch.Tensor]) -> Iterator[Pieces]:
    """Yield what each message holds."""
    pieces: Pieces = []
    room = MESSAGE
    for tensor in tensors:
        flat, start = tensor.reshape(-1), 0
        while start < len(flat):
            count = min(len(flat) - start, room // flat.element_size())
            if not count:
                yield pieces
                pieces, room = [], MESSAGE
                continue
            pieces.append(flat[start : start + count])
            start, room = start + count, room - count * flat.element_size()
    if pieces:
        yield pieces
