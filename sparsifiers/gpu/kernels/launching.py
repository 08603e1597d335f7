# SPDX-License-Identifier: Apache-2.0
"""Queue kernels on the current stream of the device where their tensors are; try whether that can be done here."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8  # 256 threads: the number that the limit of registers is said for
RESIDENT = 8  # programs of that many threads that a processor of a GPU holds at once
ON_HOST = 3  # programs in place of a whole device's, in Triton's interpreter: few, so that each takes several tasks

# Sums and products round by themselves, as they do on the host: `t + v * scale` must round twice.
OPTIONS: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}


def launch(kernel: Any, programs: int | tuple[int, int], tensor: Tensor, *arguments: Any, **constants: Any) -> None:
    """Queue `kernel` for so many programs on the current stream of the device of `tensor`; nothing waits.

    `arguments` and `constants` are those of the kernel, or options of the compiler. Does nothing for no programs.
    """
    grid = programs if isinstance(programs, tuple) else (programs, 1)
    if not all(grid):
        return
    where = torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
    with where:
        kernel[grid](*arguments, **{**OPTIONS, **constants})


def persistent(tasks: int, tensor: Tensor) -> int:
    """Return how many programs share `tasks` where each of them keeps something from task to task."""
    return min(tasks, _at_once(tensor.device) if tensor.is_cuda else ON_HOST)


def power(number: int) -> int:
    """Return the lowest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def _at_once(device: torch.device) -> int:
    """Return how many programs a device runs at once."""
    return RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count


BINS = 32


@triton.jit
def trial_kernel(histogram: tl.tensor, BINS: tl.constexpr) -> None:
    """Count the even ones of some numbers."""
    numbers = tl.arange(0, BINS)
    counts = tl.histogram(numbers, BINS, mask=numbers % 2 == 0)
    tl.atomic_add(histogram + numbers, counts, mask=counts > 0, sem="relaxed")


def launch_trial(device: torch.device) -> Tensor:
    """Queue a kernel on `device`, and return what it writes: int32[32]. Raises what compiling or launching raises."""
    histogram = torch.zeros(BINS, dtype=torch.int32, device=device)
    launch(trial_kernel, 1, histogram, histogram, BINS=BINS)
    return histogram
