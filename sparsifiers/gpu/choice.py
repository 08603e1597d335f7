"""Tell whether this package is what to call for a tensor, and whether its kernels are Triton's."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

FUSED = {"cuda"}  # types of devices on which each call is the launches that it says; a test adds one that pretends


def has_kernels(tensor: Tensor) -> bool:
    """Tell whether calls of this package are fewer launches for `tensor` than torch's operations: it is fp32, there."""
    if tensor.device.type not in FUSED or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        return False
    return _installed() or not tensor.is_cuda


def runs_triton(tensor: Tensor) -> bool:
    """Tell whether kernels in Triton can work on `tensor`: it is on a CUDA device, and Triton is installed."""
    return tensor.is_cuda and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
