# SPDX-License-Identifier: Apache-2.0
"""What all exchanges of a ``transformers.Trainer`` do around its methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from transformers import Trainer, TrainerCallback, trainer_utils

from agmerge.engine.optimizer_group import inner_of
from agmerge.engine.optimizer_wrapper import OptimizerWrapper
from agmerge.integrations.logged import LoggedFigures

_last_checkpoint: Callable[..., str | None] = trainer_utils.get_last_checkpoint  # which has no annotations


class Compressed(Protocol):
    """Object that exchanges for the Trainer, such as a distributed optimizer."""

    def stats(self) -> Any:
        """Return the statistics so far."""

    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which parameters are those that all ranks have in common."""


class TrainerExchange(TrainerCallback):
    """Callback that exchanges for a Trainer; the base of one for each way to launch it.

    ``compressed`` has the statistics: ``compressed.stats()``. It is None before the first ``train()``.
    """

    compressed: Compressed | None = None

    def __init__(self, trainer: Trainer, options: dict[str, Any]) -> None:
        self._trainer, self._options = trainer, options
        self._folder: str | None = None  # of the checkpoint that this train() resumes from
        self._training = False  # inside of train()
        self._figures = LoggedFigures()
        trainer.add_callback(self)
        for name in ("evaluate", "predict", "save_model"):
            wrap(trainer, name, self.shared)
        wrap(trainer, "create_optimizer", self.creating)
        wrap(trainer, "train", self.training)
        wrap(trainer, "log", self.logging)

    # -- contexts around the Trainer's methods ----------------------------------------------------------------------

    @contextmanager
    def training(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Record, inside, that ``train()`` has been called, and which checkpoint it resumes from."""
        last = resume_from_checkpoint is True
        folder: Any = _last_checkpoint(self._trainer.args.output_dir) if last else resume_from_checkpoint
        self._folder, self._training = folder or None, True
        try:
            yield
        finally:
            self._folder, self._training = None, False

    @contextmanager
    def creating(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Make one optimizer, afterwards, of a list: a Trainer knows one, which it prepares, schedules and saves."""
        yield
        given: Any = self._trainer.optimizer
        if isinstance(given, (list, tuple)):
            model: Any = self._trainer.model
            self._trainer.optimizer = inner_of(given, model.named_parameters())

    @contextmanager
    def shared(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Show, inside, the parameters that all ranks have in common; after ``train()`` the script's own."""
        with self.compressed.shared() if self.compressed is not None and self._training else nullcontext():
            yield

    @contextmanager
    def logging(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Iterator[None]:
        """Add to ``logs`` of a training step what is sent, and how much less than by DDP."""
        if self.compressed is not None and "loss" in logs:
            logs |= self._figures.of(self.compressed)
        yield


def wrap(holder: Any, name: str, around: Callable[..., AbstractContextManager[None]]) -> None:
    """Wrap ``holder``'s method ``name`` in ``around(...)``, which gets the method's arguments."""
    method = getattr(holder, name)

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs):
            return method(*args, **kwargs)

    setattr(holder, name, inside)


def refuse(trainer: Trainer) -> None:
    """Raise ``ValueError`` where anything but plain data parallel, in one process a GPU, exchanges gradients."""
    given: Any = trainer.optimizer
    known = [*given] if isinstance(given, (list, tuple)) else [given, getattr(given, "optimizer", given)]
    if any(isinstance(optimizer, OptimizerWrapper) for optimizer in known):
        raise ValueError(
            "the Trainer's optimizer is an agmerge.DistributedOptimizer, so gradients would be exchanged twice. Use "
            "the plain optimizer."
        )
    if trainer.is_deepspeed_enabled:
        raise ValueError("DeepSpeed averages gradients in its own engine. Train without it, in plain data parallel.")
    if trainer.is_fsdp_enabled:
        raise ValueError(
            "FSDP averages gradients of shards itself. Train without it, in plain data parallel, or write the loop "
            "yourself with fully_shard() within a node and agmerge.DistributedOptimizer between nodes "
            "(docs/with_fsdp2.md)."
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            "one process uses several GPUs with DataParallel, which agmerge does not support. Start one process for "
            "each GPU with torchrun --nproc_per_node."
        )
