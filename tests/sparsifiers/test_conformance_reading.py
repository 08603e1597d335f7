# SPDX-License-Identifier: Apache-2.0
"""The kit catches each quantiser of which something wrong is read, and says what and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsifiers import Quantiser, conformance
from sparsifiers.quantising.draws import Draws
from sparsifiers.quantising.linear import Int8
from sparsifiers.quantising.stochastic import QSGD

pytestmark = pytest.mark.usefixtures("one_thread")


class Restless(Int8):
    """Int8 that reads zeros as a little more."""

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        return super()._decode(data, draws, size) + 1e-9


class Muddy(Int8):
    """Int8 that reads noise beside other values, and zeros in blocks that have nothing else."""

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        read = super()._decode(data, draws, size)
        return read + 1e-3 * read.abs().amax(dim=1, keepdim=True)


class Inverted(Int8):
    """Int8 that flips the bits of what it writes."""

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        super()._encode(blocks, draws, out)
        out.bitwise_not_()

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        return super()._decode(~data, draws, size)


class Silent(Int8):
    """Int8 that writes zeros for what is not finite."""

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        super()._encode(blocks.nan_to_num(0.0, 0.0, 0.0), draws, out)


class Infectious(Int8):
    """Int8 that makes all blocks NaN if one is."""

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        bad = torch.where(blocks.isfinite().all(), 1.0, torch.nan)
        super()._encode(blocks * bad, draws, out)


class Reassuring(Int8):
    def encode(self, values: Tensor, size: int, draws: Draws, out: Tensor, squares: Tensor | None = None) -> None:
        super().encode(values, size, draws, out)
        if squares is not None:
            squares.add_(values.double().nan_to_num(0.0, 0.0, 0.0).square().sum())


class Guarded(Int8):
    """Int8 with the small number that many add to what they divide by: small gradients are lost."""

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        largest = blocks.abs().amax(dim=1, keepdim=True)
        super()._encode(torch.where(largest < 1e-8, blocks * 0.0, blocks), draws, out)


class Boundless(Int8):
    """Int8 that reads the largest values as they are."""

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        read = super()._decode(data, draws, size)
        return torch.where(read.abs() > 1e35, read * 100.0, read)


class Subnormal(Int8):
    """Int8 with scales as small as any."""

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        largest = blocks.abs().amax(dim=1, keepdim=True)
        super()._encode(blocks, draws, out)
        small = (largest < 1e-30) & (largest > 0)
        unbounded = torch.cat([(largest / 127).bfloat16().view(torch.uint8), torch.ones_like(out[:, 2:])], dim=1)
        out.copy_(torch.where(small, unbounded, out))


class Timid(Int8):
    """Int8 that reads the largest values as zeros."""

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        read = super()._decode(data, draws, size)
        return torch.where(read.abs() > 1e35, 0.0, read)


class Loud(Int8):
    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        return super()._decode(data, draws, size) * 2.5


class Shy(QSGD):
    """QSGD that reads nine tenths."""

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        return super()._decode(data, draws, size) * 0.875


class Faint(QSGD):
    """QSGD that reads nine tenths of all but the largest coordinate."""

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        largest = blocks.abs().amax(dim=1, keepdim=True)
        super()._encode(torch.where(blocks.abs() < largest, blocks * 0.9, blocks), draws, out)


class Rough(QSGD):
    """QSGD that loses what is less than half of a level: little of the whole, but all of some coordinates."""

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        largest = blocks.abs().amax(dim=1, keepdim=True)
        super()._encode(torch.where(blocks.abs() < largest / 14, 0.0, blocks), draws, out)


class Boastful(Int8):
    noise = 1e-6


class Unaware(QSGD):
    def __init__(self) -> None:
        super().__init__()
        self.noise = 0.0

    def options(self) -> dict[str, object]:
        return {}


class Halved(Int8):
    """Int8 that writes full blocks otherwise if another one is not full."""

    def encode(self, values: Tensor, size: int, *more: Any, **named: Any) -> None:
        super().encode(values * (0.5 if values.numel() % size and values.numel() > size else 1.0), size, *more, **named)


class Long(Int8):
    """Int8 that writes the whole of the last block."""

    def decode_sum(self, messages: Any, draws: Any, size: int, scale: float, out: Tensor) -> None:
        super().decode_sum(messages, draws, size, scale, out)
        if out.numel() % size:
            out.as_strided((1,), (1,), out.numel())[0] = 0.0


class Clipped(Int8):
    """Int8 that reads what is not a whole number of blocks otherwise."""

    def decode_sum(self, messages: Any, draws: Any, size: int, scale: float, out: Tensor) -> None:
        super().decode_sum(messages, draws, size, scale, out)
        if out.numel() % size:
            out.mul_(0.5)


class Swollen(Int8):
    """Int8 that writes three times the values of a block that is not full."""

    def encode(self, values: Tensor, size: int, *more: Any, **named: Any) -> None:
        whole = values.numel() // size * size
        super().encode(torch.cat([values[:whole], values[whole:] * 3]), size, *more, **named)


class Coarse(Int8):
    """Int8 that rounds values of 16 bits to fewer."""

    def encode(self, values: Tensor, *more: Any, **named: Any) -> None:
        coarse = values if values.dtype == torch.float32 else (values * 8).round() / 8
        super().encode(coarse, *more, **named)


class Chopping(Int8):
    """Int8 that cuts results off instead of rounding them."""

    def decode_sum(self, messages: Any, draws: Any, size: int, scale: float, out: Tensor) -> None:
        total = torch.empty(out.shape)
        super().decode_sum(messages, draws, size, scale, total)
        if out.dtype == torch.bfloat16:
            total = (total.view(torch.int32) & -0x10000).view(torch.float32)
        out.copy_(total)


class Backward(Int8):
    """Int8 that adds the last message first."""

    def decode_sum(self, messages: Any, draws: Any, size: int, scale: float, out: Tensor) -> None:
        super().decode_sum(messages[::-1], draws[::-1], size, scale, out)


class Unscaled(Int8):
    """Int8 whose sums are not divided before they are quantised again."""

    def encode_sum(
        self, messages: Any, draws: Any, size: int, scale: float, second: Quantiser, own: Draws, out: Tensor
    ) -> None:
        super().encode_sum(messages, draws, size, 1.0, second, own, out)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Restless, "a block of zeros is not read as zeros: .* input 'zeros'"),
        (Muddy, "zeros beside other values are not read as zeros: .* input 'normal, 10% of all elements"),
        (Inverted, "bytes of 0, for no gradient, are not read as zeros"),
        (Silent, "not read as NaN: .* input 'one nan'"),
        (Infectious, "a block that is not finite changes another one"),
        (Reassuring, "squares are finite, and a value is not"),
        (Guarded, "a factor changes more than the scale.* input 'normal times 1.6e-30'"),
        (Boundless, "what 256 senders say has no finite sum: .*3e[+]38"),
        (Subnormal, "divided by 256 senders, is subnormal"),
        (Timid, "large values are read as zeros"),
        (Loud, "the error of a block is larger than the block: .* input 'normal'"),
        (Shy, "on average the largest coordinate is read 0.87"),
        (Faint, "on average all but the largest coordinate are read 0.9"),
        (Rough, "unbiased, but the mean is off by 0.0"),
        (Boastful, "noise is 4.*e-05, not 1e-06"),
        (Unaware, "noise is 0.03.*, not 0"),
        (Halved, "a block that is not full changes another one"),
        (Long, "something is written behind the vector"),
        (Clipped, "its length changes what is read"),
        (Swollen, "the error of a block that is not full is larger"),
        (Coarse, "float32 has other bytes: .* torch.bfloat16"),
        (Chopping, "what is read is not that of float32, rounded: .* torch.bfloat16"),
        (Backward, "the sum is not that of its terms in their order, rounded to torch.float32"),
        (Unscaled, "encode_sum writes other bytes than int8.. does of the sum"),
    ],
)
def test_a_broken_clause_is_named(broken: type[Quantiser], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        conformance.check(broken)
