# SPDX-License-Identifier: Apache-2.0
"""Bytes that leave this rank, counted where collectives start: in one place for all exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from agmerge.backends import Backend, Handle
from agmerge.backends.delegating import DelegatingBackend
from agmerge.metrics import link_bytes

Count = Callable[[int], None]  # is given the bytes of a collective that leave this rank


def nobody_counts(size: int) -> None:
    """Discard a count of ``size`` bytes."""


class CountedBackend(DelegatingBackend):
    """Communicator that reports the bytes leaving this rank to ``count``. Barriers do not count.

    Communicators made from it are not counted; their users count for themselves.
    """

    def __init__(self, inner: Backend, count: Count) -> None:
        super().__init__(inner)
        self._count = count

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        """Collective. See :meth:`Backend.all_reduce`."""
        self._count(link_bytes.all_reduce_bytes(self._inner.summed_bytes(tensor), self.size))
        return self._inner.all_reduce(tensor, name, op)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. See :meth:`Backend.all_gather`."""
        self._count(link_bytes.all_gather_bytes(tensor.nbytes, self.size))
        return self._inner.all_gather(out, tensor, name)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        """Collective. See :meth:`Backend.all_to_all`."""
        width = tensor.element_size()
        self._count(link_bytes.all_to_all_bytes([width * length for length in splits], self.rank))
        return self._inner.all_to_all(out, tensor, out_splits, splits, name)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. See :meth:`Backend.reduce_scatter`."""
        whole = self._inner.scatters_by_all_reduce(tensor)
        moved = link_bytes.all_reduce_bytes if whole else link_bytes.reduce_scatter_bytes
        self._count(moved(self._inner.summed_bytes(tensor), self.size))
        return self._inner.reduce_scatter(out, tensor, name)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Handle:
        """Collective. See :meth:`Backend.broadcast`."""
        self._count(link_bytes.broadcast_bytes(tensor.nbytes, self.size, self.rank, root))
        return self._inner.broadcast(tensor, root, name)
