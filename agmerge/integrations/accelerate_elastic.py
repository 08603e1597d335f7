# SPDX-License-Identifier: Apache-2.0
"""Distribute the optimizer of an ``accelerate.Accelerator`` of one process, in a job with workers that die and come.

The Accelerator accumulates, clips and steps as it does alone; gradients of the last backward pass of a step travel, and
are combined before they are clipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DistributedType

from agmerge.optimizer import DistributedOptimizer

LAUNCHED = (
    "AGM309: A launcher set a fixed number of workers for accelerate ({found}), which an elastic job does not "
    "support. Start each worker with `python`, for example `until python train.py; do sleep 1; done`, which restarts "
    "it after a failure. See docs/elastic.md."
)
SCALED = (
    "AGM309: fp16 is not supported in an elastic job, because it scales the loss. Use bf16 or float32. See "
    "docs/elastic.md."
)


class ElasticOptimizer(DistributedOptimizer):
    """Distributed optimizer that takes gradients as they are where they were combined before, to be clipped."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Step with the gradients of all workers."""
        is_combined = self._reducer.combines_gradients and self._reducer.passes.combined
        with self.skip_synchronize() if is_combined else nullcontext():
            return super().step(closure)

    def combine(self) -> None:
        """Collective. Combine the gradients of a whole step; those that ``sync="updates"`` steps with stay own."""
        if self._reducer.combines_gradients:
            self.synchronize()

    def accumulating(self, model: Any = None) -> AbstractContextManager[None]:
        """Return a context that sends nothing: other backward passes of the step follow."""
        return self.no_sync() if self._reducer.combines_gradients else nullcontext()


def check_elastic(accelerator: Accelerator) -> None:
    """Raise ``ValueError`` where this process has been launched, or scales its loss."""
    if accelerator.distributed_type != DistributedType.NO:
        raise ValueError(LAUNCHED.format(found=accelerator.distributed_type.value))
    if accelerator.scaler is not None:
        raise ValueError(SCALED)


def distribute_elastic(
    accelerator: Accelerator, optimizer: Any, model: torch.nn.Module, options: dict[str, Any]
) -> ElasticOptimizer:
    """Return a distributed optimizer around a plain one, which ``accelerator`` is to step.

    ``options``: of :class:`agmerge.DistributedOptimizer`. Raises what :func:`check_elastic` raises.
    """
    check_elastic(accelerator)
    distributed = ElasticOptimizer(optimizer, model.named_parameters(), **options)

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(accelerator, name, _combining(accelerator, distributed, getattr(accelerator, name)))
    accelerator.no_sync = distributed.accumulating  # that of one process does nothing
    return distributed


def _combining(accelerator: Accelerator, optimizer: ElasticOptimizer, clip: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``clip``, with the gradients combined before they are clipped."""

    @functools.wraps(clip)
    def clipped(*args: Any, **kwargs: Any) -> Any:
        if accelerator.sync_gradients:
            optimizer.combine()
        return clip(*args, **kwargs)

    return clipped
