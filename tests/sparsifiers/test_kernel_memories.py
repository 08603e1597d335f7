# SPDX-License-Identifier: Apache-2.0
"""What memories with a factor make in one compiled pass has the bits that torch gives in several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import Momentum, Rate, native
from sparsifiers.memories import Decaying

SIZES = [*range(1, 71), 127, 128, 129, 1023, 1024, 1025, 5000]
SPECIALS = torch.tensor([0.0, -0.0, 1.4e-45, -1.4e-45, 1e-40, float("inf"), float("-inf"), float("nan"), 3.4e38])
pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled loops were not built")


def hard(n: int, seed: int) -> Tensor:
    """Half of it normal, half of it special."""
    source = torch.Generator().manual_seed(seed)
    special = SPECIALS[torch.randint(len(SPECIALS), (n,), generator=source)]
    return torch.randn(n, generator=source).where(torch.rand(n, generator=source) < 0.5, special)


@pytest.mark.whole
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["decaying", "dgc", "dgc, Nesterov"])
@pytest.mark.usefixtures("any_size")
def test_memories_with_a_factor_are_torchs(
    level: int,
    name: str,
    dtype: torch.dtype,
    same_bits: Callable[[Tensor, Tensor], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Decaying(0.95) if name == "decaying" else sparsifiers.memory("dgc")
    for n in SIZES:
        for shift, later in ((0, 0), (1, 1), (5, 2)):  # the momentum is aligned as the rest, or is not
            residual, before = (hard(n + shift, seed)[shift:] for seed in (1, 3))
            gradient = hard(n, 2).to(dtype)
            found = []
            for library in (native.library, None):
                work, after = torch.full((n + shift + 1,), 7.0), torch.full((n + later + 1,), 7.0)
                momentum = Momentum(before, after[later:-1], Rate(0.9, name.endswith("Nesterov")))
                with monkeypatch.context() as patch:
                    patch.setattr(native, "library", library)
                    args = (work[shift:-1], residual, gradient, None if name == "decaying" else momentum)
                    found.append((memory.compensate(*args), work, after))
            (finite, *compiled), (unknown, *expected) = found
            assert unknown is None and finite is bool(expected[0].isfinite().all())
            for one, other in zip(compiled, expected, strict=True):
                assert torch.equal(one.isnan(), other.isnan())
                assert same_bits(one.nan_to_num(nan=1.0), other.nan_to_num(nan=1.0))
