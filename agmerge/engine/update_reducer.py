# SPDX-License-Identifier: Apache-2.0
"""Exchange of the optimizer's updates: every worker steps by itself, then the pseudo-gradients are averaged.

Step by step, with x the parameters of this worker and ``base`` the shared ones:

1. The optimizer steps with this worker's own gradients: x moves.
2. Where an exchange is due, the selection of the pseudo-gradient ``base - x`` is sent, averaged over workers and
   subtracted from ``base``; x moves by the same.
3. The unsent remainder is kept: in x itself (``carry="apply"``), or in a residual (``carry="hold"``).

The mean of x over workers follows the mean of their optimizers' steps, whatever is sent: compression decides only how
far a worker's x may deviate from that mean.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from agmerge.backends import status
from agmerge.engine.participation import Participation, open_exchange
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.planning.replanner import Replanner
from agmerge.runtime import workers
from agmerge.script.averaged_steps import AveragedTwice, check_not_averaged
from agmerge.script.plain_clipping import PlainClipping
from agmerge.script.sharded_steps import ShardedSteps
from agmerge.step.config import Config, Updates, planner_for
from agmerge.step.gradient_exchange import Combined, Due, GradientExchange
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.arena import Difference
from agmerge.tensors.parameters import ParameterTable
from agmerge.updates.local_replica import DeltaTable, LocalReplica, OwnStep, own_step
from agmerge.updates.mean_moments import MeanMoments


class UpdateReducer:
    """Reducer with local steps of the optimizer, which exchanges the deltas when they are due."""

    combines_gradients: Literal[False] = False  # p.grad stays this worker's own
    passes = None  # a step uses the gradients that exist

    def __init__(self, members: ParameterTable, config: Config) -> None:
        self.members, self._table = members, DeltaTable(members)
        config = self._fitted(config)
        self._moments: MeanMoments | None = None  # None: they stay as the optimizer makes them
        self._keep_moments(_updates_of(config))
        self.exchange = open_exchange(members, self._table, config, _replanner)
        self.replica = LocalReplica(members, self._table, self.exchange)
        self.participation = Participation(self.exchange, self.replica.compared)
        self.flags_of_all = 0  # flags of all ranks in the last exchange, see Flag
        self._announced: tuple[str, ...] = ()  # parameters with bad gradients, as said in the messages under way
        self._sends_again = False  # a message was under way in the checkpoint that was loaded
        self._receive_at: int | None = None  # the step after which messages under way are applied
        self._due: Due | None = None  # which merge buffers these are of
        self._polls = BackwardPolls(members, self.exchange)
        self._sharded = ShardedSteps(members, self.exchange)
        self._averaged_twice = AveragedTwice(members, self.exchange)
        self._plain_clipping = PlainClipping(members, self.exchange)

    @property
    def updates(self) -> Updates:
        """Return the schedule of the exchanges, as the present config has it."""
        return _updates_of(self.exchange.agreed.config)

    def _fitted(self, config: Config) -> Config:
        """Return ``config`` as it fits the parameters, with as many merge buffers as take turns."""
        updates = _updates_of(config)
        elements = sum(member.local.numel() for member in self._table.parameters())
        return config.changed(updates=updates, planner=planner_for(updates, config.merging.planner, elements))

    def _keep_moments(self, updates: Updates) -> None:
        """Keep the optimizer's moments in the scale of the mean from now on, or no more, as ``updates`` has it."""
        if updates.mean_moments != (self._moments is not None):
            self._moments = MeanMoments(self.members, updates) if updates.mean_moments else None
            self._table.average_along(None if self._moments is None else self._moments.measurement)

    # -- the group of workers -------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Collective. Connect to the present workers, if this has not happened.

        Raises ``ValueError`` for an optimizer that steps shards among several workers.
        """
        if self.participation.outdated:
            self.leave()
        if not self.exchange.group.settled:
            check_not_averaged(self.members)
            self._connect_rescaled()
            self._averaged_twice.begin()
        if not self.exchange.group.alone:
            assert self.exchange.group.comm is not None
            self._sharded.begin(together=self.exchange.group.comm.size == workers.size())

    def _connect_rescaled(self) -> None:
        """Collective. Connect, and scale unsent updates to the number of workers, as residuals are."""
        origin, shared = self.exchange.agreed.carried.origin, self.replica.shared
        displaced = {} if origin is None else {name: shared.displacement(name) for name in shared.own}
        self.participation.connect()
        comm = self.exchange.group.comm
        if origin is not None and comm is not None and comm.size != origin[1]:
            # Where a worker is lost the steps of the exchange under way count once; residuals are scaled elsewhere.
            scaled = shared.in_parameters or not workers.can_regroup()
            factor = comm.size / origin[1] if scaled else 1.0
            shared.put({name: displacement * factor for name, displacement in displaced.items()})
            self.replica.left()

    def leave(self) -> None:
        """Forget the group of workers, and messages under way: they count as not sent.

        The survivors of a lost worker send them again when they are due, at the same step.
        """
        self.participation.leave()
        if not workers.can_regroup():
            self._receive_at = None
        self.replica.shared.forget_sent()

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Use another config, as :meth:`Participation.reconfigure`; unsent updates stay where they are."""
        self.replica.check_not_shown(what)
        self.flush()
        config = self._fitted(config)
        self.participation.reconfigure(config.changed(memory=self.replica.memory_for(config)), what, advice)
        self._keep_moments(self.updates)
        self.replica.refit()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Return the result of :meth:`LocalReplica.saved`, and whether a message has left since the last step.

        A rank that loads it sends that message again: the parameters are as they were when it left.
        """
        is_under_way = self._receive_at is not None and self.updates.overlap == 1
        saved = {**self.replica.saved(), "under_way": is_under_way}
        return saved if self._moments is None else {**saved, "moments": self._moments.saved()}

    def restart(self, saved: Mapping[str, Any] | None) -> None:
        """Begin after a checkpoint, with a message under way if there was one: the next step sends it first.

        ``saved``: a result of :meth:`saved`; None: without it.
        """
        is_under_way = bool(saved and saved.get("under_way")) and self.updates.overlap == 1
        self._receive_at, self._sends_again = None, is_under_way
        if saved is not None and saved.get("moments") and self._moments is not None:
            self._moments.restore(saved["moments"], self._table.parameters(), is_under_way=is_under_way)

    @property
    def moments(self) -> dict[str, Any]:
        """Return how the optimizer's moments are kept, for statistics."""
        return {"kept": "own"} if self._moments is None else self._moments.status()

    # -- clipping ---------------------------------------------------------------------------------------------------

    @property
    def norm_ratio(self) -> float:
        """Return the norm of the mean gradient of all workers, relative to that of this worker's own gradient.

        In [1 / sqrt(workers), 1]: averaging leaves out a part of the noise, which makes up most of a small batch's
        gradient.
        """
        return 1.0 if self._moments is None else math.sqrt(self._moments.energy_ratio)

    def prepare_clipping(self, optimizer: object) -> None:
        """Prepare for a clipping of the gradients, which stay this worker's own: measure them before it."""
        self._plain_clipping.forget()
        if self._moments is not None:
            self._moments.measure(self.replica.steps + 1)

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, wrapper: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Collective. Step the optimizer by itself, then make the exchange that is due. Return the loss, or its result.

        Raises :class:`agmerge.NonFiniteError` on every rank, at the next exchange, where a rank had gradients that were
        not finite, according to ``nonfinite=``. That rank has not stepped.
        """
        self.before_step()
        self._averaged_twice.stepping()
        own = own_step(self.members, wrapper, self._sharded.noting(closure), self.stepping)
        self.after_step(own)
        self._averaged_twice.judge()
        return own.result

    @torch.no_grad()
    def before_step(self) -> None:
        """Collective. Connect, if need be: the optimizer is about to move the parameters."""
        self.replica.check_not_shown("a step")
        self.replica.end_between()
        self.participation.connected(self.connect)
        self.exchange.fault.check()
        self._plain_clipping.look(self.norm_ratio)
        self._sharded.note()
        if self.exchange.group.alone:
            self.replica.absorb_residuals()
        else:
            if self.replica.admit(self.flush):
                self.participation.compare_soon()
            if self._sends_again:
                self._sends_again, count = False, self.replica.own_steps.count
                fragment = self.updates.fragment_at(count)
                self._send(None if fragment is None else self.updates.merge_buffers_of(fragment))

    @torch.no_grad()
    def use_present(self) -> None:
        """Collective. Use the parameters that take part now, in the middle of a step of several optimizers."""
        if not self.exchange.group.alone:
            self.replica.admit(self.flush)

    @torch.no_grad()
    def after_step(self, own: OwnStep) -> None:
        """Collective. Make the exchanges that are due: the optimizer has stepped, or left its step out.

        Raises ``ValueError``, in the first steps, for an optimizer that has stepped shards, and
        :class:`agmerge.NonFiniteError` as :meth:`step` does.
        """
        self._after_step(own)
        if not self.exchange.group.alone:
            self.replica.begin_between()

    def _after_step(self, own: OwnStep) -> None:
        steps = self.replica.own_steps
        steps.check(own, self.exchange)
        steps.made()
        if not self.exchange.group.alone:
            self.replica.strayed.stepped(says=workers.rank() == 0 and workers.bound() is None)
            with self.exchange.fault.recording():
                self._sharded.judge()
            if self._receive_at is not None and steps.count >= self._receive_at:
                self._receive()
        if self.exchange.group.alone:  # perhaps since a moment ago: all others are lost
            self._receive_at = None
            self.replica.follow_own()
            return
        fragment = self.updates.fragment_at(steps.count)
        due = None if fragment is None else self.updates.merge_buffers_of(fragment)
        # With fewer merge buffers than fragments some of these have none.
        if fragment is None or (due is not None and not due(len(self.exchange.agree().plan.counts))):
            self.exchange.agreed.totals.passed(sum(tensor.numel() for tensor in self.replica.shared.base.values()))
            return
        status.current().enter("is in step()", self.exchange.agreed.step)
        if self._moments is not None:
            self._moments.measure(steps.count, counts=own.stepped)
        self._send(due)

    def _send(self, due: Due | None) -> None:
        """Collective. Make the exchange that is due, or begin it, with ``overlap``. ``due``: which merge buffers."""
        steps = self.replica.own_steps
        self._due, self._announced = due, steps.drain()
        overlap = self.updates.overlap if steps.count > self.updates.in_time else 0
        self._receive_at = steps.count + overlap
        if overlap:
            with self.exchange.fault.surviving():  # _receive() goes on without a worker that is lost
                self.exchange.agree()
        if self._moments is not None:
            self._moments.depart()
        if overlap:
            self._polls.attach()
            with self.exchange.fault.surviving():
                self.exchange.start(self._delta, self.participation.flag, self._due, self._announced)
        else:
            self._receive()

    def stepping(self, optimizer: Any) -> None:
        """Prepare moments for a step of ``optimizer``, of finite gradients, which follows at once."""
        if self._moments is not None and not self.exchange.group.alone:
            self._moments.stepping(optimizer)

    def exchange_alone(self) -> int:
        """Collective. Make the exchange due after others' step; return all ranks' flags, without one ``ACTIVE``."""
        self.flags_of_all = int(Flag.ACTIVE)
        self.after_step(OwnStep())
        return self.flags_of_all

    def _receive(self, *, plans: bool = True) -> None:
        """Collective. Receive and apply the exchange that is due, or under way. ``plans``: plan anew, where due."""
        announced, self._announced, self._receive_at = self._announced, (), None
        for combined in self.participation.finish(self.connect, self._delta, self._due, announced):
            with self.exchange.fault.recording():
                self.exchange.commit()
                self._apply(combined)
                combined.buffers.forget_round()
            self.flags_of_all = combined.flags or int(Flag.ACTIVE)  # without a message all are active
        self.participation.end_exchange(plans=plans)

    def _delta(self, name: str) -> torch.Tensor | Difference:
        """Return what is sent of a tensor of the table: a parameter's delta, or the measurement of moments."""
        measured = None if self._moments is None else self._moments.sent(name)
        return self.replica.shared.delta(name) if measured is None else measured

    def _apply(self, combined: Combined) -> None:
        """Apply combined deltas to the parameters, to momenta and to the ratios of moments."""
        moments, comm = self._moments, self.exchange.group.comm
        self.replica.shared.apply(combined, None if moments is None else moments.follow)
        if moments is not None and comm is not None:
            moments.take(combined.updates, comm.size)
            moments.tell(comm.rank)

    @torch.no_grad()
    def flush(self) -> None:
        """Collective. Receive and apply the exchange under way."""
        if self._receive_at is not None and not self.exchange.fault:
            self._receive()
            self.replica.left()

    @torch.no_grad()
    def consolidate(self) -> None:
        """Collective. Exchange all unsent updates, dense: then every parameter is the shared one, to the bit."""
        self.before_step()
        if self.exchange.group.alone:
            return
        self.flush()
        self._due, buffers = None, None
        while buffers is None or buffers is not self.exchange.agreed.buffers:  # else ranks have agreed again meanwhile
            buffers = self.exchange.agree()
            self.replica.shared.take_back(buffers.flat.take_owed(), buffers.comm.size)
            self._announced = self.replica.own_steps.drain()
            with self.exchange.sending_whole():
                self._receive(plans=False)  # its plan is of this exchange alone, and costs are of no such plan
        self.participation.end_exchange(compares=False)
        self.replica.strayed.settled()
        self.replica.left()

    def check_idle(self, what: str) -> None:
        """Collective. Receive and apply the exchange under way: ``what`` may happen then."""
        self.flush()

    def discard(self) -> None:
        """Discard the exchange under way: residuals stay as before it."""
        self.exchange.discard()

    def close(self) -> None:
        """Collective. Consolidate, where steps have been made since; after an error do not wait for others."""
        world, is_ahead = self.exchange.group.world, self.replica.strayed.ahead
        if is_ahead and not self.exchange.fault and workers.current(world) and sys.exc_info()[1] is None:
            self.consolidate()
        self._polls.remove()
        self._plain_clipping.end()
        self.exchange.close()


