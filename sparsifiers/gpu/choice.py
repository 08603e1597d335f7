"""Tell whether a tensor's operations are Triton's kernels or torch's."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


def runs_triton(tensor: Tensor) -> bool:
    """Tell whether kernels in Triton can work on `tensor`: it is on a CUDA device, and Triton is installed."""
    return tensor.is_cuda and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
