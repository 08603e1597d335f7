# SPDX-License-Identifier: Apache-2.0
"""Reducer of the gradients of one optimizer, as its backward passes make them, from step to step; and ``join()``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from agmerge.backends import status
from agmerge.backends.handshake import gather_bytes
from agmerge.engine import participation
from agmerge.engine.grad_hooks import BackwardPasses, GradientHooks, GradientListener
from agmerge.engine.grad_scaler import DenseTable, GatheredGradients, gathered_of, takes_sparse_alone
from agmerge.engine.participation import (
    Participation,
    SyncedReplica,
    level_replicas,
    open_exchange,
    weakly,
)
from agmerge.engine.step_hooks import take_over, withheld
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.errors import (
    NO_GRADIENT,
    NOT_COMBINED,
    SYNCHRONIZE,
    TWICE,
    AGMergeError,
    NonFiniteError,
    and_more,
    shortened,
)
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.planning.replanner import Replanner
from agmerge.runtime import workers
from agmerge.script.averaged_steps import AveragedTwice, check_not_averaged
from agmerge.script.clipping_watch import ClippingWatch
from agmerge.step.agreed_state import Plans
from agmerge.step.config import Config
from agmerge.step.gradient_exchange import Combined, GradientExchange
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.parameters import ParameterTable, gradient_dtype, optimizers_of

GAVE_UP = "called zero_grad() in the middle of a step, before the gradients of {missing} were computed{cause}"
AFTER_BROKEN = (
    "Save your state and start again. If every rank is still running, call optimizer.reset() on all of them, which "
    "abandons this step."
)


class Reducer:
    """Reducer of gradients: backward passes hand them over, and it attaches the combined ones.

    ``members``: the parameters of the wrapped optimizer. ``listener``: to their hooks; None: the backward passes.
    """

    combines_gradients: Literal[True] = True  # p.grad becomes the combined gradient
    remedy = SYNCHRONIZE  # for a script that changes gradients

    def __init__(self, members: ParameterTable, config: Config, listener: GradientListener | None = None) -> None:
        gathered = bool(gathered_of(members))
        if gathered:
            participation.refuse_feature("a module with sparse=True, of which gradients are gathered,")
        if config.sync.sparse_as_dense and all(map(takes_sparse_alone, optimizers_of(members.optimizer))):
            raise ValueError(
                "sparse_as_dense=True is not supported with SparseAdam, which requires sparse gradients. Remove it."
            )
        self.members, table = members, DenseTable(members) if gathered else members
        self.exchange = open_exchange(members, table, config, weakly(self._on_agreement))
        self.replica = SyncedReplica(members, self.exchange)
        self.participation = Participation(self.exchange, self.replica.compared)
        self.passes = BackwardPasses(members, self.participation)
        self.flags_of_all = 0  # flags of all ranks in the last exchange, see Flag
        self.skipped = False  # gradients are combined, and come to nothing: the inner optimizer must not step
        self.idle = False  # this worker is alone, and no parameter needs a gradient: there is nothing to combine
        self._gathered = GatheredGradients(members) if gathered else None
        self._combines = True  # in step(); False in skip_synchronize(), where they are combined already
        self._clipping = ClippingWatch(self.exchange)
        self._averaged_twice = AveragedTwice(members, self.exchange)
        self._hooks = GradientHooks(listener or self.passes)
        alone = workers.is_initialized() and workers.size() == 1 and not workers.launched_elastic()
        self._hooks.attach((member.parameter for member in self.exchange.agreed.members()), members, alone=alone)

    def _on_agreement(self, buffers: MergeBuffers, times: RunningStepTimes) -> Plans:
        """Hook the parameters that take part now, and return a planner of their exchange."""
        self.passes.start_agreement()
        self._hooks.attach(buffers.flat.parameters, self.members, alone=self.exchange.group.alone)
        return Replanner(buffers, times)

    # -- the group of workers -------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Collective. Connect to the present workers, if this has not happened."""
        if self.participation.outdated:
            self.leave()
        if not self.exchange.group.settled:
            check_not_averaged(self.members)
            self.participation.connect()
            self._averaged_twice.begin()
            if self.exchange.group.outside:
                self._hooks.remove()

    def leave(self) -> None:
        """Forget the group of workers; the next step connects to the group that exists then."""
        self.participation.leave()

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Use another config, as :meth:`Participation.reconfigure`.

        Raises between ``backward()`` and ``step()``.
        """
        self.check_idle(what)
        self.participation.reconfigure(config, what, advice)
        self.discard()

    # -- step -----------------------------------------------------------------------------------------------------

    def _join_group(self) -> None:
        """Collective. Connect, if need be, and prepare what the next agreement takes over."""
        self.participation.connected(self.connect)
        take_over(self.exchange, self.members, self.members.optimizer)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Collective. Send the remaining messages, receive, and make every ``p.grad`` the combined update.

        Connects first, if need be. Raises on every rank for gradients that are not finite, according to ``nonfinite=``,
        and on this rank where the script has changed gradients after they were handed over.
        """
        self._join_group()
        with self.passes.lock:
            self.exchange.fault.check()
            if self.exchange.group.outside or self.passes.combined:
                return  # nothing new: a backward pass would have begun another round
            self.skipped = False
            self.idle = (self.exchange.group.alone or self._gathered is not None) and not trains(self.exchange)
            if self.idle:
                self._gather()
                if self._gathered is not None:
                    self.passes.mark_combined()
                return
            status.current().enter("is in step()", self.exchange.agreed.step)
            changed = self.passes.handed_over.error(self.members, self.exchange.agreed.steps, self.remedy)
            try:
                for combined in self.participation.finish(self.connect, self.passes.late):
                    self.flags_of_all, self.skipped = combined.flags, combined.skipped
                    with self.exchange.fault.recording():
                        self._attach(combined)
                        if combined.is_part:
                            self.exchange.commit()
            except BaseException:
                if not self.exchange.fault:  # all ranks are at the same place, and go on with the next step
                    self.discard()
                raise
            if changed is not None:
                self.discard()
                raise changed
            if not self.skipped:
                self._gather()
            self.passes.mark_combined()

    def _gather(self) -> None:
        """Collective. Combine gathered sparse gradients, if there are any. Raises as :meth:`synchronize` does."""
        comm = self.exchange.group.comm
        if self._gathered is None or comm is None:
            return
        joined = self.participation.flag == Flag.JOINED
        try:
            self.skipped = not self._gathered.combine(
                comm, self.exchange.agreed.config, self.exchange.agreed.totals, joined=joined
            )
        except NonFiniteError:  # the same on all ranks
            self.discard()
            raise
        except BaseException as error:
            with self.exchange.fault.recording():
                raise error

    def _attach(self, combined: Combined) -> None:
        """Make the updates the gradients; none may reach the inner optimizer that was not combined (G3)."""
        check_attachable(combined, self.exchange, is_active=self.participation.flag == Flag.ACTIVE)
        self._clipping.note(combined)
        set_gradient = self.passes.gradients.set
        parameters, slot_of = combined.buffers.flat.parameters, combined.buffers.slot_of
        updated = [parameters[slot_of[name].index] for name in combined.updates]
        for parameter, update in zip(updated, combined.updates.values(), strict=True):
            set_gradient(parameter, update)
        self.passes.scaling.multiply(parameter.grad for parameter in updated if parameter.grad is not None)

    def prepare_clipping(self, optimizer: Any) -> None:
        """Collective. Combine and unscale the gradients, which will be clipped; the next step takes them as they are.

        ``optimizer``: the one that a GradScaler is given. Raises ``ValueError`` for velocities.
        """
        self._clipping.check_gradients()
        self.synchronize()
        self.passes.scaling.mark_combined()
        self.passes.scaling.unscale(optimizer)
        self._clipping.forget()

    @contextmanager
    def taking_combined(self) -> Iterator[None]:
        """Make steps inside use the gradients as they are: they are combined already."""
        before, self._combines = self._combines, False
        try:
            yield
        finally:
            self._combines = before

    def step(self, wrapper: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Collective. Combine the gradients, unless they are combined already, and step the inner optimizer.

        ``wrapper``: the optimizer that a GradScaler was given. ``closure`` runs once, before the gradients are
        combined. Returns its loss, or the result of the inner step.
        """
        self.passes.scaling.check_step(wrapper, closure)
        if closure is not None and not self._combines:
            raise ValueError(
                "step(closure) is not supported inside skip_synchronize(), because the closure's gradients would not "
                "be averaged"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._combines:
            if self.passes.combined and not self.passes.scaling.combined:
                warnings.warn(TWICE, stacklevel=3)
            self.synchronize()
        elif not self.passes.combined and not self.exchange.group.outside and not self.idle:
            raise AGMergeError(NOT_COMBINED)
        optimizer = self.members.optimizer
        with withheld(self.exchange, optimizer), self._clipping.looking(optimizer):
            self._averaged_twice.stepping()
            inner = None if self.skipped else optimizer.step()
        self._averaged_twice.judge()
        self.end_step()
        return loss if closure is not None else inner

    def end_step(self) -> None:
        """Collective. Commit: the inner optimizer has stepped. Compare replicas and plan again, where that is due."""
        if self.exchange.group.outside or self.skipped or self.idle:
            self.discard()
            return
        self.exchange.commit()
        self.discard()
        # A rank that has joined may step otherwise, until all have.
        self.participation.end_exchange(compares=not self.flags_of_all & Flag.JOINED)

    def combine_for(self, scaler: torch.amp.GradScaler) -> None:
        """Collective. Combine the gradients now: ``scaler`` is about to unscale them, and to look for infinities.

        Does nothing for a scaler that is not attached, or where they are combined already.
        """
        if scaler is self.passes.scaling.scaler and not self.passes.combined and not self.exchange.group.outside:
            if not self._combines:
                raise AGMergeError(NOT_COMBINED)
            self.synchronize()
            self.passes.scaling.mark_combined()

    # -- guards -----------------------------------------------------------------------------------------------------

    def restart(self) -> bool:
        """Collective. Forget the step under way: its gradients will be zeroed. Return whether that may happen now.

        It may not while gradients are on their way that cannot be dropped.
        """
        if self.passes.unfinished and not self._abandon():
            return False
        if self.passes.combined:
            self.discard()  # else, without a backward pass in its next step, a rank would not exchange anything
        self.passes.forget()
        return True

    def _abandon(self) -> bool:
        """Collective. Drop the gradients that are on their way, where possible; return whether none is left then.

        A lone worker can at any time. With others it is possible while a gradient is missing, as after an exception in
        a backward pass: then the step comes to nothing on all ranks, and the others raise
        :class:`agmerge.AGMergeError`. Gradients that a refused pass has changed are dropped likewise. Raises here after
        an error that has broken the exchange.
        """
        if self.exchange.group.alone:
            if self.exchange.fault and self.exchange.agreed.config.sync.model is not None:
                raise_broken(self.exchange)  # updates of the last step may be lost
            if self.exchange.fault:
                self.leave()  # a lone worker: no other rank is affected
            self.discard()
        elif self.exchange.fault:
            raise_broken(self.exchange)
        elif missing := self.passes.missing():
            why = GAVE_UP.format(missing=and_more(missing), cause=_surviving())
            if not self.exchange.under_way:  # before the first agreement: the others wait for this rank in it
                self._join_group()
            if not self.exchange.group.outside:
                self.exchange.give_up(why)
            self.discard()
        elif self.passes.handed_over.overrun:
            try:
                Reducer.synchronize(self)
            except AGMergeError:  # its text names the gradients that the refused pass has changed
                self.exchange.fault.check()
        return not self.passes.unfinished

    def discard(self) -> None:
        """Discard the step: handed-over gradients are forgotten, and residuals stay as before it."""
        self.skipped = self.idle = False
        self.passes.discard()

    def check_idle(self, what: str) -> None:
        """Raise unless ``what`` may happen now: no backward pass waits for its ``synchronize()``."""
        self.passes.check_idle(what)

    def flush(self) -> None:
        """Apply updates that are on their way: there are none, ``step()`` applies its own."""

    def close(self) -> None:
        """Remove the hooks and close the communicators."""
        self.passes.forget()
        self._hooks.remove()
        self.exchange.close()


def trains(exchange: GradientExchange) -> bool:
    """Return whether a parameter needs a gradient, or the exchange has known one that did."""
    return (exchange.agreed.is_valid and not exchange.agreed.changed) or bool(exchange.agreed.members())


def check_attachable(combined: Combined, exchange: GradientExchange, *, is_active: bool) -> None:
    """Raise where a parameter has changed during backward; warn once where no rank has a gradient.

    ``is_active``: this rank has not joined.
    """
    buffers = combined.buffers
    for slot, parameter in zip(buffers.layout.slots, buffers.flat.parameters, strict=True):
        dtype = gradient_dtype(parameter)
        if dtype != slot.tensor_class.dtype or parameter.device != slot.tensor_class.device:
            raise AGMergeError(
                f"AGM113: Parameter {slot.name!r} changed from {slot.tensor_class.dtype} on "
                f"{slot.tensor_class.device} to {dtype} on {parameter.device} between backward() and step(). Change "
                "it between steps."
            )
    if not any(combined.used) and is_active and combined.is_whole:
        warnings.warn(NO_GRADIENT, stacklevel=7)
    if exchange.agreed.changed:
        known = set(buffers.flat.parameters)
        for member in exchange.agreed.members():
            if member.parameter not in known and member.parameter.grad is not None:
                raise AGMergeError(
                    f"AGM113: Parameter {member.name!r} was added or unfrozen during backward(), so its gradient was "
                    "not averaged. Add or unfreeze it between step() and the next backward()."
                )


def raise_broken(exchange: GradientExchange) -> None:
    """Raise the error that has broken the exchange, with advice."""
    try:
        exchange.fault.check()
    except AGMergeError as error:
        raise AGMergeError(f"{error}. {AFTER_BROKEN}") from error.__cause__


def _surviving() -> str:
    """Return the error that is being handled, in brackets for the end of a sentence; empty: there is none."""
    error = sys.exc_info()[1]
    return "" if error is None else f" ({type(error).__name__}: {shortened(str(error))})"


# ``join()``, training on uneven data: a rank without batches goes on taking part until no rank has any.
#
# A rank that has joined sends all messages, made from its residuals alone, and takes the same steps as the others.
# Every message says whether its rank still trains; the first round in which none does is the last one, on every rank,
# and is discarded.


def join(reducer: Reducer | UpdateReducer, step: Callable[[], object]) -> int:
    """Collective. Take part without gradients until every rank has joined; return the world's rank that did so last.

    Of ranks that join at the same step the highest counts as the last one. If replicas differ in the end (the others
    clipped their gradients, or changed the learning rate), all get that rank's parameters and optimizer state. Raises
    ``ValueError`` with ``merging="dear"``.

    Args:

        reducer: of the optimizer that joins.
        step: takes a step with the gradients as ``synchronize()`` left them.
    """
    participation.refuse_feature("join()")
    if reducer.exchange.agreed.config.sync.model is not None:
        raise ValueError("join() is not supported with merging='dear'. Use the same number of batches on every rank.")
    if not reducer.combines_gradients:
        return join_with_updates(reducer)
    reducer.connect()
    reducer.check_idle("join()")
    comm = reducer.exchange.group.comm
    if comm is None:  # not of the process set
        return workers.rank()
    alone = 0  # steps that this rank has taken without batches
    with reducer.participation.joined():
        while True:
            reducer.synchronize()
            if not reducer.flags_of_all & Flag.ACTIVE:
                break
            step()
            alone += 1
    _discard(reducer)
    last = last_to_join(reducer, alone)
    level_replicas(
        comm, reducer.members, reducer.members.optimizer, last, reducer.exchange.agreed.config.guards.timeout
    )
    return world_rank(reducer, last)


def join_with_updates(reducer: UpdateReducer) -> int:
    """Collective. Send this worker's unsent updates until every rank has joined; then all consolidate.

    The optimizer does not step meanwhile. Returns the world's rank that joined last.
    """
    reducer.before_step()
    if reducer.exchange.group.outside:
        return workers.rank()
    waited = 0
    with reducer.participation.joined():
        while not reducer.exchange.group.alone and reducer.exchange_alone() & Flag.ACTIVE:
            waited += 1
    reducer.consolidate()
    return world_rank(reducer, last_to_join(reducer, waited))


def last_to_join(reducer: Reducer | UpdateReducer, alone: int) -> int:
    """Collective. Return the rank that joined last; of several the highest. ``alone``: steps that this one waited."""
    assert reducer.exchange.group.comm is not None
    texts = gather_bytes(
        reducer.exchange.group.comm, alone.to_bytes(8, "little"), "join", reducer.exchange.agreed.config.guards.timeout
    )
    waited = [int.from_bytes(text, "little") for text in texts]
    return max(rank for rank, steps in enumerate(waited) if steps == min(waited))


def _discard(reducer: Reducer) -> None:
    """Discard the last round, in which no rank has trained: residuals and everything else are as before it."""
    assert reducer.exchange.agreed.buffers is not None
    for parameter in reducer.exchange.agreed.buffers.flat.parameters:
        parameter.grad = None
    reducer.discard()


def world_rank(reducer: Reducer | UpdateReducer, rank: int) -> int:
    """Return the world's number of a rank of the process set."""
    ranks = reducer.exchange.agreed.config.sync.process_set.members
    return ranks[rank] if ranks else rank
