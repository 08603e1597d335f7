# SPDX-License-Identifier: Apache-2.0
"""Reducer of gradients that are collected in buckets, with the updates written where the gradients were.

The buckets are only where gradients lie. Merge buffers, messages and residuals are by parameter, so that they do not
change when the owner of the buckets rearranges these.
"""

from __future__ import annotations

from typing import Literal

import torch

from agmerge.backends import status
from agmerge.engine import seen_steps
from agmerge.engine.averaged_steps import AveragedModel, AveragedSteps
from agmerge.engine.clipping_watch import ClippingWatch
from agmerge.engine.grad_hooks import refuse_owned
from agmerge.engine.grad_scaler import LossScale
from agmerge.engine.last_pass import LastPass
from agmerge.engine.participation import Participation, SyncedReplica, open_exchange
from agmerge.engine.step_hooks import take_over
from agmerge.errors import IN_BACKWARD, AGMergeError, NonFiniteError
from agmerge.exchanges.message.format import Flag
from agmerge.ops import Average
from agmerge.planning.replanner import Replanner
from agmerge.step.config import Config
from agmerge.step.gradient_exchange import Combined
from agmerge.tensors.parameters import ParameterTable, fingerprints, optimizers_of

OTHERS = "one of the optimizer's that this model does not average"


