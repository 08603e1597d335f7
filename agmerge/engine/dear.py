# SPDX-License-Identifier: Apache-2.0
"""DeAR: reduce-scatters under backward, all-gathers and updates under the next forward.

Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining", ICDCS 2023. Every
collective starts in backward or in ``step()``, in the order of the plan; the hooks of forward only wait, so ranks may
run their modules in any order. Grouping is the planner's. The paper tunes it by Bayesian optimisation of the step time;
here the planner predicts it from the measurements of the first steps.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from agmerge.engine.dear_modules import ModuleHooks, Parameters, check_readers
from agmerge.engine.dear_times import DearMeasurer, ForwardTimes
from agmerge.engine.dear_updates import Updates, check_hooks
from agmerge.engine.gathered import gathered_of
from agmerge.engine.reducer import Reducer, check_attachable
from agmerge.errors import AGMergeError
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.metrics.step_times import Seconds
from agmerge.planning.replanner import Replanner
from agmerge.step.agreed_state import Plans
from agmerge.step.combined import Combined
from agmerge.step.config import Config
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.parameters import ParameterTable

STALE = (
    "AGM116: Parameter {name!r} got a gradient before its last update was applied, because no forward pass of its "
    "module ran since step(). Call the module that holds it, or call optimizer.flush() before this forward pass."
)

TOGETHER = (
    "not supported with merging='dear', because gradients are averaged during the next forward pass. Use another "
    "merging to clip or read gradients before step()."
)


class DearReducer(Reducer):
    """Reducer that leaves updates to the next forward, which applies them module by module, each exactly once.

    ``config.sync.model``: its forward reads the parameters. Raises ``ValueError`` for a parameter of the optimizer that
    is not in it, and for hooks on the optimizer's ``step()``.
    """

    remedy = TOGETHER[0].upper() + TOGETHER[1:]

    def __init__(self, members: ParameterTable, config: Config) -> None:
        """Hook the model's modules, and the optimizer's parameters as every reducer does."""
        assert config.sync.model is not None
        self.model, self._optimizer = config.sync.model, members.optimizer  # the inner optimizer
        self._updates: Updates | None = None  # of the last step, until all are applied
        self._combined: Combined | None = None  # result of the step that ends
        self._times: ForwardTimes | None = None  # for the merge buffers in use
        self._modules = ModuleHooks(self)
        check_hooks(self._optimizer)
        if gathered_of(members):
            raise ValueError(
                "merging='dear' is not supported with SparseAdam, whose gradients are gathered. Use another merging."
            )
        super().__init__(members, config, listener=self)
        self._modules.attach(self.model)

    def leave(self) -> None:
        """Refuse: updates of the last step may be on their way."""
        raise AGMergeError(
            "AGM116: merging='dear' cannot continue with other workers, because updates of the last step may not have "
            "arrived. Restart from a checkpoint, or use another merging."
        )

    def _on_agreement(self, buffers: MergeBuffers, times: RunningStepTimes) -> Plans:
        """Hook the present parameters and modules, and return a planner that measures backward and forward."""
        check_readers(self.model, self._optimizer)  # it may have got more parameters
        super()._on_agreement(buffers, times)
        self._modules.attach(self.model)
        self._times = ForwardTimes(buffers.clock, self._modules.readers)
        return Replanner(buffers, times, DearMeasurer(buffers, times, self))

    # -- a step ---------------------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """Collective. See :meth:`BackwardPasses.on_gradient`; the last update must have been taken before."""
        with self.passes.lock:
            if self._times is not None:
                self._times.end()
            if self._updates is not None:
                with self.exchange.fault.recording():
                    if parameter in self._updates:
                        raise AGMergeError(STALE.format(name=name))
                    self._updates.receive(parameter)  # its message must be free before the next one is written
        self.passes.on_gradient(parameter, name)

    def synchronize(self) -> None:
        """Refuse, with ``ValueError``: combined gradients exist in the next forward only."""
        raise ValueError(f"synchronize(): {TOGETHER}")

    def step(self, wrapper: torch.optim.Optimizer, closure: Any) -> Any:
        """Collective. Wait for the reduce-scatters; leave the update to the next forward. Return None.

        Pending updates of parameters that the last forward has not read are applied first. Refuses a closure and
        ``skip_synchronize()`` with ``ValueError``.
        """
        self.connect()
        if closure is not None:
            raise ValueError(
                "step(closure) is not supported with merging='dear', which applies updates in the next forward pass. "
                "Run the closure's forward and backward before step()."
            )
        if not self._combines:
            raise ValueError(f"step() inside skip_synchronize(): {TOGETHER}")
        check_hooks(self._optimizer)
        if self.exchange.group.outside:
            return self._optimizer.step()
        with self.passes.lock:
            self.exchange.fault.check()
            self.flush()
            super().synchronize()
            if self.skipped or self.idle:
                self.discard()
                return None
            with torch.no_grad(), self.exchange.fault.recording():
                assert self._combined is not None
                self._updates = Updates(self._optimizer, self._combined, self.exchange.agreed.config.sync.zero_unused)
                self._combined = None
            self.end_step()
        return None

    def _attach(self, combined: Combined) -> None:
        """Store the combined gradients. The updates are not there yet, and ``p.grad`` stays the script's own."""
        check_attachable(combined, self.exchange, is_active=self.participation.flag == Flag.ACTIVE)
        self._combined = combined

    def end_step(self) -> None:
        """Collective. See :meth:`Reducer.end_step`; replicas are compared with all updates applied."""
        every = self.exchange.agreed.config.guards.check_every
        if every and (self.exchange.agreed.step + 1) % every == 0:  # the first comparison is of the initial parameters
            self.flush()
        super().end_step()
        buffers = self.exchange.agreed.buffers
        if self._times is not None and buffers is not None and self.exchange.agreed.times.measures_next(buffers.clock):
            self._times.begin()

    # -- updates --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_forward(self, number: int, parameters: Parameters) -> None:
        """Collective. Wait for the messages of ``parameters``, which a forward is about to read, and update them.

        ``number``: which of the readers of the model runs.
        """
        times = self._times
        if times is None or (self._updates is None and not times.open):
            return
        with self.passes.lock:
            mark = times.mark()
            if self._updates is None:
                times.reached(number, mark)
                return
            with self.exchange.fault.recording():
                self._receive(self._updates, parameters)
                times.reached(number, mark)
                self._updates.apply(parameters)
            if self._updates.done:
                self._updates = None

    @torch.no_grad()
    def flush(self) -> None:
        """Collective. Apply every pending update.

        Its messages are under way already, so that ranks need not call this at the same time.
        """
        with self.passes.lock:
            updates, self._updates = self._updates, None
            if updates is not None:
                with self.exchange.fault.recording():
                    self._receive(updates, updates.parameters)
                    updates.apply(updates.parameters)

    def _receive(self, updates: Updates, parameters: Parameters) -> None:
        """Collective. Wait for the messages of these parameters; the time counts as exposed."""
        begin = time.perf_counter()
        for parameter in parameters:
            updates.receive(parameter)
        self.exchange.agreed.times.add_exposed(time.perf_counter() - begin)

    def forward_seconds(self) -> Seconds:
        """Return the seconds of forward of each tensor of the merge buffers, (n,), as measured on this rank."""
        assert self.exchange.agreed.buffers is not None and self._times is not None
        return self._times.of(self.exchange.agreed.buffers.flat.parameters)

    # -- guards ---------------------------------------------------------------------------------------------

    def check_idle(self, what: str) -> None:
        """Collective. See :meth:`Reducer.check_idle`; updates that are pending are applied."""
        super().check_idle(what)
        self.flush()

    def close(self) -> None:
        """Collective. Apply pending updates, unless the exchange is broken, and remove all hooks."""
        try:
            if not self.exchange.fault:
                self.flush()
        finally:
            self._modules.remove()
            super().close()
