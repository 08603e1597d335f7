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
    """Selection of coordinates to be sent.

    A message has `capacity` entries, of which `count` are used; the entries after them are padding. ValueError for
    tensors of another form.
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
        """Return how many entries there are."""
        return self.indices.numel()

    def padded(self, capacity: int) -> Selection:
        """Return this selection with so many entries, or with its own if these are more. Its count stays."""
        missing = max(capacity - self.capacity, 0)
        values = None if self.values is None else pad(self.values, (0, missing))
        return Selection(pad(self.indices, (0, missing)), self.count, values) if missing else self

    def trimmed(self) -> Tensor:
        """Return the selected indices without padding, int64[count]. Waits for the device if `count` is on one."""
        return self.indices[: int(self.count)].long()


class Sparsifier(Compressor):
    """Compressor that selects coordinates of a vector.

    A subclass sets `name` and writes `_select`; everything else has a default that is right for a sparsifier
    that has no options, sends at most k indices and remembers nothing. One with messages that are always smaller writes
    `_capacity`; for options and state see `Compressor`. Arguments are checked here, once, and arrive as a `Request`:
    k carries warm-up, per-tensor densities and budgets, and step is the only clock.
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
        """Choose at most k coordinates of `vector`, which is 1-D, of any float dtype, stride and device.

        k: elements wanted, in [1, numel]; None: budget(density, numel).
        key: names the vector, and owns the state that belongs to it; a key not seen before starts cold.
        step: committed exchanges so far, the only clock; equal on all ranks.
        shapes: those of the tensors that the vector concatenates; None: it is one 1-D tensor.
        scratch: of kernels, beside the vector, where the sparsifier `has_kernels`. The selection is then made when it
            is read, or written to a message (`Deferred`): till then the vector must stay as it is. On the host the
            candidates noted when the vector was written, where it `takes_candidates`; they change nothing but time.
            None: there is none, and the selection is made now.

        The vector is not changed, no gradient is recorded, and nothing waits for a device. ValueError or TypeError
        for arguments outside the contract.
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
        """Return the entries of the message that `select` fills, at most k, from the same arguments.

        It is a pure function of these, so that all ranks know the size of a message beforehand.
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
