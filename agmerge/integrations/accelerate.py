# SPDX-License-Identifier: Apache-2.0
"""Compressed exchanges of a model that ``accelerate.Accelerator`` has prepared::

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    agmerge.integrations.accelerate.compress(accelerator, model)

The optimizer stays plain; of several, all are taken. ``accumulate()``, ``clip_grad_norm_()``, ``bf16``
and a scaler need nothing. A rank that keeps something of its own writes a file beside those of ``save_state()``, and
``load_state()`` reads it. By default no rank does, and ``save_state()`` may be called on the main process alone.
Trackers get what is sent beside the script's own values, in each ``log()``.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType

from agmerge.engine.gradient_clipping import clipping_as_mean
from agmerge.engine.optimizer_wrapper import OptimizerWrapper
from agmerge.integrations import ddp, files
from agmerge.integrations.logged import LoggedFigures
from agmerge.optimizer import DistributedOptimizer
from agmerge.options.typed import DDPOptions
from agmerge.runtime import workers
from agmerge.step.config import UPDATES

if TYPE_CHECKING:
    from typing import Unpack

# In an elastic job: the Accelerator of one process accumulates, clips and steps as it does alone. Gradients of the last
# backward pass of a step travel, and are combined before they are clipped.

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

    accelerator.clip_grad_norm_ = clipping_as_mean(accelerator.clip_grad_norm_, lambda: distributed._reducer)
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


# ``compress``.

_OWN_ENGINES = {
    DistributedType.DEEPSPEED: "DeepSpeed averages gradients in its own engine",
    DistributedType.FSDP: "FSDP averages gradients of shards itself",
    DistributedType.MEGATRON_LM: "Megatron-LM averages gradients in its own engine",
    DistributedType.XLA: "XLA averages gradients in its own programs",
}


def compress(
    accelerator: Accelerator, model: torch.nn.Module, **options: Unpack[DDPOptions]
) -> ddp.Compressed | ElasticOptimizer | None:
    """Collective. Compress what a model that an ``Accelerator`` has prepared exchanges, from the next step on.

    With ``sync="updates"`` the model is evaluated in ``eval()`` mode and saved with the parameters that all ranks
    share. After ``end_training()`` all ranks have them.

    Args:
        accelerator (accelerate.Accelerator): The accelerator.
        model (torch.nn.Module): The model that ``accelerator.prepare()`` has returned, with its optimizer.
        **options: Options of :func:`agmerge.integrations.ddp.compress`, except ``optimizer`` and ``scaler``, which are
            the accelerator's.

    Returns:
        An object with ``stats()`` and other methods, see :class:`agmerge.integrations.ddp.Compressed`. With one process
        None, with a warning.

    Raises:
        ValueError: For FSDP, DeepSpeed, Megatron-LM and XLA, for an optimizer that is already distributed, and as
            :func:`agmerge.integrations.ddp.compress` does.
    """
    for name in ("optimizer", "scaler"):
        if name in options:
            raise ValueError(
                f"{name}= is not supported: compress() uses the objects that the accelerator prepared. Remove it."
            )
    if accelerator.distributed_type in _OWN_ENGINES:
        raise ValueError(
            f"{_OWN_ENGINES[accelerator.distributed_type]}. Use plain data parallel, `accelerate launch --multi_gpu` "
            "(docs/with_accelerate.md)."
        )
    if workers.can_regroup():
        return _elastic(accelerator, model, {**options})
    if accelerator.distributed_type == DistributedType.NO:
        files.warn_alone("Accelerator(cpu=True), or ACCELERATE_USE_CPU=true in the environment")
        return None
    inner: Any = getattr(model, "_orig_mod", model)  # of a compiled model
    numbers = [
        number for number, prepared in enumerate(accelerator._models) if prepared is accelerator.unwrap_model(model)
    ]
    if not numbers:
        raise ValueError(
            "this accelerator has not prepared the model. Pass the model that accelerator.prepare() returned."
        )
    optimizers, are_updates = _optimizers_of(accelerator, inner), options.get("sync") == UPDATES
    if are_updates and not optimizers:
        raise ValueError(
            "sync='updates' requires an optimizer of the model's parameters that this accelerator prepared. Prepare "
            "the model together with its optimizer."
        )
    compressed = ddp.compress(inner, optimizer=optimizers or None, scaler=accelerator.scaler, **options)
    if are_updates:
        accelerator.clip_grad_norm_ = clipping_as_mean(accelerator.clip_grad_norm_, lambda: compressed._reducer)
    _keep_in_checkpoints(accelerator, numbers[-1], compressed, are_updates=are_updates)
    _add_to_log(accelerator, numbers[-1], compressed)
    return compressed


def _add_to_log(accelerator: Accelerator, number: int, compressed: ddp.Compressed | ElasticOptimizer) -> None:
    """Make ``accelerator.log()`` add what is sent for the prepared model ``number``, and how much less than by DDP."""
    log, logged = accelerator.log, LoggedFigures()
    prefix = f"agmerge_{number}/" if number else "agmerge/"  # as Accelerate numbers models

    @functools.wraps(log)
    def add(values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        figures = logged.of(compressed) if accelerator.trackers else {}
        log(
            {**values, **{name.replace("agmerge/", prefix): figure for name, figure in figures.items()}},
            *args,
            **kwargs,
        )

    accelerator.log = add


def _elastic(accelerator: Accelerator, model: torch.nn.Module, options: dict[str, Any]) -> ElasticOptimizer:
    """Distribute the one optimizer that ``accelerator`` has prepared for ``model``, in an elastic job."""
    check_elastic(accelerator)
    inner: Any = getattr(model, "_orig_mod", model)  # of a compiled model
    plain = _optimizers_of(accelerator, inner)
    if len(plain) != 1:
        raise ValueError(
            f"AGM309: This accelerator prepared {len(plain)} optimizers of the model's parameters, but an elastic job "
            "supports one. Prepare the model with one optimizer, or write the loop without Accelerate."
        )
    prepared = next(one for one in accelerator._optimizers if one.optimizer is plain[0])
    prepared.optimizer = distributed = distribute_elastic(accelerator, plain[0], inner, options)
    _add_to_log(accelerator, 0, distributed)
    return distributed


def _optimizers_of(accelerator: Accelerator, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the plain optimizers of ``model``'s parameters, in the order in which they were prepared."""
    parameters = {id(parameter) for parameter in model.parameters()}
    found = [
        prepared.optimizer
        for prepared in accelerator._optimizers
        if any(id(p) in parameters for group in prepared.param_groups for p in group["params"])
    ]
    if any(isinstance(optimizer, OptimizerWrapper) for optimizer in found):
        raise ValueError(
            "the model's optimizer is an agmerge.DistributedOptimizer, so gradients would be exchanged twice. Prepare "
            "the plain optimizer."
        )
    return found


