"""The exchange of one optimizer's gradients, from step to step.

Nothing here chooses a collective from what only this rank knows. A rank whose parameters have changed since
the last agreement raises a flag in its messages; then every rank discards the round, agrees anew and repeats
it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

import merging as planning
from agmerge.backends import Backend, status, topology
from agmerge.backends.handshake import require_agreement
from agmerge.engine import divergence
from agmerge.engine.grad_hooks import GradientHooks, HandedOver
from agmerge.engine.grad_scaler import LossScale
from agmerge.errors import NO_GRADIENT, NO_SYNC_LATE, SYNCHRONIZE, TOO_MANY, AGMergeError
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.chrome_trace import Trace
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.metrics.totals import Totals
from agmerge.options.config import Config, check_two_level
from agmerge.planning.replanner import Replanner
from agmerge.runtime import process_sets, workers
from agmerge.step import nonfinite_verdict
from agmerge.step.agreement import open_session
from agmerge.step.merge_buffers import MergeBuffers, State, model_facts
from agmerge.step.round import Round
from agmerge.step.two_level_round import round_for
from agmerge.tensors.parameters import ParameterInfo, ParameterTable
from agmerge.version import __version__


class Reducer:
    """Counts backward passes, keeps the session, and guards against calls out of turn."""

    remedy = SYNCHRONIZE  # for a script that changes gradients

    def __init__(self, members: ParameterTable, config: Config) -> None:
        self.members, self.config, self.passes = members, config, config.passes
        self.stats = Totals()
        self.world: Backend | None = None  # from which it was connected
        self.comm: Backend | None = None
        self.outside = False  # of the process set: this rank steps by itself
        self.nodes: topology.Nodes | None = None  # exchange="two-level"
        self.shard: tuple[int, int] | None = None  # of every tensor, this rank's: which of how many
        self.session: MergeBuffers | None = None
        self.averages = RunningStepTimes()
        self.replanner: Replanner | None = None  # of the session
        self.steps = 0  # committed exchanges; after load_state_dict() the checkpoint's
        self._clock = 0  # the same as of the last agreement, so equal on every rank: what messages say
        self.parked: State = {}  # what is kept and has no place in the session
        self.origin: tuple[int, int] | None = None  # rank and size of the group that it is of
        self.shares: dict[str, int] | None = None  # from a checkpoint, for the next agreement
        self.paused = False  # no_sync()
        self.synchronized = False  # gradients are combined, step() has not been called
        self.flag, self.said = (
            Flag.ACTIVE,
            0,
        )  # what this rank says in its messages (Flag.JOINED: in join()); what all said last
        self.skipped = False  # ... and come to nothing: the inner optimizer must not step
        self.scaling = LossScale(None)
        self._fired: dict[torch.Tensor, int] = {}  # backward passes since the last step
        self._ready = HandedOver()
        self._round: Round | None = None
        self._compared = False  # replicas, after the first step among these workers
        self._recorded: planning.Plan | None = None  # from a checkpoint, for the next agreement
        self._stale = False  # the session's residuals are not the ones to go on with
        self._snapshot: list[tuple[object, ...]] = []
        self._broken: BaseException | None = None
        self._lock = threading.RLock()  # autograd runs the hooks of each device on a thread of its own
        check_two_level(config)
        config.check_patterns(members.name_of(parameter) for parameter in members.name_all())
        self._hooks = GradientHooks(self)
        self._hooks.attach((member.parameter for member in self._members()), members)

    # -- agreement ------------------------------------------------------------------------------------------

    def connect(self, world: Backend) -> None:
        """Collective. Take a communicator of its own and shake hands (G1). Collective."""
        facts = [("library version", __version__), *self.config.facts()]
        facts += model_facts(self._members(), self.config)
        self.world = world
        self.comm = process_sets.communicator(world, self.config.process_set, self.config.timeout)
        self.outside = self.comm is None
        if self.comm is None:
            self._hooks.remove()
            return
        advice = "Give every rank the same model and the same arguments."
        require_agreement(self.comm, facts, what="DistributedOptimizer", advice=advice, timeout=self.config.timeout)
        if self.config.exchange == topology.EXCHANGE:
            self.nodes = topology.form(self.comm, self.config.timeout)
            self.shard = self.nodes.shard

    def _members(self) -> list[ParameterInfo]:
        """Who takes part now, each with its lane."""
        members = self.config.lanes(member for member in self.members.active() if member.parameter.numel())
        for member in members:
            self.config.check(member)
        return members

    def _open(self) -> MergeBuffers:
        """Agree on what there is now, and move what is kept by name."""
        assert self.comm is not None
        order = [self.members.name_of(parameter) for parameter in self._ready]
        if self.session is not None:
            order = [*(slot.name for slot in self.session.layout.slots), *order]  # newcomers follow
            self.parked = {key: view.clone() for key, view in self.state().items()}
        members = self._members()
        self.config = self.config.opened(members, tells=self.comm.rank == 0)
        session, self.steps = open_session(
            self.comm, self.config, members, order, self.steps, self._recorded, self.nodes, self.shares
        )
        self._clock, self._recorded, self.shares = self.steps, None, None
        session.take(self.parked)
        self._hooks.attach((member.parameter for member in members), self.members)
        self.session, self._snapshot, self._stale = session, self.members.snapshot(), False
        self._forget(session)
        self.replanner = Replanner(session, self.averages)
        return session

    def resume(self, state: State, steps: int, plan: planning.Plan | None) -> None:
        """Take what a checkpoint has kept; the next step agrees on it and moves it in."""
        self.check_idle("load_state_dict()")
        self.parked, self.steps, self._recorded = dict(state), steps, plan
        self.shares = None
        self._clear()
        self._stale = self.session is not None

    def leave(self) -> None:
        """Forget the group, and how it broke. Residuals are parked as they were after the last step."""
        if self.comm is not None:
            self.origin = (self.comm.rank, self.comm.size)
        self.parked = {key: view.clone() for key, view in self.state().items()}
        self._recorded, self.shares, self.outside, self._compared = self.plan(), self.shares_kept(), False, False
        self.comm = self.nodes = self.session = self.replanner = self._round = self._broken = None

    def reconfigure(self, config: Config) -> None:
        """Collective. Go on with another compressor from the next step on, residuals and plan as they are."""
        self.check_idle("set_compressor()")
        check_two_level(config)
        if config.partial is not None:
            config = replace(config, partial=self.config.partial)  # what has a residual by now stays sparse
        before, self.config = self.config, config
        try:
            facts = [*config.facts(), *model_facts(self._members(), config)]
            if self.comm is not None:
                advice = "Give every rank the same compressor, at the same step."
                require_agreement(self.comm, facts, what="set_compressor()", advice=advice, timeout=config.timeout)
        except BaseException:
            self.config = before
            raise
        self._reopen()

    def _reopen(self) -> None:
        """Agree anew in the next step, with all that is kept as it is."""
        self.resume({key: view.clone() for key, view in self.state().items()}, self.steps, self.plan())

    def state(self) -> State:
        """What this rank keeps from step to step."""
        current = self.session.state() if self.session is not None and not self._stale else {}
        return {**self.parked, **current}

    def residuals(self) -> dict[str, torch.Tensor]:
        """Every residual of this rank, by name."""
        return {name: tensor for (kind, name), tensor in self.state().items() if kind == "residual"}

    def plan(self) -> planning.Plan | None:
        """The plan in use, or to be used; None before the first agreement."""
        return self.session.plan if self.session is not None and not self._stale else self._recorded

    def shares_kept(self) -> dict[str, int] | None:
        """How many elements of each tensor a step sends, by importance; None where that is not known."""
        live = self.session if self.session is not None and not self._stale else None
        return self.shares if live is None or self.shares is not None else live.shares_by_name()

    def window(self) -> dict[torch.Tensor, int]:
        """How many backward passes each parameter has seen in the step that has begun; one that broke starts again."""
        return {} if self.synchronized or self._broken is not None else dict(self._fired)

    def count(self, parameter: torch.Tensor, fired: int) -> None:
        """``parameter`` has seen so many backward passes already; its gradient is there."""
        self._fired[parameter] = fired
        if fired == self.passes:
            self._ready.add(parameter)

    # -- a step ---------------------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Collective. The hook: ``parameter.grad`` has been accumulated once more. Called for every tensor."""
        with self._lock:
            if self.synchronized:
                self._clear()  # synchronize() without step(): the update is discarded
            if not self._fired:
                status.current().enter("is in a backward pass", self._clock)
            if self.paused:
                if parameter in self._ready:
                    self._ready.overrun = True
                    raise AssertionError(f"{NO_SYNC_LATE} Parameter: {self.members.name_of(parameter)!r}.")
                self._fired.setdefault(parameter, 0)  # a step has begun: what it has so far belongs in a checkpoint
                return
            self._check_unbroken()
            fired = self._fired.get(parameter, 0) + 1
            if fired > self.passes:
                self._ready.overrun = True
                raise AssertionError(TOO_MANY.format(self.members.name_of(parameter), fired, self.passes))
            self._fired[parameter] = fired
            if fired == self.passes:
                round_ = self._attempt()
                # One that was unfrozen during backward() has no place: _attach() will say so.
                if round_ is not None and not round_.dirty and parameter in round_.session.slot_of:
                    try:
                        round_.feed(parameter, self._gradient(parameter))
                    except BaseException as error:  # as _breaking() does, without a generator a tensor
                        self._broken = error
                        raise
                self._ready.add(parameter)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Collective. Send what is left, receive, and make every ``p.grad`` the agreed update. Collective."""
        with self._lock:
            self._check_unbroken()
            if self.outside or self.synchronized:
                return  # nothing new: a backward pass would have begun another round
            status.current().enter("is in step()", self._clock)
            changed = self._ready.error(self.members, self.steps, self.remedy)
            with self._breaking():
                round_ = self._attempt()
                if round_ is None or not round_.complete(self._gradient):
                    round_ = round_for(self._open(), self._clock, self.stats, dirty=False, flags=self.flag)
                    if not round_.complete(self._gradient):
                        raise AGMergeError("parameters changed while ranks agreed on them; change them between steps")
                self.averages.observe(round_.recorder)
                self.said = round_.said
                error = nonfinite_verdict.judge(round_, self._attach) or changed
                self.skipped = round_.nonfinite
            if error is not None:
                self._clear()  # nothing is broken: all ranks are at the same place
                raise error
            self.synchronized = True

    def end_step(self) -> None:
        """Collective. The inner optimizer has stepped: the residuals change places."""
        if self.outside or self.skipped:
            self._clear()
            return
        assert self.session is not None and self.comm is not None and self.replanner is not None
        self.session.swap()
        self.steps = self._clock = self._clock + 1
        status.current().enter("is in its script, before a backward pass", self._clock)
        session = self.session
        self.stats.stepped(len(session.messages), session.layout.numel, session.tensors.numel)
        self._clear()
        due = not self._compared or (self.config.check_every and self.steps % self.config.check_every == 0)
        if due and not self.said & Flag.JOINED:  # a rank that has joined may step otherwise, until all have
            with self._breaking():
                divergence.check(self.comm, self.members, self.steps, self.config.timeout)
            self._compared = True
        with self._breaking():
            if not self._stale:
                plan = self.replanner.after_step(self._clock)
                if plan is not None:
                    self._follow(plan)
                self._settle()

    def _follow(self, plan: planning.Plan) -> None:
        """Another plan from the next step on. Residuals stay where they are."""
        assert self.session is not None
        self.session.follow(plan)
        self._forget(self.session)

    def _forget(self, session: MergeBuffers) -> None:
        """Drop what was measured, or kept by sparsifiers, of the merge buffers that there were."""
        self.averages.forget()
        self.tell(self.averages.trace)
        if self.config.sparsifier is not None:
            self.config.sparsifier.retain(session.keys())
        if self.stats.proof is not None:
            self.stats.proof.reset()

    def _settle(self) -> None:
        """Go on with the cut of dense="partial" that the adaptation has found, once it has: see settle()."""
        assert self.session is not None
        before, self.config = self.config.partial, self.session.config
        if before is not None and self.config.partial is not None and before.most != self.config.partial.most:
            self._reopen()

    def measured(self) -> planning.Measurements | None:
        """What the plan in use was made from."""
        return self.replanner.measured if self.replanner is not None and not self._stale else None

    def measure(self) -> planning.Measurements:
        """Collective. Measure costs now, for reports; the plan stays. Collective."""
        self.check_idle("measure()")
        if self.replanner is None or self._stale or not self.averages.typical():
            raise AGMergeError("measure() needs a step to measure: call it after step()")
        with self._breaking():
            return self.replanner.measure(self._clock)

    def tell(self, trace: Trace | None) -> None:
        if trace is not None and self.session is not None:
            trace.follow([slot.name for slot in self.session.layout.slots], self.session.plan.counts)

    def _attempt(self) -> Round | None:
        """The round under way; None before the first agreement. It begins with the first tensor that is ready."""
        if self._round is None and self.session is not None and workers.current(self.world):
            dirty = self._stale or self.members.snapshot() != self._snapshot
            self._round = round_for(self.session, self._clock, self.stats, dirty=dirty, flags=self.flag)
        return self._round

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if self.flag != Flag.JOINED and parameter.grad is not None and parameter.grad.layout != torch.strided:
            self.members.make_dense(parameter, self.config.sparse_as_dense)
        return self.scaling.divided(parameter, None if self.flag == Flag.JOINED else parameter.grad)

    def _attach(self, attempt: Round) -> None:
        """Make the updates the gradients; none may reach the inner optimizer that was not combined (G3)."""
        session = attempt.session
        for slot, parameter in zip(session.layout.slots, session.parameters, strict=True):
            if parameter.dtype != slot.lane.dtype or parameter.device != slot.lane.device:
                raise AGMergeError(
                    f"parameter {slot.name!r} changed from {slot.lane.dtype} on {slot.lane.device} to "
                    f"{parameter.dtype} on {parameter.device} between backward() and step(); change it between steps"
                )
            used = self.config.zero_unused or attempt.used[slot.index] or attempt.left_over(slot)
            parameter.grad = session.gradient(slot) if used else None
        self.scaling.multiply(session.parameters)
        if not any(attempt.used) and self.flag == Flag.ACTIVE:
            warnings.warn(NO_GRADIENT, stacklevel=5)
        if self.members.snapshot() != self._snapshot:
            for member in self._members():
                if member.parameter not in session.slot_of and member.parameter.grad is not None:
                    raise AGMergeError(
                        f"parameter {member.name!r} was added or unfrozen during backward(), and its gradient was "
                        "not combined; do that between step() and the next backward()"
                    )

    def _clear(self) -> None:
        self._fired, self._ready, self._round, self.synchronized, self.skipped = {}, HandedOver(), None, False, False
        self.scaling.clear()

    discard = _clear  # for whoever calls step() instead of the script

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """An error inside leaves ranks at different places; nothing can be exchanged after it."""
        try:
            yield
        except BaseException as error:
            self._broken = error
            raise

    # -- guards ---------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Whether gradients are on their way."""
        return len(self._ready) > 0 and not self.synchronized

    def abandon(self) -> bool:
        """Collective. End the exchange of gradients that a refused pass has changed; whether none is left then."""
        if self._ready.overrun and not self.synchronized:
            try:
                Reducer.synchronize(self)
            except AGMergeError:  # it says what the refused pass has changed
                self._check_unbroken()
        return not self.unfinished

    def check_idle(self, what: str) -> None:
        """Raise unless ``what`` may happen now: no backward pass waits for its ``synchronize()``."""
        if any(self._fired.values()) and not self.synchronized:
            raise AGMergeError(f"{what} was called between backward() and step(); call it after step()")

    def reset_counters(self, passes: int) -> None:
        self.check_idle("set_backward_passes_per_step()")
        self.passes = passes

    def close(self) -> None:
        """Take the hooks off and give the communicator back."""
        self._hooks.remove()
        self._broken = AGMergeError("this optimizer was closed")
        if self.comm is not None:
            if self.nodes is not None:
                self.nodes.close()
            self.comm.close()

    def _check_unbroken(self) -> None:
        if self._broken is not None:
            raise AGMergeError(f"an earlier error ended this exchange: {self._broken}") from self._broken
