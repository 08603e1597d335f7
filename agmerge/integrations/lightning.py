# SPDX-License-Identifier: Apache-2.0
"""Compress the exchanges of a ``lightning.Trainer``::

    strategy = CompressedDDPStrategy()
    trainer = Trainer(devices=2, accelerator="cpu", strategy=strategy)

``strategy="ddp_agmerge"`` is the same by default. The optimizer stays plain. Accumulation, clipping, precision and
manual optimization need nothing. A rank that keeps something of its own writes a file into a folder beside each
checkpoint, ``x.ckpt.agmerge/``, and ``fit(ckpt_path="x.ckpt")`` reads it. By default rank 0 alone has one.

This works with the package that the script has imported, ``lightning`` or ``pytorch_lightning``.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from agmerge.engine.gradient_clipping import begin_clipping
from agmerge.engine.optimizer_wrapper import OptimizerWrapper
from agmerge.integrations import ddp, files
from agmerge.integrations.logged import LoggedFigures
from agmerge.options.typed import Options, StrategyOptions
from agmerge.step.config import UPDATES

if TYPE_CHECKING:
    from typing import Unpack

if TYPE_CHECKING or "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
else:  # the two are copies, and a Trainer takes strategies of its own package alone
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

Where = str | Path

_OPTIONS = {field.name for field in fields(Options)}


class CompressedDDPStrategy(DDPStrategy):
    """Train in ``DistributedDataParallel`` with compressed messages: a strategy for ``lightning.Trainer``.

    ``strategy="ddp_agmerge"`` is the same with default options. With ``sync="updates"`` Lightning validates and saves
    with the parameters that all ranks share, and after ``fit()`` all ranks have them. ``strategy.compressed.stats()``
    has statistics.

    Args:
        **options: Options of :func:`agmerge.integrations.ddp.compress`, except ``optimizer`` and ``scaler``, which are
            the Trainer's. All others are options of Lightning's ``DDPStrategy``.

    Raises:
        ValueError: For ``ddp_comm_hook=`` and its options, because this strategy needs the hook, and for ``optimizer=``
            or ``scaler=``.
    """

    def __init__(self, **options: Unpack[StrategyOptions]) -> None:
        given: dict[str, Any] = {**options}
        for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"):
            if given.get(name) is not None:
                raise ValueError(
                    f"{name}= is not supported: DDP has one communication hook, which this strategy uses. Remove it."
                )
        for name in ("optimizer", "scaler"):
            if name in given:
                raise ValueError(f"{name}= is not supported: the Trainer sets it. Remove it.")
        # A timeout= of Lightning's is a timedelta, of the process group; one of ours is in seconds.
        theirs = {"timeout"} if isinstance(given.get("timeout"), timedelta) else set()
        own = {name: given.pop(name) for name in (_OPTIONS - theirs) & given.keys()}
        super().__init__(**given)
        self.compressed: ddp.Compressed | None = None  # of the last fit(); None before there was one
        self._figures = _Figures()
        self._fitting = False  # and the model is in DDP
        self._clips_through: Any = None  # the precision plugin that clips by the norm of the averaged gradient
        self._options = own
        self._loading: Where | None = None  # the checkpoint that this fit() resumes from
        self._evaluating = ExitStack()  # inside, parameters are those that all ranks have in common

    def setup_optimizers(self, trainer: Any) -> None:
        """Collective. Make optimizers and schedulers, and compress: the model is in DDP by now."""
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, OptimizerWrapper) for optimizer in self.optimizers):
            raise ValueError(
                "configure_optimizers() returns an agmerge.DistributedOptimizer, so gradients would be exchanged "
                "twice. Return the plain optimizer."
            )
        if self._options.get("sync") == UPDATES and not self.optimizers:
            raise ValueError(
                "sync='updates' requires an optimizer, but configure_optimizers() returns none. Return one."
            )
        scaler = getattr(self.precision_plugin, "scaler", None)
        if self._options.get("sync") == UPDATES and scaler is not None and trainer.gradient_clip_val:
            raise ValueError(
                "gradient_clip_val is not supported with fp16 and sync='updates', because Lightning would skip "
                "clipping. Use precision='bf16-mixed', or remove gradient_clip_val."
            )
        if self.compressed is not None:
            self.compressed.close()  # of another fit()
        assert isinstance(self.model, DistributedDataParallel)
        optimizers = self.optimizers or None
        self.compressed = ddp.compress(self.model, optimizer=optimizers, scaler=scaler, **self._options)
        self._fitting = True
        self._clip_as_mean()
        if self._figures not in trainer.callbacks:
            trainer.callbacks.append(self._figures)

    def _clip_as_mean(self) -> None:
        """Make ``gradient_clip_val`` bound the norm of the averaged gradient, where updates are exchanged."""
        plugin: Any = self.precision_plugin
        if self._options.get("sync") != UPDATES or plugin is self._clips_through:
            return
        clip = plugin.clip_grad_by_norm

        @functools.wraps(clip)
        def clipped(optimizer: Any, clip_val: float) -> None:
            assert self.compressed is not None
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            clip(optimizer, clip_val / begin_clipping(self.compressed._reducer, parameters))

        plugin.clip_grad_by_norm = clipped
        self._clips_through = plugin

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Stop DDP from averaging where updates are exchanged: manual optimisation asks it to, after every forward."""
        if self._options.get("sync") == UPDATES and isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = False
        super().pre_backward(closure_loss)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state, with the parameters that all ranks have in common."""
        if self._options.get("sync") != UPDATES:
            return super().lightning_module_state_dict()
        with self._shared():
            return copy.deepcopy(super().lightning_module_state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Where, storage_options: Any = None) -> None:
        """Collective. Save the checkpoint on rank 0, then every rank's state beside it.

        Ranks communicate only with ``overlap=``. Raises ``ValueError`` for a path that is neither local nor mounted, if
        ranks keep something of their own.
        """
        compressed = self.compressed if "optimizer_states" in checkpoint else None
        folder = _folder(filepath, self._keeps_back)
        if folder is not None:  # files of an older checkpoint of this name: if this process ends now, they are no match
            if compressed is not None:
                files.forget(compressed, folder)
            elif self.is_global_zero:
                files.remove(folder)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if compressed is not None and folder is not None:
            files.save(compressed, folder, makes_folder=True, flushes=True, is_common=True)

    def remove_checkpoint(self, filepath: Where) -> None:
        """Remove the checkpoint, and the files of all ranks."""
        super().remove_checkpoint(filepath)
        folder = _folder(filepath, self._keeps_back)
        if self.is_global_zero and folder is not None:
            files.remove(folder)

    def load_checkpoint(self, checkpoint_path: Where, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the checkpoint, and note where it is: ranks' own states are loaded once there are optimizers."""
        self._loading = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective. Load the optimizers, then ranks' own states beside the checkpoint."""
        super().load_optimizer_state_dict(checkpoint)
        if self.compressed is not None and self._loading is not None:
            folder = _folder(self._loading, self._keeps_back)
            if folder is not None:
                files.load(self.compressed, folder)

    # -- evaluation, and the end ------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Put the parameters in place that all ranks have in common."""
        super().on_validation_start()
        self._evaluating.enter_context(self._shared())

    def on_validation_end(self) -> None:
        """Go on with this rank's own parameters."""
        self._evaluating.close()
        super().on_validation_end()

    def on_train_end(self) -> None:
        """Collective. Give all ranks the same parameters, where updates are exchanged."""
        super().on_train_end()
        if self.compressed is not None:
            self.compressed.consolidate()

    def teardown(self) -> None:
        """End ``fit()``. Residuals stay, for a checkpoint that is saved afterwards."""
        self._evaluating.close()
        self._fitting = False
        super().teardown()

    @property
    def _keeps_back(self) -> bool:
        """Return whether ranks keep something of their own."""
        return self.compressed is not None and files.keeps_back(self.compressed)

    def _shared(self) -> AbstractContextManager[None]:
        """Return a context with the parameters that all ranks have in common; after ``fit()`` with the script's own."""
        return self.compressed.shared() if self.compressed is not None and self._fitting else nullcontext()


class _Figures(Callback):
    """Callback that gives the Trainer's loggers what is sent, when they get what the script logs."""

    def __init__(self) -> None:
        self._figures = LoggedFigures()

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Log the figures of the steps since the last ones, every ``log_every_n_steps``."""
        if not trainer.loggers or not trainer._logger_connector.should_update_logs:
            return
        figures, step = self._figures.of(trainer.strategy.compressed), trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)


def _folder(checkpoint: Where, keeps_back: bool) -> str | None:
    """Return the folder of ranks' files beside a checkpoint; of a link, beside its target.

    None beside a remote one, of a training that keeps nothing back; else raises ``ValueError`` for that.
    """
    path = os.fspath(checkpoint)
    if "://" in path:
        if not keeps_back:
            return None
        raise ValueError(f"{path}: residuals must be saved to a local or mounted folder. Pass such a path.")
    return f"{os.path.realpath(path)}.agmerge"


StrategyRegistry.register("ddp_agmerge", CompressedDDPStrategy, description="DDP with compressed messages (agmerge)")
