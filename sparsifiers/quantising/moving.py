# SPDX-License-Identifier: Apache-2.0
"""Tensors that move by what arrives of them: shared ones by the sum of all senders, a sender's own by what differs.

A sender's momentum may follow, because its own tensor was moved towards the mean of all senders. With compiled loops
that is one pass over memory; torch's operations give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsifiers import native
from sparsifiers.gpu.tables import BlockTable
from sparsifiers.quantising.base import Quantizer


class Momentum(NamedTuple):
    """Momentum that follows the movement of a tensor: `values -= moved * (sqrt(squares) + eps) * factor`.

    values: 1-D, as long as the tensor. squares: likewise, a second moment; None: `values -= moved * factor`.
    """

    values: Tensor
    squares: Tensor | None
    factor: float
    eps: float

    def follow(self, elements: slice, moved: Tensor) -> None:
        """Move some elements, each operation rounded by itself. `moved`, 1-D, has no meaning afterwards."""
        if self.squares is not None:
            moved = moved * root_of(self.squares[elements]).add_(self.eps)
        self.values[elements].sub_(moved.mul_(self.factor))


def root_of(squares: Tensor) -> Tensor:
    """Return the square roots as a new tensor; on the host rounded to nearest, which torch's own are not."""
    return torch.from_numpy(np.sqrt(squares.numpy())) if squares.is_cpu else squares.sqrt()


class Moved(NamedTuple):
    """Tensors that are moved together, 1-D and equally long: the shared one, a sender's own, and its momentum."""

    base: Tensor
    own: Tensor
    momentum: Momentum | None


class Arrived(NamedTuple):
    """Records of many tensors that have arrived, not read yet.

    The sum of a piece is `scale` times what `rows`, uint8[senders, bytes], hold of it under `keys`, one a sender.
    `table` says where its records are in a row. What this sender has sent of it is `factor` times what `message`,
    uint8[bytes], holds under `key`; `sent` says where, for the same pieces in the same order.
    """

    table: BlockTable
    rows: Tensor
    keys: Sequence[int]
    scale: float
    sent: BlockTable
    message: Tensor
    key: int
    factor: float
    own: int = -1  # the row that has the bytes of `message`; -1: none has


def read_all(quantizer: Quantizer, arrived: Arrived) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the sum of each piece, and what this sender has sent of it: float32, 1-D, valid until the next pair.

    On the host pieces are read one by one, while they are in a cache; on a device all of them in one launch.
    """
    device, rows, own_row = arrived.rows.device, arrived.rows, arrived.message.view(1, -1)
    lengths = [run.length for run in arrived.table.runs]
    if device.type != "cpu":
        sums, sent = (torch.split(torch.empty(sum(lengths), device=device), lengths) for _ in range(2))
        quantizer.decode_all(arrived.table, rows, arrived.keys, arrived.scale, sums)
        quantizer.decode_all(arrived.sent, own_row, [arrived.key], arrived.factor, sent)
        yield from zip(sums, sent, strict=True)
        return
    room = torch.empty(2, max(lengths, default=0))
    for length, of_all, of_own in zip(lengths, arrived.table.singles, arrived.sent.singles, strict=True):
        total, gone = room[:, :length]
        quantizer.decode_all(of_all, rows, arrived.keys, arrived.scale, [total])
        quantizer.decode_all(of_own, own_row, [arrived.key], arrived.factor, [gone])
        yield total, gone


def move_all(quantizer: Quantizer, arrived: Arrived, tensors: Sequence[Moved | None]) -> None:
    """Move tensors by the pieces that have arrived: `base -= sum`, and `own += sent - sum`, which momentum follows.

    tensors: of each piece the tensor that it is a part of, whole; None: the piece is not used.
    """
    if not _move_in_one_pass(quantizer, arrived, tensors):
        _move_in_torch(quantizer, arrived, tensors)


def _move_in_one_pass(quantizer: Quantizer, arrived: Arrived, tensors: Sequence[Moved | None]) -> bool:
    """Do the work of :meth:`move_all` by a compiled loop; return False, with nothing done, if none fits."""
    if not arrived.rows.is_cpu or not native.available():
        return False
    addresses = np.zeros((len(tensors), 4), dtype=np.uint64)
    factors = np.zeros((len(tensors), 2), dtype=np.float32)
    known: dict[int, tuple[int, ...]] = {}  # by `id`, of a tensor of which several pieces have arrived
    for number, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if id(tensor) not in known:
            moment = tensor.momentum
            given = (tensor.base, tensor.own, *(() if moment is None else (moment.values, moment.squares)))
            if not native.plain(*(each for each in given if each is not None)):
                return False
            known[id(tensor)] = tuple(0 if each is None else each.data_ptr() for each in given)
        places = known[id(tensor)]
        addresses[number, : len(places)] = places
        if tensor.momentum is not None:
            factors[number] = tensor.momentum.factor, tensor.momentum.eps
    number, rows, place = quantizer.loop_number(), arrived.rows, native.address
    keys = np.array(arrived.keys, dtype=np.uint64)
    tables = place(arrived.table.rows), place(arrived.sent.rows), len(tensors)
    read = rows, rows.shape[1], place(keys), len(rows), arrived.scale
    own = arrived.message, arrived.key, arrived.factor, arrived.own
    return bool(number) and native.MOVE(number, *tables, *read, *own, place(addresses), place(factors)) is not None


def _move_in_torch(quantizer: Quantizer, arrived: Arrived, tensors: Sequence[Moved | None]) -> None:
    """Do the work of :meth:`move_all` by torch's operations, piece by piece."""
    pieces = zip(arrived.table.runs, tensors, read_all(quantizer, arrived), strict=True)
    for run, tensor, (total, gone) in pieces:
        if tensor is None:
            continue
        elements = slice(run.first * run.size, run.first * run.size + run.length)
        tensor.base[elements].sub_(total)
        tensor.own[elements].add_(gone.sub_(total))
        if tensor.momentum is not None:
            tensor.momentum.follow(elements, gone)
