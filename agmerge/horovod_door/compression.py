# SPDX-License-Identifier: Apache-2.0
"""Compressors in Horovod's form: no change, a cast, and the base of a script's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Compressor that changes nothing, and base of others."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that travels, whose sum over ranks has a meaning, and a context for ``decompress``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the sum or average as a tensor of the old shape and dtype. ``ctx``: the one of ``compress``."""
        return tensor


class NoneCompressor(Compressor):
    """Compressor that changes nothing."""


class FP16Compressor(Compressor):
    """Cast of floating-point tensors to 16 bits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return ``tensor`` in float16, if it is a floating-point one, and its dtype."""
        return tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return ``tensor`` in the dtype ``ctx``."""
        return tensor.to(ctx)


class Compression:
    """Table of the compressors that scripts name."""

    none = NoneCompressor
    fp16 = FP16Compressor


def name_of(given: Any) -> str | None:
    """Return how ``agmerge.DistributedOptimizer`` names a compressor; None for a script's own."""
    kind: Any = given if inspect.isclass(given) else type(given)
    return {NoneCompressor: "none", FP16Compressor: "fp16"}.get(kind)
