# SPDX-License-Identifier: Apache-2.0
"""Compressors in Horovod's form: its two casts, and the base of a script's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Base of compressors: ``compress`` before tensors of all ranks are added up, and ``decompress`` afterwards."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that travels, whose sum over ranks has a meaning, and a context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the sum or average as a tensor of the old shape and dtype. ``ctx``: the one of ``compress``."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return ``tensor``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors in 16 bits."""

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


NAMES = {NoneCompressor: "none", FP16Compressor: "fp16"}  # as agmerge.DistributedOptimizer knows them


def name_of(given: Any) -> str | None:
    """Return how ``agmerge.DistributedOptimizer`` names a compressor; None for a script's own."""
    kind: type[Any] = given if inspect.isclass(given) else type(given)
    return NAMES.get(kind)
