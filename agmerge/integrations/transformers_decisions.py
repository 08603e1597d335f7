# SPDX-License-Identifier: Apache-2.0
"""Make what Trainers of an elastic job decide from their evaluations the same on all workers.

Each worker evaluates, with the oldest one's buffers, and takes the oldest one's metrics: machines of another kind
compute other ones, and early stopping would stop some workers and not others. The oldest saves, and the others wait
until the checkpoint is there: they may be asked for the best one. All that survives the death of any worker: the
next oldest does it then.

Only the Trainer's own evaluations at the end of a step count, which all workers make, and what is saved with them.
Others, such as those of a callback or of the script, are each worker's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from agmerge.runtime import workers
from agmerge.runtime.broadcast import broadcast_parameters
from agmerge.runtime.collectives.objects import broadcast_object

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