class BackwardPolls:
    """Hooks of parameters that start the second phases of messages under way, as the backward pass goes on.

    Without them owners would add up their shards when the updates are due. Only of more than two workers, on the host.
    """

    def __init__(self, members: ParameterTable, exchange: GradientExchange) -> None:
        self._members, self._exchange = members, weakref.ref(exchange)
        self._handles: MutableMapping[torch.Tensor, RemovableHandle] = WeakTensorKeyDictionary()  # by parameter

    def attach(self) -> None:
        """Hook every parameter that requires a gradient and has no hook yet, if there is a second phase."""
        exchange = self._exchange()
        if exchange is None or exchange.group.second is None:
            return
        for parameter in self._members.name_all():
            if parameter.requires_grad and parameter.device.type == "cpu" and parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._poll)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _poll(self, parameter: torch.Tensor) -> None:
        exchange = self._exchange()
        if exchange is not None:
            exchange.poll()


def _updates_of(config: Config) -> Updates:
    """Return how updates are exchanged with ``config``."""
    assert config.sync.updates is not None
    return config.sync.updates


def _replanner(buffers: MergeBuffers, times: RunningStepTimes) -> Replanner | None:
    """Return the maker of plans; None where fragments take turns: the first plan stays."""
    return None if _updates_of(buffers.config).takes_turns else Replanner(buffers, times)