def _keep_in_checkpoints(
    accelerator: Accelerator, number: int, compressed: ddp.Compressed, *, are_updates: bool
) -> None:
    """Make ``save_state()`` and ``load_state()`` save and load the ranks' own states of the prepared model ``number``.

    Both tell hooks the folder. Ranks' own states are written, and loaded, after what Accelerate writes and loads: with
    ``sync="updates"`` they set parameters and the optimizer's state to those of this rank. The script's own hooks may
    take models and weights off the lists that all hooks get, so nothing here looks into these.
    """
    noted: list[str] = []  # the folder that is saved to, or loaded from

    def files_in(folder: str) -> str:
        return os.path.join(folder, f"agmerge_{number}") if number else folder  # as Accelerate numbers models

    def note(*given: Any) -> None:
        noted[:] = [given[-1]]

    save_state, load_state = accelerator.save_state, accelerator.load_state

    @functools.wraps(save_state)
    def save(*args: Any, **kwargs: Any) -> Any:
        with compressed.shared():  # also for hooks of the script that write the model themselves
            saved = save_state(*args, **kwargs)
        files.save(compressed, files_in(noted.pop()), makes_folder=True, is_common=True)
        return saved

    @functools.wraps(load_state)
    def load(*args: Any, **kwargs: Any) -> None:
        load_state(*args, **kwargs)
        files.load(compressed, files_in(noted.pop()))

    accelerator.register_save_state_pre_hook(note)
    accelerator.register_load_state_pre_hook(note)
    accelerator.save_state, accelerator.load_state = save, load
    if not are_updates:
        return
    get_state_dict, end_training = accelerator.get_state_dict, accelerator.end_training

    @functools.wraps(get_state_dict)
    def get(*args: Any, **kwargs: Any) -> Any:
        with compressed.shared():  # as save_model() and save_state() want it, in training mode too
            return copy.deepcopy(get_state_dict(*args, **kwargs))

    @functools.wraps(end_training)
    def end() -> None:
        compressed.consolidate()
        end_training()

    accelerator.get_state_dict, accelerator.end_training = get, end
