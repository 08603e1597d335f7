# SPDX-License-Identifier: Apache-2.0
"""Compress the exchanges of a ``transformers.Trainer``, or of a subclass::

    trainer = Trainer(model=model, args=args, train_dataset=data)
    agmerge.integrations.transformers.compress(trainer)
    trainer.train()

The optimizer stays plain; where ``Trainer(optimizers=([muon, adamw], None))`` gives a list they step as one, in order.
Accumulation, clipping, bf16, gradient checkpointing and evaluation need nothing: they act on the
``DistributedDataParallel`` that the Trainer makes, as :mod:`agmerge.integrations.ddp` does. Every rank keeps a file
beside each checkpoint of the Trainer, and ``train(resume_from_checkpoint=...)`` reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, trainer_utils
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from agmerge.engine.optimizer_group import inner_of
from agmerge.engine.optimizer_wrapper import OptimizerWrapper
from agmerge.integrations import ddp, files
from agmerge.options.typed import DDPOptions
from agmerge.step.updates import UPDATES

if TYPE_CHECKING:
    from typing import Unpack

_last_checkpoint: Callable[..., str | None] = trainer_utils.get_last_checkpoint  # which has no annotations


def compress(trainer: Trainer, **options: Unpack[DDPOptions]) -> Compression:
    """Make ``trainer`` exchange its gradients, or updates, compressed, in every ``train()`` from now on.

    ``options``: of :func:`agmerge.integrations.ddp.compress`, ``scaler`` and ``optimizer`` excepted: they are the
    Trainer's. With ``sync="updates"`` the Trainer evaluates, predicts and saves with the parameters that all ranks have
    in common, and at the end of ``train()`` all ranks have the same. Returns the object with the statistics, a callback
    of the trainer. One process warns, and trains as it is.

    Raises ``ValueError``, here or in ``train()``, for DeepSpeed, FSDP, ``DataParallel``, hyperparameter search, and an
    optimizer that is distributed itself.
    """
    for name in ("optimizer", "scaler"):
        if name in options:
            raise ValueError(f"{name}= is the Trainer's own: leave it out")
    _refuse(trainer)
    compression = Compression(trainer, {**options})
    trainer.add_callback(compression)
    for name in ("evaluate", "predict", "save_model"):
        _wrap(trainer, name, compression.shared)
    _wrap(trainer, "create_optimizer", compression.creating)
    _wrap(trainer, "train", compression.training)
    _wrap(trainer, "log", compression.logging)
    return compression


class Compression(TrainerCallback):
    """Callback that compresses the gradients of a Trainer once its model is in ``DistributedDataParallel``.

    ``compressed`` has the statistics: ``compressed.stats()``.
    """

    def __init__(self, trainer: Trainer, options: dict[str, Any]) -> None:
        self.compressed: ddp.Compressed | None = None  # None before the first train(), and in one process
        self._trainer, self._options = trainer, options
        self._model: torch.nn.Module | None = None  # that `compressed` is of
        self._folder: str | None = None  # of the checkpoint that this train() resumes from
        self._training = False  # inside of train()

    # -- calls of the Trainer ---------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collective. Compress the model that is trained, and load ranks' own states if it resumes."""
        _refuse(self._trainer)
        if state.is_hyper_param_search:
            raise ValueError("hyperparameter_search() is not supported: compress the Trainer of one training")
        model = getattr(self._trainer.model_wrapped, "_orig_mod", self._trainer.model_wrapped)
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            files.warn_alone("transformers' Trainer")
            return
        if model is not self._model:
            if self.compressed is not None:
                self.compressed.close()
            self.compressed = self._model = None  # of a DDP that may be gone: nothing must hold it
            prepared: Any = self._trainer.optimizer  # around the plain one
            scaler = self._trainer.accelerator.scaler
            self.compressed = ddp.compress(model, optimizer=prepared.optimizer, scaler=scaler, **self._options)
            self._model = model
        assert self.compressed is not None
        if self._folder is not None:
            files.load(self.compressed, self._folder)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Collective. Write this rank's file into the checkpoint."""
        if self.compressed is not None and not args.save_only_model:
            files.save(self.compressed, Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collective. Give all ranks the same parameters, where updates are exchanged."""
        if self.compressed is None:
            return
        loaded_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if loaded_best and self._options.get("sync") == UPDATES:
            files.restart(self.compressed)  # all ranks have it, and residuals are of other parameters
        else:
            self.compressed.consolidate()

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
        """Add to ``logs`` of a training step the density so far, and the bytes that this rank has sent."""
        if self.compressed is not None and "loss" in logs:
            stats = self.compressed.stats()
            logs |= {"agmerge/density": stats["density"], "agmerge/bytes_sent": stats["bytes_sent"]}
        yield


def _wrap(trainer: Trainer, name: str, around: Callable[..., AbstractContextManager[None]]) -> None:
    """Wrap ``trainer``'s method ``name`` in ``around(...)``, which gets the method's arguments."""
    method = getattr(trainer, name)

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs):
            return method(*args, **kwargs)

    setattr(trainer, name, inside)


def _refuse(trainer: Trainer) -> None:
    """Raise ``ValueError`` where anything but ``DistributedDataParallel`` exchanges gradients."""
    given: Any = trainer.optimizer
    known = [*given] if isinstance(given, (list, tuple)) else [given, getattr(given, "optimizer", given)]
    if any(isinstance(optimizer, OptimizerWrapper) for optimizer in known):
        raise ValueError(
            "the Trainer's optimizer is an agmerge.DistributedOptimizer, and compress() exchanges gradients too: leave "
            "the optimizer plain"
        )
    if trainer.is_deepspeed_enabled:
        raise ValueError("DeepSpeed averages gradients in its own engine: train without it, in plain data parallel")
    if trainer.is_fsdp_enabled:
        raise ValueError(
            "FSDP averages gradients of shards by itself. Train without it, in plain data parallel; or write the loop "
            "yourself with fully_shard() within a node and agmerge.DistributedOptimizer among nodes "
            "(docs/frameworks.md)"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            "one process has several GPUs and uses DataParallel, which exchanges nothing: start one process a GPU with "
            "torchrun --nproc_per_node"
        )
