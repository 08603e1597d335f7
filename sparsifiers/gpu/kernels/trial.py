# SPDX-License-Identifier: Apache-2.0
"""Try whether kernels can be compiled and launched here: a histogram with a mask, which Triton has from 3.4 on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.kernels.launching import launch

BINS = 32


@triton.jit
def trial_kernel(histogram: tl.tensor, BINS: tl.constexpr) -> None:
    """Count the even ones of some numbers."""
    numbers = tl.arange(0, BINS)
    counts = tl.histogram(numbers, BINS, mask=numbers % 2 == 0)
    tl.atomic_add(histogram + numbers, counts, mask=counts > 0, sem="relaxed")


def run(device: torch.device) -> Tensor:
    """Queue a kernel on `device`, and return what it writes: int32[32]. Raises what compiling or launching raises."""
    histogram = torch.zeros(BINS, dtype=torch.int32, device=device)
    launch(trial_kernel, 1, histogram, histogram, BINS=BINS)
    return histogram
