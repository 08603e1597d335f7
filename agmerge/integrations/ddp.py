"""Compress what torch's DistributedDataParallel averages: ``compressed = ddp.compress(model, compression="topk")``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from agmerge.checkpoint import rank_state
from agmerge.engine.bucket_reducer import BucketReducer
from agmerge.engine.grad_scaler import LossScale
from agmerge.integrations.ddp_hook import Hook, exchange
from agmerge.options.arguments import Options
from agmerge.options.resolve import resolve
from agmerge.reporting import ReportingMixin
from agmerge.runtime import workers
from agmerge.tensors.parameters import ParameterTable


def compress(
    model: DistributedDataParallel,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> Compressed:
    """Collective. Exchange what ``model`` averages by ``options``, those of :class:`agmerge.DistributedOptimizer`."""
    return Compressed(model, optimizer, Options(scaler=scaler, **options))


@dataclass(frozen=True)
class _Groups:
    """Have the parameters of a model in one group."""

    param_groups: list[dict[str, Any]]


class Compressed(ReportingMixin):
    """Hold what :func:`compress` has made of a model: what it offers means what it means on the optimizer."""

    def __init__(
        self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer | None, options: Options
    ) -> None:
        self._options, self.optimizer = options, optimizer
        config = resolve(options)
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
        table = ParameterTable(_Groups([{"params": [parameter for _, parameter in named]}]), named)
        self._reducer = BucketReducer(table, config)
        if config.scaled:
            self._reducer.attach_scaler(LossScale(options.scaler))
        workers.adopt()
        self._reducer.connect()
        self._hook = Hook(model, self._reducer)
        model.register_comm_hook(self._hook, exchange)

    def state_dict(self) -> dict[str, Any]:
        """Return, under ``"agmerge"``, what this rank keeps: its residuals, the plan."""
        return {rank_state.SECTION: rank_state.save(self._reducer)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Collective. Load what :meth:`state_dict` gave on this rank, or :func:`agmerge.gather_state` on rank 0."""
        rank_state.load(self._reducer, state_dict.get(rank_state.SECTION))

    def flush(self) -> None:
        """Do nothing: there is nothing under way after a backward pass."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let the parameters, inside, be those that all ranks have in common: to evaluate, and to save."""
        yield

    def consolidate(self) -> None:
        """Do nothing: parameters are equal on all ranks."""

    def close(self) -> None:
        """Give the communicators back. The model averages densely from then on: a hook cannot be taken off."""
        self._hook.close()
        self._reducer.close()
