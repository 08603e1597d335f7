# SPDX-License-Identifier: Apache-2.0
"""Training by a ``transformers.Trainer`` in a job with workers that die and come (docs/elastic.md).

Every worker has a Trainer of one process. Its optimizer is distributed, samples are dealt out among the workers that
there are, and newcomers are let in between two steps, with the place that the others' Trainers have reached.
"""

from __future__ import annotations

import functools
import itertools
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import RandomSampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from agmerge.checkpoint.elastic import Sampler, State
from agmerge.integrations import accelerate
from agmerge.integrations.transformers_exchange import TrainerExchange
from agmerge.runtime import workers
from agmerge.runtime.broadcast import broadcast_parameters
from agmerge.runtime.collectives.objects import broadcast_object

# Decisions from evaluations, made the same on all workers.
#
# Each worker evaluates, with the oldest one's buffers, and takes the oldest one's metrics: machines of another kind
# compute other ones, and early stopping would stop some workers and not others. The oldest saves, and the others wait
# until the checkpoint is there: they may be asked for the best one. All that survives the death of any worker: the next
# oldest does it then.
#
# Only the Trainer's own evaluations at the end of a step count, which all workers make, and what is saved with them.
# Others, such as those of a callback or of the script, are each worker's own.

T = TypeVar("T")


class Together(Protocol):
    """Collective. Function that calls another one; survivors call that again, where a worker is lost in it."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Return the result of ``function()``."""


class Decisions(TrainerCallback):
    """First callback of a Trainer: those that decide come after it, and get the oldest worker's metrics."""

    def __init__(self, trainer: Trainer, together: Together) -> None:
        self._trainer, self._together = trainer, together
        self._decides = False  # all workers are at the end of a step
        self._has_evaluated = False  # there
        trainer.callback_handler.callbacks.insert(0, self)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Collective. Decide inside, at the end of a step, as the others do."""
        if self._trainer.control.should_evaluate:
            self._share_buffers()
        self._decides, self._has_evaluated = True, False
        try:
            yield
        finally:
            self._decides = self._has_evaluated = False

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Collective. Take the oldest worker's metrics in place of the own ones, and whether it saves."""
        if not self._decides or metrics is None:
            return

        def evaluated() -> tuple[dict[str, float], bool]:
            decides: tuple[dict[str, float], bool] = broadcast_object(({**metrics}, control.should_save))
            return decides

        first, control.should_save = self._together(evaluated)
        logged = state.log_history[-1] if state.log_history else {}
        if logged.get("step") == state.global_step:  # which a later oldest worker saves
            logged.update({name: value for name, value in first.items() if name in logged})
        metrics.clear()
        metrics.update(first)
        self._has_evaluated = True

    def saving(self, save: Callable[..., None]) -> Callable[..., None]:
        """Return ``save``; after an evaluation it returns when the oldest worker has saved, with its best one."""

        def saved(*args: Any, **kwargs: Any) -> None:
            """Collective."""
            if not (self._decides and self._has_evaluated):
                save(*args, **kwargs)
                return
            state, is_there = self._trainer.state, False

            def save_first() -> str | None:
                nonlocal is_there
                if workers.rank() == 0 and not is_there:
                    save(*args, **kwargs)
                    is_there = True
                best: str | None = broadcast_object(state.best_model_checkpoint)
                return best

            state.best_model_checkpoint = self._together(save_first)

        return saved

    def _share_buffers(self) -> None:
        """Collective. Give all workers the oldest one's buffers, such as the statistics of BatchNorm.

        As DistributedDataParallel does, unless ``ddp_broadcast_buffers=False``: what is evaluated is what is saved.
        Buffers that are not saved are constants.
        """
        model: Any = self._trainer.model
        saved = model.state_dict().keys()
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
        if buffers and self._trainer.args.ddp_broadcast_buffers is not False:
            self._together(lambda: broadcast_parameters(buffers))


# Training with the other workers.

# Of a TrainerState: what a newcomer is handed.
CARRIED = (
    "global_step", "log_history", "best_metric", "best_global_step", "best_model_checkpoint", "num_input_tokens_seen",
)  # fmt: skip
SAMPLES = "agmerge_samples.json"  # in a checkpoint: the place in the data
NEEDS_STEPS = (
    "AGM309: An elastic job requires TrainingArguments(max_steps=...), because the number of steps per epoch depends "
    "on the number of workers. Set the same value on all workers."
)
OWN_SAMPLES = (
    "AGM309: {what} is not supported in an elastic job, whose workers share samples of a data set with a length, in "
    "random or sequential order. Remove it, or write the loop yourself. See docs/elastic.md."
)


