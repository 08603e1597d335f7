"""Choice of this package for a tensor, and of Triton's kernels."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

FUSED = {"cuda"}  # types of devices on which each call is the announced launches; a test adds one that pretends


def is_fused(device: torch.device) -> bool:
    """Return whether calls of this package are the announced launches on `device`: Triton is there."""
    return device.type in FUSED and (device.type != "cuda" or _installed())


def has_kernels(vector: Tensor) -> bool:
    """Return whether kernels take `vector`: it is fp32 and contiguous, on such a device."""
    return is_fused(vector.device) and vector.dtype == torch.float32 and vector.is_contiguous()


def runs_triton(tensor: Tensor) -> bool:
    """Return whether kernels in Triton can work on `tensor`: it is on a CUDA device, and Triton is installed."""
    return tensor.is_cuda and _installed()


@functools.cache
def _installed() -> bool:
    """Return whether Triton is here, unless `AGMERGE_KERNEL=off` goes without all of our kernels; read once."""
    return os.environ.get("AGMERGE_KERNEL") != "off" and importlib.util.find_spec("triton") is not None