class BucketReducer:
    """Reducer that combines the gradients of each backward pass: there is no ``step()`` to wait for.

    :meth:`hand_over` for each parameter, in the same order on every rank, then :meth:`combine`. From then on the update
    is the script's, which may clip it, add to it or drop it. ``members``: the parameters with gradients in the buckets.
    ``optimizer``: the one that steps; None: it is not known. ``model``: the owner of the buckets, for checks of steps;
    None: its members are all that it has. Raises ``ValueError`` where another DistributedOptimizer
    has a parameter, or the momentum of ``optimizer``, to be applied here, is of other parameters.
    """

    combines_gradients: Literal[True] = True  # p.grad becomes the combined gradient
    passes = None  # the owner of the buckets counts them

    def __init__(
        self,
        members: ParameterTable,
        config: Config,
        optimizer: torch.optim.Optimizer | None = None,
        model: AveragedModel | None = None,
    ) -> None:
        self.members = members
        self.exchange = open_exchange(members, members, config, Replanner)
        self.replica = SyncedReplica(members, self.exchange)
        self.participation = Participation(self.exchange, self._compared)
        self.scaling = LossScale(None)
        refuse_owned(members.name_all(), members)
        self._optimizer = optimizer
        self._check_momentum(config)
        self._gradients: dict[str, torch.Tensor] = {}  # handed over in this pass: views of buckets
        if model is None:
            model = AveragedModel(lambda: ((members.name_of(one), one) for one in members.name_all()))
        self._checks = AveragedSteps(self.exchange, members.name_all(), model)
        self._last = LastPass(self.exchange, members, optimizer)
        self._clipping = ClippingWatch(self.exchange)
        # Several optimizers step one by one: it looks when the first of them does.
        self._looks = [] if optimizer is None else [self._clipping.follow(each) for each in optimizers_of(optimizer)]
        self._stop_listening = seen_steps.listen(self, members.name_all())
        self._stepped_to: int | None = None  # versions of parameters after the last step; None: before the first
        self._end_due: Combined | None = None  # the pass that has ended, and after which replicas are to be compared

    def connect(self) -> None:
        """Collective. Connect to the present workers, if this has not happened."""
        if self.participation.outdated:
            self.leave()
        if not self.exchange.group.settled:
            self.participation.connect()

    def leave(self) -> None:
        """Forget the group of workers."""
        self.participation.leave()

    def attach_scaler(self, scaling: LossScale) -> None:
        """Divide gradients by another loss scale from now on."""
        self.scaling = scaling

    def _check_momentum(self, config: Config) -> None:
        """Raise ``ValueError`` where a momentum to be applied here is not that of exactly these parameters."""
        if config.compression.rates is None or self._optimizer is None:
            return
        stepped = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        others = stepped ^ set(self.members.name_all())
        if others:
            raise ValueError(
                f"AGM311: {config.compression.memory} applies the momentum of {type(self._optimizer).__name__}, but "
                "that steps other parameters than those that are exchanged (for example, one of shape "
                f"{list(next(iter(others)).shape)} differs). Pass an optimizer that steps exactly the exchanged "
                "parameters, or memory='residual'."
            )

    def _compared(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks, by name. ``check_every``: the optimizer's, too."""
        tensors = self.replica.compared()
        if self._optimizer is not None and self.exchange.agreed.config.guards.check_every:
            others = self._checks.also_equal(self._optimizer)
            tensors[OTHERS] = fingerprints(others) if others else torch.zeros(1)
        return tensors

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Use another config, as :meth:`Participation.reconfigure`. Raises in a backward pass."""
        self._check_momentum(config)
        self.check_idle(what)
        self._last.close()
        self.participation.reconfigure(config, what, advice)
        self.discard()

    @torch.no_grad()
    def hand_over(self, parameter: torch.Tensor, gradient: torch.Tensor, *, used: bool = True) -> None:
        """Collective. Hand over the gradient of a parameter, and send the merge buffers that are complete now.

        ``gradient``: of the shape of ``parameter``, not to be changed before :meth:`combine`, which writes the update
        there. ``used``: whether this rank has one; if not, and where this rank has joined, ``gradient`` is zero.
        """
        if not self._gradients:
            self._last.settle()
            self._end_exchange()
            status.current().enter("is in a backward pass", self.exchange.agreed.step)
        name = self.members.name_of(parameter)
        self._gradients[name] = gradient
        if self.participation.flag == Flag.ACTIVE:  # of one that has joined, everything leaves in combine()
            self.exchange.ready(name, self.scaling.divided(parameter, gradient) if used else None, stays=True)

    @torch.no_grad()
    def combine(self) -> None:
        """Collective. Send the remaining messages, receive, and write the updates over the gradients; the pass ends.

        Connects first, if need be. A tensor that no rank has used gets no update, and its residual and momentum stay.
        Raises :class:`agmerge.NonFiniteError` on every rank, according to ``nonfinite=``.
        """
        self.connect()
        if self._optimizer is not None:
            take_over(self.exchange, self.members, self._optimizer)
        status.current().enter("averages gradients", self.exchange.agreed.step)
        try:
            combined = self.exchange.finish(flags=self.participation.flag)
        except NonFiniteError as error:
            raise NonFiniteError(IN_BACKWARD.format(where=error.where), error.where) from None
        waits = combined.buffers.flat.keeps_state and self.participation.flag == Flag.ACTIVE  # for a step
        with self.exchange.fault.recording():
            if self._optimizer is not None:
                self._clipping.note(combined)
            if combined.skipped and self.scaling.scaler is None and self.exchange.agreed.config.sync.op is Average:
                self._average_whole()
            else:
                here = ((name, update) for name, update in combined.updates.items() if update is not None)
                self.scaling.multiply([self._gradients[name].copy_(update) for name, update in here])
            if combined.skipped:
                self.exchange.discard()
            elif waits:
                self._last.begin()
            else:
                self.exchange.commit(drops_unused=True)
        self._end_pass()
        self._checks.count_pass()
        if not combined.skipped:
            self._end_due = combined
            if not waits:
                self._end_exchange()

    def _average_whole(self) -> None:
        """Collective. Average the gradients of this pass uncompressed, with infinities and NaN where ranks have them.

        As plain DistributedDataParallel does: the script then repairs the gradients, or skips the step, on all ranks
        alike. No residual moves. Gradients that are averages already stay as they are.
        """
        comm, timeout = self.exchange.group.comm, self.exchange.agreed.config.guards.timeout
        assert comm is not None
        gradients: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for gradient in self._gradients.values():
            gradients.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for number, parts in enumerate(gradients.values()):
            total = torch.cat([part.reshape(-1) for part in parts])
            comm.all_reduce(total, f"nonfinite gradients {number}").wait(timeout)
            total /= comm.size
            for part, own in zip(parts, torch.split(total, [part.numel() for part in parts]), strict=True):
                part.copy_(own.view_as(part))

    def _end_exchange(self) -> None:
        """Collective. Compare replicas and plan anew, where that is due, after a pass that has been committed."""
        combined, self._end_due = self._end_due, None
        if combined is not None:
            # Not before the optimizer has stepped, and not where it does not: on a rank that has joined.
            compares = self.exchange.agreed.steps > 1 and not combined.flags & Flag.JOINED
            self.participation.end_exchange(compares=compares, written=self._has_written)

    def _has_written(self) -> bool:
        """Return whether parameters were written in place since the last step."""
        return self._stepped_to is not None and self._stepped_to != self._last.versions()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check what ``optimizer``, which has some of the parameters, is about to step with.

        Raises :class:`agmerge.AGMergeError` for gradients that are averaged by nothing.
        """
        self._checks.before(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the residuals of the parameters that ``optimizer`` has stepped."""
        self._last.stepped(optimizer)
        self._checks.after(optimizer)
        self._stepped_to = self._last.versions()

    def flush(self) -> None:
        """Apply updates that are on their way: there are none, each pass ends with its own."""

    def discard(self) -> None:
        """Discard the pass that has begun."""
        self._end_due = None
        self.exchange.discard()
        self._end_pass()

    def _end_pass(self) -> None:
        self._gradients = {}
        self.scaling.clear()

    def check_idle(self, what: str) -> None:
        """Raise unless ``what`` may happen now: not in a backward pass."""
        if self._gradients:
            raise AGMergeError(f"AGM111: {what} was called in a backward pass. Call it after backward().")

    def detach(self) -> None:
        """Stop watching steps of optimizers, and gradients: there will be no pass any more."""
        for handle in self._looks:
            handle.remove()
        self._stop_listening()
        self._last.end()

    def close(self) -> None:
        """Close the communicators, and stop watching the optimizer's steps."""
        self.detach()
        self.exchange.close()
