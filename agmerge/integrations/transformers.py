# SPDX-License-Identifier: Apache-2.0
"""Compress the exchanges of a ``transformers.Trainer``, or of a subclass::

    trainer = Trainer(model=model, args=args, train_dataset=data)
    agmerge.integrations.transformers.compress(trainer)
    trainer.train()

The optimizer stays plain; where ``Trainer(optimizers=([muon, adamw], None))`` gives a list they step as one, in order.
Accumulation, clipping, bf16, gradient checkpointing and evaluation need nothing: they act on the
``DistributedDataParallel`` that the Trainer makes, as :mod:`agmerge.integrations.ddp` does. Ranks keep files
beside each checkpoint of the Trainer, and ``train(resume_from_checkpoint=...)`` reads them; by default rank 0 alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from agmerge.engine.gradient_clipping import clipping_as_mean
from agmerge.integrations import ddp, files, transformers_exchange
from agmerge.integrations.transformers_elastic import ElasticTraining
from agmerge.integrations.transformers_exchange import TrainerExchange
from agmerge.options.typed import DDPOptions
from agmerge.runtime import workers
from agmerge.step.config import UPDATES

if TYPE_CHECKING:
    from typing import Unpack

TOO_EARLY = "AGM309: A Trainer in an elastic job requires agmerge.init(elastic=True) before compress(). Call it first."


def compress(trainer: Trainer, **options: Unpack[DDPOptions]) -> Compression | ElasticTraining:
    """Compress what a Hugging Face ``Trainer`` exchanges, in every ``train()`` from now on.

    With ``sync="updates"`` the Trainer evaluates, predicts and saves with the parameters that all ranks share. With one
    process it logs a warning and trains without compression. After ``agmerge.init(elastic=True)`` workers can fail and
    join (docs/elastic.md).

    Args:
        trainer (transformers.Trainer): The Trainer, or an instance of a subclass, before ``train()``.
        **options: Options of :func:`agmerge.integrations.ddp.compress`, except ``optimizer`` and ``scaler``, which are
            the Trainer's.

    Returns:
        A callback of the Trainer. After ``train()`` has begun, ``callback.compressed.stats()`` has statistics.

    Raises:
        ValueError: For DeepSpeed, FSDP, ``DataParallel``, hyperparameter search, or an optimizer that is already
            distributed, here or in ``train()``.
    """
    for name in ("optimizer", "scaler"):
        if name in options:
            raise ValueError(f"{name}= is not supported: the Trainer sets it. Remove it.")
    transformers_exchange.refuse(trainer)
    return (ElasticTraining if workers.can_regroup() else Compression)(trainer, {**options})


class Compression(TrainerExchange):
    """Callback that compresses the gradients of a Trainer once its model is in ``DistributedDataParallel``.

    ``compressed`` has the statistics: ``compressed.stats()``. It is None before the first ``train()``, and with one
    process.
    """

    compressed: ddp.Compressed | None

    def __init__(self, trainer: Trainer, options: dict[str, Any]) -> None:
        super().__init__(trainer, options)
        self._model: torch.nn.Module | None = None  # that `compressed` is of
        self._clips_through: Any = None  # the Accelerator that clips by the norm of the averaged gradient

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collective. Compress the model that is trained, and load ranks' own states if it resumes."""
        transformers_exchange.refuse(self._trainer)
        if state.is_hyper_param_search:
            raise ValueError("hyperparameter_search() is not supported. Compress the Trainer of a single training.")
        model = getattr(self._trainer.model_wrapped, "_orig_mod", self._trainer.model_wrapped)
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            if workers.can_regroup():
                raise ValueError(TOO_EARLY)
            files.warn_alone("TrainingArguments(use_cpu=True)")
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
        self._clip_as_mean()
        if self._folder is not None:
            files.load(self.compressed, self._folder)

    def _clip_as_mean(self) -> None:
        """Make ``max_grad_norm`` bound the norm of the averaged gradient, where updates are exchanged."""
        accelerator = self._trainer.accelerator
        if self._options.get("sync") != UPDATES or accelerator is self._clips_through:
            return
        accelerator.clip_grad_norm_ = clipping_as_mean(
            accelerator.clip_grad_norm_, lambda: None if self.compressed is None else self.compressed._reducer
        )
        self._clips_through = accelerator

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Collective. Write this rank's file into the checkpoint; ranks communicate only with ``overlap=``."""
        if self.compressed is not None and not args.save_only_model:
            folder = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            files.save(self.compressed, folder, flushes=True)

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
