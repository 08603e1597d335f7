# SPDX-License-Identifier: Apache-2.0
"""Send signs and the mean magnitude of each block, and the residual later: onebit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsifiers.quantising.base import Quantiser
from sparsifiers.quantising.draws import Draws
from sparsifiers.quantising.integers import packed, unpacked
from sparsifiers.quantising.rotation import folded
from sparsifiers.quantising.scales import SCALE, as_scale, bounded, read_scale, write_scale


class OneBit(Quantiser):
    """Quantiser to signs, 0 counted as plus, times the mean magnitude of a block, with error feedback: ``onebit``.

    Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs", Interspeech 2014; with one magnitude for both signs. Its square error is that of
    Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
    2019, arXiv 1901.09847, Algorithm 1: never more than the square of the block.
    """

    name = "onebit"
    bits = 1
    unbiased = False
    memory = "residual"
    noise = 0.362

    def record_bytes(self, size: int) -> int:
        return SCALE + size // 8

    def encode(self, values: Tensor, size: int, draws: Draws, out: Tensor, squares: Tensor | None = None) -> None:
        super().encode(values, size, draws, out, squares)
        tail = values.numel() % size
        if tail:  # the mean is taken without the zeros behind it
            block = pad(values[-tail:].to(torch.float32), (0, size - tail)).view(1, size)
            self._write(block, tail, out[-self.record_bytes(size) :].view(1, -1))

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        self._write(blocks, blocks.shape[1], out)

    def _write(self, blocks: Tensor, filled: int, out: Tensor) -> None:
        """Write ``blocks``, float32[n, size], of which the first ``filled`` coordinates count, to the records ``out``.

        The others are 0. `blocks` may be changed.
        """
        largest = bounded(blocks)
        mean = folded(blocks.abs()).unsqueeze(1) / filled
        scale = as_scale(torch.where(largest.isnan(), torch.nan, mean))
        write_scale(scale, out)
        negative = (blocks < 0) & (scale > 0)  # without a scale all is read as 0, not as -0
        out[:, SCALE:] = packed(negative.to(torch.uint8), 1)

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        return unpacked(data[:, SCALE:], 1).to(torch.float32).mul_(-2.0).add_(1.0).mul_(read_scale(data))