class ElasticTraining(TrainerExchange):
    """Callback that makes a Trainer train with the other workers of an elastic job.

    ``compressed`` is the distributed optimizer, which has ``stats()``. It is None before ``train()``. Rank 0 logs and
    saves. All ranks evaluate, and use its metrics. ``has_left`` is True if this worker has left by :meth:`leave`: then
    ``train()`` returns, the others continue, and agmerge is shut down here.
    """

    has_left = False

    compressed: accelerate.ElasticOptimizer | None

    def __init__(self, trainer: Trainer, options: dict[str, Any]) -> None:
        accelerate.check_elastic(trainer.accelerator)
        if trainer.args.max_steps <= 0:
            raise ValueError(NEEDS_STEPS)
        super().__init__(trainer, options)
        self._state: State | None = None  # None: this worker does not train yet, or no more
        self._sampler: Sampler | None = None
        self._place = Place(trainer)
        self._ends_step = False  # a step that all workers make, and its evaluation comes
        self._decisions = Decisions(trainer, self._together)
        trainer.args.ignore_data_skip = True  # a resumed training finds its place in the data by the sampler
        own: Any = trainer
        own._get_train_sampler = self._sampled(trainer._get_train_sampler)
        own._maybe_log_save_evaluate = self._ending(own._maybe_log_save_evaluate)
        own._save_checkpoint = self._saving(own._save_checkpoint)

    def leave(self) -> None:
        """Announce that this worker leaves after its next step, for example from a signal handler.

        ``train()`` returns after that step. If the worker is not training, it ends at once, by ``SystemExit``.
        """
        if self._state is None:
            raise SystemExit(128 + signal.SIGTERM)
        self._state.leave()

    # -- calls of the Trainer ---------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collective. Meet the others; a newcomer goes on from where they are."""
        trainer = self._trainer
        if self._sampler is None:
            raise ValueError(OWN_SAMPLES.format(what="an IterableDataset, or an overridden get_train_dataloader(),"))
        saved = Path(self._folder or ".", SAMPLES)
        if self._folder and saved.exists():
            self._sampler.load_state_dict(json.loads(saved.read_text(encoding="utf-8")))
        assert isinstance(trainer.model, torch.nn.Module)
        self._place.begin(self._sampler.epoch)
        before = state.global_step
        self._state = State(
            model=trainer.model, optimizer=self.compressed, scheduler=trainer.lr_scheduler, sampler=self._sampler,
            place=self._place,
        )  # fmt: skip
        self.has_left = self._ends_step = False
        self._tell(state, workers.rank())
        if state.global_step != before:
            args.eval_on_start = False  # by a newcomer alone: the others' early stopping would not count it

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Collective. Go on with the workers that there are, without those that leave."""
        assert self._state is not None and self._sampler is not None
        before = workers.size()
        if self._state._end_step():
            state.epoch = self._sampler.passes
            self._tell(state, workers.rank())
            if self._place.is_past(self._sampler.epoch) or control.should_training_stop:
                DefaultFlowCallback().on_epoch_end(args, state, control)
            self._ends_step = True
            return
        control.should_training_stop, control.should_save, control.should_evaluate = True, False, False
        self._state, self.has_left = None, True
        self._tell(state, 1)  # the first of those that stay logs and saves
        others = "the others go on" if before > 1 else "it was the last one"
        sys.stderr.write(f"agmerge: this worker leaves its job after step {state.global_step}, as told: {others}\n")

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do nothing: Trainers count epochs of their own; at ends of the data's :meth:`on_step_end` acts."""
        control.should_log = control.should_evaluate = control.should_save = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collective. Give all workers the same parameters, where updates are exchanged."""
        has_loaded_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if self._state is not None and self.compressed is not None and not has_loaded_best:  # else all have these
            self.compressed.consolidate()
        self._state = None

    # -- around the Trainer's methods -------------------------------------------------------------------------------

    @contextmanager
    def creating(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Distribute the optimizer afterwards, unless it is that already."""
        with super().creating(*args, **kwargs):
            yield
        trainer: Any = self._trainer
        if self.compressed is None:
            self.compressed = trainer.optimizer = accelerate.distribute_elastic(
                trainer.accelerator, trainer.optimizer, trainer.model, self._options
            )

    def _ending(self, method: Callable[..., None]) -> Callable[..., None]:
        """Return ``method``, which logs, evaluates and saves, as it is called between two steps of all workers."""

        @functools.wraps(method)
        def ending(*args: Any, **kwargs: Any) -> None:
            """Collective."""
            if not self._ends_step:
                method(*args, **kwargs)
                return
            self._ends_step, trainer = False, self._trainer
            with self._decisions.deciding():
                method(*args, **kwargs)
            assert self._state is not None
            if not trainer.control.should_training_stop:  # else a newcomer would train on by itself
                self._state._begin_step()
                self._tell(trainer.state, workers.rank())

        return ending

    def _saving(self, method: Callable[..., None]) -> Callable[..., None]:
        """Return ``method``, which saves a checkpoint, as the oldest worker calls it, once."""

        def save(*args: Any, **kwargs: Any) -> None:
            if self._trainer.args.should_save:
                method(*args, **kwargs)
                folder = f"{PREFIX_CHECKPOINT_DIR}-{self._trainer.state.global_step}"
                if self._sampler is not None:
                    saved = Path(str(self._trainer.args.output_dir), folder, SAMPLES)
                    saved.write_text(json.dumps(self._sampler.state_dict()), encoding="utf-8")

        return functools.wraps(method)(self._decisions.saving(save))

    def _together(self, function: Callable[[], T]) -> T:
        """Collective. Return the result of ``function()``, which survivors call again where a worker is lost in it."""
        assert self._state is not None

        @functools.wraps(function)
        def called() -> T:
            self._tell(self._trainer.state, workers.rank())  # it may be the oldest only now
            return function()

        result = self._state.retried(called)()
        self._tell(self._trainer.state, workers.rank())
        return result

    def _sampled(self, sampler_of: Callable[..., Any]) -> Callable[..., Iterable[int]]:
        """Return a function that returns a sampler of this worker's samples; ``sampler_of`` does of all samples."""

        def sampled(*args: Any, **kwargs: Any) -> Iterable[int]:
            given, training = sampler_of(*args, **kwargs), self._trainer.args
            if type(given) not in (RandomSampler, SequentialSampler):
                raise ValueError(OWN_SAMPLES.format(what=f"a sampler of {type(given).__name__}"))
            batch = training.per_device_train_batch_size * training.gradient_accumulation_steps
            seed = training.seed if training.data_seed is None else training.data_seed
            self._sampler = Sampler(given.data_source, batch, seed=seed, shuffle=isinstance(given, RandomSampler))
            return Endless(self._sampler)

        return sampled

    def _tell(self, state: TrainerState, rank: int) -> None:
        """Tell the Trainer this worker's rank: rank 0 logs and saves."""
        state.is_world_process_zero = state.is_local_process_zero = rank == 0
        known: Any = self._trainer.args.distributed_state
        known.process_index = known.local_process_index = rank


