# SPDX-License-Identifier: Apache-2.0
"""Make the inputs that a sparsifier is checked on: small, deterministic, and each a special case."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """Input of a selection, with its name in errors."""

    name: str  # of the special case
    vector: Tensor  # floats [n]
    shapes: Shapes | None = None  # of the tensors that it concatenates
    finite: bool = True  # the lower bound on the count applies to it

    def __str__(self) -> str:
        return f"input {self.name!r} ({self.vector.dtype}, n={self.vector.numel()}, shapes={self.shapes})"


def gaussian(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers from a generator of their own, [n]."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cases() -> Iterator[Case]:
    """Make distributions of several lengths, the longest beyond the block in which long vectors are read."""
    for n in (2, 31, 1000, 70_001):
        uniform = gaussian(n, 1).erf()
        yield Case("gaussian", gaussian(n))
        yield Case("mostly zero", gaussian(n) * (uniform > 0.98))
        yield Case("blocks of unlike scale", gaussian(n) * gaussian(n // 97 + 1, 2).exp().repeat_interleave(97)[:n])
    for n in (2, 31, 1000):
        uniform = gaussian(n, 1).erf()
        yield Case("heavy tails", uniform.sign() / (1.001 - uniform.abs()).sqrt())
        yield Case("three values", uniform.mul(1.5).round())
        yield Case("constant", torch.full((n,), -0.75))
        yield Case("zeros", torch.zeros(n))
        yield Case("ascending", gaussian(n).abs().sort().values)
        yield Case("descending", -gaussian(n).abs().sort(descending=True).values)
        yield Case("spikes at a period", 1e-3 * gaussian(n) + 5.0 * (torch.arange(n) % 97 == 0))


def structured() -> Iterator[Case]:
    """Make vectors that concatenate tensors of several shapes, padding included."""
    for shapes in (
        ((40, 25),),
        ((25, 40), (24,)),
        ((300, 7), (20, 5, 3, 3), (28,), (10,), (1, 9), (9, 1), (13,)),
        ((3, 0), (4, 4), (), (15,)),
    ):
        n = sum(math.prod(shape) for shape in shapes)
        yield Case("gaussian", gaussian(n), shapes)
        yield Case("padding of zeros", gaussian(n) * (torch.arange(n) % 32 < 20), shapes)
        yield Case("constant", torch.ones(n), shapes)


def degenerate() -> Iterator[Case]:
    """Make values at which rules divide by zero or search for ever."""
    yield Case("n=1", torch.tensor([-2.0]))
    yield Case("n=1, zero", torch.zeros(1))
    for n in (7, 3000):
        alone = torch.zeros(n)
        alone[n // 2] = -1e-30
        yield Case("one non-zero", alone)
        yield Case("subnormal", 1e-42 * torch.arange(1, n + 1, dtype=torch.float64).float())
        yield Case("near the largest float", gaussian(n).sign() * 3e38)
        yield Case("two magnitudes far apart", torch.where(torch.arange(n) % 50 == 0, 1e30, 1e-30))
        for name, value in (("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)):
            some = gaussian(n)
            some[:: 3 if n == 7 else 500] = value
            yield Case(f"some {name}", some, finite=False)
            yield Case(f"all {name}", torch.full((n,), value), finite=False)
    yield Case("overflowing in fp16", torch.full((2000,), 6e4, dtype=torch.float16))


def drifting(step: int, factor: float = 1.0) -> Case:
    """Make the vector of a key at one step: new values in each step, of a slowly changing scale times `factor`."""
    scale = factor * (1.0 + 0.2 * math.sin(step))
    return Case("drifting", gaussian(4000, 100 + step) * scale, ((40, 100),))
