# SPDX-License-Identifier: Apache-2.0
"""Random-k: coordinates drawn by lot, the same ones on all ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsifiers.arguments import Request
from sparsifiers.base import Selection, Sparsifier
from sparsifiers.permutation import permuted


class RandomK(Sparsifier):
    """Sparsifier of k coordinates drawn uniformly without replacement, independent of their values.

    The draw depends on (seed, key, step) and the length alone, so all ranks hold the same indices without a message,
    and an exchange need not send them; two keys, or two steps of one key, draw apart. With a larger k the same
    draw goes on, so indices drawn for less are among them. count is always k, no value is read, and the cost is
    O(k). No generator of the process is touched.

    Its residual has (1 - k/n) ||a||^2 on average: all that top-k guarantees at worst, and far more than it
    leaves in practice (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018): the baseline
    that a sparsifier has to beat, and a choice for networks where only an all-reduce is fast. Values are sent as
    they are; scaling them by n/k would be right without a residual only. Ours: the draw (the reference seeds
    the process's generator, with a sum that different names share).

    seed: any integer; the same on every rank.
    """

    name = "randomk"
    same_on_all_ranks = True  # no value is read: (seed, key, step) and the length decide

    def __init__(self, density: float = 0.01, seed: int = 0) -> None:
        super().__init__(density)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"{self.name}: seed must be an int, got {seed!r}")
        self.seed = seed

    def _select(self, vector: Tensor, request: Request) -> Selection:
        return Selection(self._draw(vector.numel(), request), request.k)

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        indices = self._draw(vector.numel(), request)
        if vector.device.type == "cuda":
            indices = indices.pin_memory()  # from pageable memory the copy would wait for the device
        return Selection(indices.to(vector.device, non_blocking=True), request.k)

    def _draw(self, numel: int, request: Request) -> Tensor:
        """Return k places in [0, numel) in CPU memory, int32[k], ascending; the same for an equal request."""
        drawn = permuted(numel, request.k, f"{self.seed}/{request.step}/{request.key}")
        return torch.from_numpy(np.sort(drawn).astype(np.int32))

    def options(self) -> dict[str, object]:
        return {"seed": self.seed}
