# SPDX-License-Identifier: Apache-2.0
"""Backward passes of one step: counted by parameter, with each gradient handed over after the last of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agmerge.backends import status
from agmerge.engine.grad_hooks import HandedOver
from agmerge.engine.grad_scaler import LossScale
from agmerge.engine.participation import Participation
from agmerge.errors import BETWEEN, NO_SYNC_LATE, TOO_MANY, AGMergeError
from agmerge.exchanges.message.format import Flag
from agmerge.tensors.dtensors import Gradients, gradient_of
from agmerge.tensors.parameters import ParameterTable


class BackwardPasses:
    """Backward passes of the step under way, until its gradients are combined and it ends.

    ``members``: the parameters of the wrapped optimizer. ``participation``: of the exchange to which gradients go.
    Hooks on parameters call :meth:`on_gradient`.
    """

    def __init__(self, members: ParameterTable, participation: Participation) -> None:
        self._members, self._participation, self._exchange = members, participation, participation.exchange
        self.per_step = participation.exchange.agreed.config.sync.passes
        self.combined = False  # the gradients of the step are, and the step has not ended
        self.lock = threading.RLock()  # autograd runs the hooks of each device on a thread of its own
        self.scaling = LossScale(None)
        self.gradients = Gradients()  # as of the last agreement
        self._paused = False  # in no_sync()
        self._fired: dict[str, int] = {}  # passes since the last step
        self.handed_over = HandedOver()

    def on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """Collective. Count a gradient that was accumulated once more; send it after the last pass. Called by the hook.

        It runs for every tensor: keep it short.
        """
        with self.lock:
            if self.combined:
                self.discard()  # synchronize() without step(): the update is discarded
            if not self._fired:
                status.current().enter("is in a backward pass", self._exchange.agreed.step)
            if self._paused:
                if name in self.handed_over:
                    self.handed_over.refuse_more()
                    raise AssertionError(f"{NO_SYNC_LATE} Parameter: {name!r}.")
                self._fired.setdefault(name, 0)  # a step has begun: its gradients so far belong in a checkpoint
                return
            fired = self._fired.get(name, 0) + 1
            if fired != self.per_step:
                self._exchange.fault.check()
            if fired > self.per_step:
                self.handed_over.refuse_more()
                raise AssertionError(TOO_MANY.format(name, fired, self.per_step))
            self._fired[name] = fired
            if fired == self.per_step:
                self._hand_over(parameter, name)

    def _hand_over(self, parameter: torch.Tensor, name: str) -> None:
        gradient = self._gradient(parameter, name)
        held = self._exchange.ready(name, gradient)
        if held is not gradient:
            self.gradients.set(parameter, held)
        self.handed_over.add(name, parameter, own=held is not gradient)

    def _gradient(self, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
        """Return this rank's gradient of a parameter, strided and without a loss scale; None while it has joined."""
        if self._participation.flag == Flag.JOINED:
            return None
        gradient = parameter.grad
        if hasattr(gradient, "to_local"):  # a DTensor; asked here, for a call a tensor would cost more
            gradient = gradient_of(parameter, name)
        if gradient is not None and gradient.layout != torch.strided:
            with self._exchange.fault.recording():  # the others do not hear of it
                gradient = self._members.make_dense(parameter, self._exchange.agreed.config.sync.sparse_as_dense)
        return gradient if self.scaling.scaler is None else self.scaling.divided(parameter, gradient)

    def late(self, name: str) -> torch.Tensor | None:
        """Return the gradient of a parameter that no hook has handed over."""
        assert self._exchange.agreed.buffers is not None
        buffers = self._exchange.agreed.buffers
        slot = buffers.slot_of[name]
        parameter = buffers.flat.parameters[slot.index]
        gradient = self._gradient(parameter, name)
        if gradient is not None and buffers.flat.will_overwrite(slot, gradient):
            # The last update, made zero by zero_grad(): sums may be written there, and the round be repeated.
            gradient = gradient.clone()
            self.gradients.set(parameter, gradient)
        return gradient

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no backward pass inside, and send nothing: gradients only accumulate locally."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def set_per_step(self, passes: int) -> None:
        """Sum ``passes`` backward passes from the next step on."""
        self.check_idle("set_backward_passes_per_step()")
        self.per_step = passes

    def attach_scaler(self, scaling: LossScale) -> None:
        """Divide gradients by another loss scale from now on."""
        self.scaling = scaling

    def start_agreement(self) -> None:
        """Forget what belongs to the last agreement."""
        self.gradients = Gradients()

    # -- the end of a step ------------------------------------------------------------------------------------------

    def mark_combined(self) -> None:
        """Record that the gradients are combined: the next one begins another step."""
        self.combined = True

    @property
    def unfinished(self) -> bool:
        """Return whether gradients are on their way."""
        return len(self.handed_over) > 0 and not self.combined

    def missing(self) -> list[str]:
        """Return the names of parameters of which no gradient has been handed over."""
        return [member.name for member in self._exchange.agreed.members() if member.name not in self.handed_over]

    def check_idle(self, what: str) -> None:
        """Raise unless ``what`` may happen now: no backward pass waits for its ``synchronize()``."""
        if any(self._fired.values()) and not self.combined:
            raise AGMergeError(BETWEEN.format(what=what))

    def forget(self) -> None:
        """Forget the passes of the step under way: its gradients will be zeroed."""
        self._fired, self.handed_over = {}, HandedOver()

    def discard(self) -> None:
        """Discard the step: handed-over gradients are forgotten, and residuals stay as before it."""
        self._fired, self.handed_over, self.combined = {}, HandedOver(), False
        self.scaling.clear()
        self._exchange.discard()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def window(self) -> dict[torch.Tensor, int]:
        """Return how many backward passes each parameter has seen in this step; none after a broken exchange."""
        if self.combined or self._exchange.fault:
            return {}
        by_name = {self._members.name_of(parameter): parameter for parameter in self._members.name_all()}
        return {by_name[name]: fired for name, fired in self._fired.items()}

    def resume(self, parameter: torch.Tensor, fired: int) -> None:
        """Resume a step: ``parameter`` has seen ``fired`` backward passes already; its gradient is in ``p.grad``."""
        name = self._members.name_of(parameter)
        self._fired[name] = fired
        if fired == self.per_step:
            self._hand_over(parameter, name)