class Endless(Iterable[int]):
    """Indices of a sampler, as many as an epoch has now, of as many epochs as that takes.

    A Trainer's epochs are of one length, and those of ``sampler`` depend on how many workers there are.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._count = sampler, len(sampler)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self._sampler.endless(), self._count)


class Place:
    """Place that a Trainer has reached, as a newcomer is handed it: its counts, its log, the counts of callbacks."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._epoch = trainer, 0

    def begin(self, epoch: int) -> None:
        """Begin in an epoch of the sampler."""
        self._epoch = epoch

    def is_past(self, epoch: int) -> bool:
        """Go on to the epoch of the next step; return whether the one before has ended."""
        before, self._epoch = self._epoch, epoch
        return epoch > before

    def _callbacks(self) -> list[ExportableState]:
        """Return the callbacks with a state of their own."""
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        """Return the place, as text: whatever a script has logged can be in it."""
        whole = {
            "trainer": {name: getattr(self._trainer.state, name) for name in CARRIED},
            "callbacks": [one.state()["attributes"] for one in self._callbacks()],
            "epoch": self._epoch,
        }
        return {"json": json.dumps(whole, default=str)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place, of a Trainer with the same callbacks."""
        whole = json.loads(state["json"])
        self._epoch = whole["epoch"]
        for name, value in whole["trainer"].items():
            setattr(self._trainer.state, name, value)
        for one, attributes in zip(self._callbacks(), whole["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(one, name, value)
