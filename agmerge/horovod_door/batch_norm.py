# SPDX-License-Identifier: Apache-2.0
"""Batch norm with the statistics of all workers' batches, on any device and backend: ``hvd.SyncBatchNorm``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import agmerge

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch norm that, while it trains, normalizes with mean and variance over the batches of all workers.

    Input: (N, C, ...), where N may differ between workers, and be 0. The arguments are those of
    ``torch.nn.BatchNorm2d``. Each worker has the gradients of its own rows, for the sum of all workers' losses, and of
    weight and bias its own part, which the optimizer combines. ``forward`` and ``backward`` are collective then: a
    message of 2 C + 1 numbers each.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: expected an input (N, C, ...), got one of {input.dim()} dimensions")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Collective. Return ``input``, normalized; while this does not train, without the other workers."""
        self._check_input_dim(input)
        uses_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not uses_batch or agmerge.size() == 1:
            return super().forward(input)
        output, mean, variance, count = _Normalized.apply(input, self.eps)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats:
            self._follow(mean, variance, float(count))
        shape = (1, -1, *(1,) * (input.dim() - 2))
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        """Move the running statistics towards those of a batch of ``count`` numbers a channel."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def _summed(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Collective. Return the sums of ``parts``, 1-D and of one dtype, over all workers: one message."""
    total = agmerge.allreduce(torch.cat(parts), name="SyncBatchNorm", op=agmerge.Sum)
    return list(torch.split(total, [part.numel() for part in parts]))


def _per_channel(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of ``values``, (N, C, ...), per channel: (C,)."""
    return values.sum([dim for dim in range(values.dim()) if dim != 1])


class _Normalized(torch.autograd.Function):
    """Autograd function of the normalization, in float64 on the CPU where sums are concerned, else in float32."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
        """Collective. Return the normalized input, and mean, variance and count of each channel over all workers."""
        wide = torch.float64 if input.device.type == "cpu" else torch.float32
        shape = (1, -1, *(1,) * (input.dim() - 2))
        values = input.to(wide)
        own = torch.full((1,), input.numel() / max(input.size(1), 1), dtype=wide, device=input.device)
        total, count = _summed(_per_channel(values), own)
        mean = total / count
        (squares,) = _summed(_per_channel((values - mean.view(shape)).square()))
        variance = squares / count
        inverse = (variance + eps).rsqrt()
        normalized = ((values - mean.view(shape)) * inverse.view(shape)).to(input.dtype)
        ctx.save_for_backward(normalized, inverse, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        """Collective. Return the gradient of the input, with what it changes in the other workers' rows."""
        normalized, inverse, count = ctx.saved_tensors
        shape = (1, -1, *(1,) * (gradient.dim() - 2))
        wide, values = gradient.to(inverse.dtype), normalized.to(inverse.dtype)
        total, along = _summed(_per_channel(wide), _per_channel(wide * values))
        rest = (total.view(shape) + values * along.view(shape)) / count
        return ((wide - rest) * inverse.view(shape)).to(gradient.dtype), None
