# SPDX-License-Identifier: Apache-2.0
"""Contract of a sparsifier: `Sparsifier`, the base class, and `Selection`, its result."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsifiers.arguments import Request, check_density, check_request, check_vector
from sparsifiers.candidates import Candidates
from sparsifiers.canonical import canonical
from sparsifiers.compressor import Compressor, Kind
from sparsifiers.gpu import Scratch


@dataclass(frozen=True, eq=False)
class Selection:
    """Selected coordinates of a vector.

    It has ``capacity`` entries, of which the first ``count`` are used. The others are padding. Wrong dtypes or shapes
    raise ``ValueError``.
    """

    indices: Tensor  # int32[capacity]: first `count` unique places, ascending, then any in range, sent with value +0
    count: int | Tensor  # an int, or 0-dim int32 on the device of `indices`, so that selecting never waits for it
    values: Tensor | None = None  # [capacity]: the values there, and 0 in padding; None: not read

    def __post_init__(self) -> None:
        if self.indices.dtype != torch.int32 or self.indices.dim() != 1:
            raise ValueError(
                f"Selection: indices must be int32[capacity], got {self.indices.dtype} of shape "
                f"{tuple(self.indices.shape)}"
            )
        if isinstance(self.count, Tensor):
            if self.count.dtype != torch.int32 or self.count.dim() != 0 or self.count.device != self.indices.device:
                raise ValueError(
                    f"Selection: a tensor as count must be 0-dim, int32 and on {self.indices.device}, got "
                    f"{self.count.dtype} of shape {tuple(self.count.shape)} on {self.count.device}"
                )
        elif not 0 <= self.count <= self.indices.numel():
            raise ValueError(f"Selection: count must be in [0, {self.indices.numel()}], the capacity, got {self.count}")

    @property
    def capacity(self) -> int:
        """Return the number of entries, padding included."""
        return self.indices.numel()

    def padded(self, capacity: int) -> Selection:
        """Return this selection with at least ``capacity`` entries. The count does not change."""
        missing = max(capacity - self.capacity, 0)
        values = None if self.values is None else pad(self.values, (0, missing))
        return Selection(pad(self.indices, (0, missing)), self.count, values) if missing else self

    def trimmed(self) -> Tensor:
        """Return the selected indices without padding, as int64. If ``count`` is on a device, this waits for it."""
        return self.indices[: int(self.count)].long()


class Sparsifier(Compressor):
    """Base class of compressors that select coordinates of a vector.

    A subclass sets ``name`` and writes ``_select``, and ``_capacity`` if its messages are always smaller than k. For
    options and state see :class:`Compressor` (docs/extend.md). Arguments are checked in :meth:`select`, and arrive as a
    :class:`Request`. Its k already includes warm-up and the density of the tensor.

    Args:
        density (float): Fraction of the values to select if the caller passes no k. Default: 0.01.
    """

    kind = Kind.SPARSE
    memory = "residual"
    density: float  # selected / total elements, in (0, 1]; used where the caller gives no k

    def __init__(self, density: float = 0.01) -> None:
        self.density = check_density(density)

    def select(
        self,
        vector: Tensor,
        *,
        k: int | None = None,
        key: str = "",
        step: int = 0,
        shapes: Sequence[Sequence[int]] | None = None,
        scratch: Scratch | Candidates | None = None,
    ) -> Selection:
        """Select at most k coordinates of a vector. The vector does not change, and nothing waits for a device.

        Args:
            vector (torch.Tensor): One-dimensional, of any float dtype, stride and device.
            k (int): Number of coordinates, from 1 to ``numel``. Default: ``budget(density, numel)``.
            key (str): Name of the vector. State is kept for each key, and a new key starts without state.
            step (int): Number of exchanges so far, the same on all ranks.
            shapes (list): Shapes of the tensors that the vector consists of. Default: one 1-D tensor.
            scratch (Scratch or Candidates): Memory of device kernels (if the sparsifier ``has_kernels``). The selection
                is then made when it is read, so do not change the vector before. On the host: candidates that were
                noted when the vector was written (if it ``takes_candidates``). They only save time. Default: None.

        Returns:
            A :class:`Selection`.

        Raises:
            ValueError: For an argument outside of this contract. Also ``TypeError``.
        """
        check_vector(self, vector, key)
        request = check_request(
            self, self.density, vector.numel(), k=k, key=key, step=step, shapes=shapes, scratch=scratch
        )
        if request.k == 0:
            return Selection(torch.empty(0, dtype=torch.int32, device=vector.device), 0)
        vector = vector.detach().resolve_neg()
        on_host = vector.device.type == "cpu"
        selection = self._select(vector, request) if on_host else self._select_on_device(vector, request)
        if getattr(selection, "capacity", request.k) < request.k:  # what is no Selection is refused where it is used
            return selection.padded(self._capacity(vector.numel(), request))
        return selection

    def capacity(
        self,
        numel: int,
        *,
        k: int | None = None,
        step: int = 0,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> int:
        """Return the number of entries of the message that :meth:`select` fills, for the same arguments.

        It depends only on these arguments, so all ranks know the size of a message beforehand.
        """
        request = check_request(self, self.density, numel, k=k, key="", step=step, shapes=shapes)
        return self._capacity(numel, request)

    @abstractmethod
    def _select(self, vector: Tensor, request: Request) -> Selection:
        """Select from a detached, non-empty vector in CPU memory: at most the entries that `_capacity` returns.

        A selection of fewer entries is padded to that many. At least 0.8 k are to be in use if k values are not 0.
        """

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        """Select as many entries from a vector that is not in CPU memory, without waiting for its device.

        The default is `_select`: right where that only calls torch, uses no shape that depends on values, and reads
        none on the host.
        """
        return self._select(vector, request)

    def _capacity(self, numel: int, request: Request) -> int:
        """Return the entries of the message: request.k unless the method has a reason to send fewer."""
        return request.k

    def __repr__(self) -> str:
        return canonical(self.name, {"density": self.density, **dict(sorted(self.options().items()))})
