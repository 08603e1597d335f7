# SPDX-License-Identifier: Apache-2.0
"""Send signs and the mean magnitude of each block, and the residual later: onebit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsifiers.quantising.base import Quantiser
from sparsifiers.quantising.draws import SCALE, Draws, as_bits, as_scale, bounded
from sparsifiers.quantising.eden import folded
from sparsifiers.quantising.linear import packed, unpacked

LAST_OFF, SIGN = -2, -(1 << 15)  # of 16 bits: all but the last one; the first one


class OneBit(Quantiser):
    """Quantiser to signs times the mean magnitude of a block, with error feedback: ``onebit``.

    In a block of zeros and others, zeros stay zero: its bits say which coordinates are read as the mean of all values
    of one sign, the one with the larger sum. The scale then has a sign of its own, and its last bit says which one; the
    values of the other sign stay in the residual.

    Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs", Interspeech 2014; with one magnitude for both signs. Its square error is that of
    Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
    2019, arXiv 1901.09847, Algorithm 1: never more than the square of the block.
    """

    name = "onebit"
    bits = 1
    unbiased = False
    masks_zeros = True
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
        zeros = blocks == 0
        zeros[:, filled:] = False
        mixed = zeros.any(dim=1, keepdim=True) & (largest > 0)  # NaN is not
        mean = folded(blocks.abs()).unsqueeze(1) / filled
        plus, minus = (folded(side.clamp(min=0)).unsqueeze(1) for side in (blocks, -blocks))
        of_minus = minus > plus
        chosen = torch.where(of_minus, blocks < 0, blocks > 0)
        one_sided = torch.maximum(plus, minus) / chosen.sum(dim=1, keepdim=True)
        scale = as_scale(torch.where(largest.isnan(), torch.nan, torch.where(mixed, one_sided, mean)))
        mixed &= scale > 0
        head = as_bits(scale)
        out[:, :SCALE] = torch.where(mixed, head & LAST_OFF | of_minus | SIGN, head).view(torch.uint8)
        codes = torch.where(mixed, chosen, blocks < 0) & (scale > 0)  # without a scale all is read as 0, not as -0
        out[:, SCALE:] = packed(codes.to(torch.uint8), 1)

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        codes = unpacked(data[:, SCALE:], 1).to(torch.float32)
        head = data[:, :SCALE].contiguous().view(torch.int16)
        mixed = head < 0
        scale = torch.where(mixed, head & LAST_OFF & ~SIGN, head).view(torch.bfloat16).to(torch.float32)
        one_sided = torch.where(codes > 0, torch.where((head & 1) > 0, -scale, scale), 0.0)
        return torch.where(mixed, one_sided, (1.0 - 2.0 * codes) * scale)
