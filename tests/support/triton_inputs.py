# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's interpreter, which works on the host's tensors: the hard inputs, and how results are compared."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

assert os.environ["TRITON_INTERPRET"] == "1"  # conftest.py has seen to that
pytest.importorskip(
    "triton", reason="triton is not installed: pip install -r requirements-triton.txt; make test-all does"
)

from sparsifiers.gpu import codec, combining, compensation, records, selection  # noqa: E402

MODULES = (codec, combining, compensation, records, selection)
CPU = torch.device("cpu")
SPECIALS = [0.0, -0.0, 1.4e-45, -1.4e-45, 1e-40, -1e-39, 3.4e38, float("inf"), -float("inf"), float("nan")]
KINDS = ["normal", "laplace", "cauchy", "equal", "few", "zeros", "subnormal", "rounded", "specials"]


def vector(kind: str, n: int, seed: int = 0) -> Tensor:
    """One of the hard inputs, fp32[n]."""
    rng = np.random.default_rng(seed + n)
    draws = {
        "normal": lambda: rng.standard_normal(n),
        "laplace": lambda: rng.laplace(size=n),
        "cauchy": lambda: rng.standard_cauchy(n),
        "equal": lambda: np.where(rng.random(n) < 0.5, -0.75, 0.75),
        "few": lambda: rng.standard_normal(n) * (rng.random(n) < 3 / n),
        "zeros": lambda: np.where(rng.random(n) < 0.5, -0.0, 0.0),
        "subnormal": lambda: rng.integers(-(1 << 22), 1 << 22, n) * 2.0**-149,
        "rounded": lambda: rng.standard_normal(n).round(1),
        "specials": lambda: np.where(rng.random(n) < 0.5, rng.standard_normal(n), rng.choice(SPECIALS, n)),
    }
    with np.errstate(over="ignore"):
        return torch.from_numpy(draws[kind]().astype(np.float32))


def for_interpreter(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values`; where they are to be bf16, numbers that it has, and no subnormal ones.

    The interpreter cuts others off instead of rounding them, and misreads subnormal ones; what compiled kernels do is
    looked for in their code, see test_triton_compiled.py.
    """
    if dtype != torch.bfloat16:
        return values
    values = values.bfloat16().float()
    return values.masked_fill(values.abs() < torch.finfo(dtype).tiny, 0.0)


def bits(tensor: Tensor) -> list[int]:
    """The bits of a tensor: the sign of zero counts, and one NaN is like another."""
    if tensor.dtype.is_floating_point:
        tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()]).flatten().tolist()


def both(call: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What `call`, which makes its own inputs, returns with the kernels, and what with torch's operations."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "runs_triton", lambda tensor: True)
        kernels = call()
    return kernels, call()


def assert_same(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Both give the same bits; returns them."""
    kernels, reference = both(call)
    for mine, wanted in zip(kernels, reference, strict=True):
        assert mine.dtype == wanted.dtype and bits(mine) == bits(wanted)
    return kernels
