# SPDX-License-Identifier: Apache-2.0
"""Write and read the records of a quantiser, as its checks do, and make the vectors that it is checked on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from sparsifiers.conformance_inputs import gaussian
from sparsifiers.magnitude import bit_view
from sparsifiers.quantising.base import Quantiser
from sparsifiers.quantising.blocks import blocks_in
from sparsifiers.quantising.draws import Draws, key_of

DRAWS = Draws(key_of(2024), first=5)


def encoded(made: Quantiser, values: Tensor, size: int, draws: Draws = DRAWS, fill: int = 0x5A) -> Tensor:
    """Return the records of ``values``, written where all bytes were ``fill``: uint8[blocks, bytes]."""
    out = torch.full((blocks_in(values.numel(), size), made.record_bytes(size)), fill, dtype=torch.uint8)
    made.encode(values, size, draws, out.view(-1))
    return out


def decoded(made: Quantiser, records: Tensor, size: int, draws: Draws = DRAWS, scale: float = 1.0) -> Tensor:
    """Return ``scale`` times the values read of ``records``, uint8[blocks, bytes]: float32[blocks, size]."""
    out = torch.full((len(records) * size,), math.nan)
    made.decode_sum([records.reshape(-1)], [draws], size, scale, out)
    return out.view(-1, size)


def inputs(size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the values of vectors of a few blocks: float32."""
    normal, uniform = gaussian(4 * size), gaussian(4 * size, 1).erf()
    yield "normal", normal
    yield "heavy tails", uniform.sign() / (1.001 - uniform.abs()).sqrt()
    yield "mostly zero", normal * (uniform > 0.9)
    yield "constant", torch.full((2 * size,), -0.75)
    yield "one coordinate a block", normal * (torch.arange(4 * size) % size == 3)
    yield "one large coordinate a block", normal + 100.0 * (torch.arange(4 * size) % size == 3)
    yield "blocks of unlike scale", normal * torch.tensor([1e-12, 1.0, 1e12, 0.0]).repeat_interleave(size)


def where_of(made: Quantiser, size: int, name: str = "any input") -> str:
    return f"{made!r} on blocks of {size}, input {name!r}"


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether all bits are the same, but that 0 and -0 are equal."""
    return torch.equal(bit_view(left + 0.0), bit_view(right + 0.0))
