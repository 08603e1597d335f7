# SPDX-License-Identifier: Apache-2.0
"""Choice of this package for a tensor, and of Triton's kernels."""

from __future__ import annotations

import functools
import os
import warnings

import torch
from torch import Tensor

FUSED = {"cuda"}  # types of devices on which each call is the announced launches; a test adds one that pretends
FALLBACK = (
    "AGM703: agmerge uses torch's operations on {device}, which are slower, because its kernels do not work: "
    "{problem}. They require Triton 3.4 or newer and, for the first compilation, a C compiler and Python's headers. "
    "Set AGMERGE_KERNEL=off to silence this warning."
)


def is_fused(device: torch.device) -> bool:
    """Return whether calls of this package are the announced launches on `device`: kernels work there."""
    return device.type in FUSED and (device.type != "cuda" or _works(device))


def has_kernels(vector: Tensor) -> bool:
    """Return whether kernels take `vector`: it is fp32 and contiguous, on such a device."""
    return is_fused(vector.device) and vector.dtype == torch.float32 and vector.is_contiguous()


def runs_triton(tensor: Tensor) -> bool:
    """Return whether kernels in Triton can work on `tensor`: it is on a CUDA device, and kernels work there."""
    return tensor.is_cuda and _works(tensor.device)


@functools.cache
def _works(device: torch.device) -> bool:
    """Return whether kernels work on a CUDA device, and warn where they do not; found out once by a process.

    `AGMERGE_KERNEL=off` goes without all of our kernels.
    """
    if os.environ.get("AGMERGE_KERNEL") == "off":
        return False
    problem = _problem(device)
    if problem:
        warnings.warn(FALLBACK.format(device=device, problem=problem), stacklevel=4)
    return not problem


def _problem(device: torch.device) -> str:
    """Return why a kernel that needs what all of them need cannot be compiled and launched on `device`; "": it can."""
    try:
        from sparsifiers.gpu.kernels.launching import launch_trial

        launch_trial(device)
    except Exception as error:  # of Triton, a compiler or a driver, by all of which torch's operations do without
        return f"{type(error).__name__}: {error}"
    return ""
