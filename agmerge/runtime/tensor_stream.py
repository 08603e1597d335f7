# SPDX-License-Identifier: Apache-2.0
"""Tensors of a nested state as a stream of messages, so that no rank needs memory for a copy of all of them.

The sender fills one message while another one travels. Receivers write each into tensors of their own, of any strides
and on any device. Models and optimizer states are broadcast so, and states of elastic jobs to new workers.
"""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from agmerge.backends import Backend, Handle
from agmerge.backends.streams import streams_of

MESSAGE = 1 << 24  # bytes, at most
UNDER_WAY = 2  # messages
PAUSE = 1 << 28  # bytes between two pauses of a stream: at 8 Mbit/s these take less than the default time-out
ALIGNED = 16  # bytes: the largest element is a complex number of two doubles
Pieces = list[torch.Tensor]  # views of tensors, which one message holds

# Nested states, without the contents of their tensors.


def replaced(state: Any, function: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """Return a nested state of dictionaries, lists and tuples with ``function(leaf)`` in place of each ``kind``."""
    if isinstance(state, kind):
        return function(state)
    if isinstance(state, dict):
        changed = copy.copy(state)  # that of a module has more than its items
        changed.update({key: replaced(value, function, kind) for key, value in state.items()})
        return changed
    if type(state) in (list, tuple):
        return type(state)(replaced(value, function, kind) for value in state)
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


# The stream.


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return how many bytes ``tensors`` have together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def broadcast_tensors(
    comm: Backend, tensors: Sequence[torch.Tensor], root: int, name: str, timeout: float
) -> Iterator[None]:
    """Collective. Overwrite ``tensors`` with those of rank ``root``, which have the same shapes and dtypes, in order.

    An iterator: it pauses after each ``PAUSE`` bytes, so ``size_of(tensors) // PAUSE`` times, and its messages may be
    under way meanwhile. ``timeout``: seconds, for each message. Strides and devices may differ between ranks.
    """
    tensors = [tensor.detach() for tensor in tensors]
    space = min(MESSAGE, sum(map(_room, tensors)))
    streams = next((known for tensor in tensors if (known := streams_of(tensor.device))), None)
    # Pinned if there are devices: else each of their copies would go through pinned memory of the driver.
    buffers = [
        torch.empty(space, dtype=torch.uint8) if streams is None else streams.pinned(space, torch.uint8)
        for _ in range(UNDER_WAY)
    ]
    under_way: deque[tuple[Handle, Pieces, Pieces]] = deque()
    sent = 0

    def finish() -> None:
        """Wait for the oldest message, and write its contents where they belong."""
        handle, places, pieces = under_way.popleft()
        handle.wait(timeout)
        if comm.rank != root:
            for piece, place in zip(pieces, places, strict=True):
                piece.copy_(place)

    for number, pieces in enumerate(_messages(tensors)):
        if len(under_way) == UNDER_WAY:
            finish()
        message = buffers[number % UNDER_WAY][: sum(map(_room, pieces))]
        places = _places(message, pieces)
        if comm.rank == root:
            for piece, place in zip(pieces, places, strict=True):
                place.copy_(piece)
        under_way.append((comm.broadcast(message, root, f"{name}/{number}"), places, pieces))
        before, sent = sent, sent + size_of(pieces)
        if sent // PAUSE > before // PAUSE:
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
        for piece in _pieces(tensor):
            if _room(piece) > room:
                yield pieces
                pieces, room = [], MESSAGE
            pieces.append(piece)
            room -= _room(piece)
    if pieces:
        yield pieces


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views that each fit into a message and together are all of ``tensor``: the same ones for any strides."""
    if not tensor.numel():
        return
    if _room(tensor) <= MESSAGE:
        yield tensor
        return
    rows = MESSAGE // ALIGNED * ALIGNED // (tensor[0].numel() * tensor.element_size())
    if rows:
        yield from torch.split(tensor, rows)
    else:
        for part in tensor:
            yield from _pieces(part)


def _places(message: torch.Tensor, pieces: Pieces) -> Pieces:
    """Return where ``pieces`` lie in a message, contiguous views of its bytes."""
    places, start = [], 0
    for piece in pieces:
        size = piece.numel() * piece.element_size()
        places.append(message[start : start + size].view(piece.dtype).view(piece.shape))
        start += _room(piece)
    return places


def _room(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor`` in a message: where it begins any dtype may."""
    return -(tensor.numel() * tensor.element_size() // -ALIGNED) * ALIGNED
