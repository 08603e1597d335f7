# SPDX-License-Identifier: Apache-2.0
"""Backend around another one, for those that do something more where collectives start or end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmerge.backends.base import Backend, Handle


class DelegatingBackend(Backend):
    """Communicator that passes everything on to ``inner``. Those that are made from it are those of ``inner``."""

    def __init__(self, inner: Backend) -> None:
        self._inner, self.name = inner, inner.name
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size

    @property
    def stale(self) -> bool:
        return self._inner.stale

    @property
    def has_failed(self) -> bool:
        return self._inner.has_failed

    @property
    def through_host(self) -> bool:
        return self._inner.through_host

    def renewed(self) -> Backend:
        return self._inner.renewed()

    def summed_bytes(self, tensor: torch.Tensor) -> int:
        return self._inner.summed_bytes(tensor)

    def scatters_by_all_reduce(self, tensor: torch.Tensor) -> bool:
        return self._inner.scatters_by_all_reduce(tensor)

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        """Collective. See :meth:`Backend.all_reduce`."""
        return self._inner.all_reduce(tensor, name, op)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. See :meth:`Backend.all_gather`."""
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
        return self._inner.all_to_all(out, tensor, out_splits, splits, name)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. See :meth:`Backend.reduce_scatter`."""
        return self._inner.reduce_scatter(out, tensor, name)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Handle:
        """Collective. See :meth:`Backend.broadcast`."""
        return self._inner.broadcast(tensor, root, name)

    def barrier(self, name: str) -> Handle:
        """Collective. See :meth:`Backend.barrier`."""
        return self._inner.barrier(name)

    def duplicate(self, label: str, timeout: float) -> Backend:
        """Collective. See :meth:`Backend.duplicate`."""
        return self._inner.duplicate(label, timeout)

    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> Backend | None:
        """Collective. See :meth:`Backend.subgroup`."""
        return self._inner.subgroup(ranks, label, timeout)

    def drop(self) -> None:
        self._inner.drop()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()
