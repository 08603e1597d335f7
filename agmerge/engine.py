"""One step of the exchange: hooks feed tensors in, messages leave in plan order, ``synchronize`` ends it.

Nothing here chooses a collective from what only this rank knows. A rank whose parameters have changed since
the last agreement raises a flag in its messages; then every rank discards the round, agrees anew and repeats
it, which is possible because neither gradients nor residuals are touched before all messages are known.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping, Sequence

import torch

from agmerge import sentinel
from agmerge.backends import Backend
from agmerge.config import Config
from agmerge.errors import AGMergeError
from agmerge.exchanges import Exchange, Pending
from agmerge.handshake import agree
from agmerge.hooks import Hooks
from agmerge.members import Member, Members
from agmerge.session import Route, Session, model_facts, open_session
from agmerge.stats import Stats
from agmerge.wire import RELAYOUT, Control
from sparsifiers import Selection, budget

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)


class Round:
    """What has happened since the last ``step()``."""

    def __init__(self, dirty: bool) -> None:
        self.dirty = dirty  # this rank's parameters are not those of the session
        self.fired: dict[torch.Tensor, int] = {}
        self.ready: dict[torch.Tensor, None] = {}  # in readiness order
        self.begin([])

    def begin(self, buffers: Sequence[int]) -> None:
        """Start sending, from the first merge buffer. ``buffers``: tensors still missing from each."""
        self.missing = list(buffers)
        self.compensated: set[int] = set()
        self.pending: list[tuple[Exchange, Route, Pending]] = []
        self.next = 0


class Engine:
    """The exchange of one optimizer's gradients."""

    def __init__(self, members: Members, config: Config) -> None:
        self.members, self.config = members, config
        self.passes = config.passes
        self.stats = Stats()
        self.comm: Backend | None = None
        self.session: Session | None = None
        self.parked: dict[str, torch.Tensor] = {}  # residuals that have no place in the session
        self.paused = False
        self.synchronized = False
        self.steps = 0
        self._used: dict[str, bool] = {}
        self._stale = False
        self._snapshot: list[tuple[object, ...]] = []
        self._round: Round | None = None
        self._broken: BaseException | None = None
        self._lock = threading.RLock()  # autograd runs the hooks of each device on a thread of its own
        self._hooks = Hooks(self)
        self._hooks.attach(member.parameter for member in self._members())

    # -- agreement ------------------------------------------------------------------------------------------

    def connect(self, world: Backend) -> None:
        """Take a communicator of its own and shake hands (G1). Collective."""
        from agmerge import __version__

        self.comm = world.duplicate("agmerge optimizer", self.config.timeout)
        facts = [("library version", __version__), *self.config.facts()]
        facts += model_facts(self._members(), self.config)
        advice = "Give every rank the same model and the same arguments."
        agree(self.comm, facts, what="DistributedOptimizer", advice=advice, timeout=self.config.timeout)

    def _members(self) -> list[Member]:
        return [member for member in self.members.active() if member.parameter.numel()]

    def _open(self, round_: Round) -> Session:
        """Agree on what there is now, and move what is kept by name."""
        assert self.comm is not None
        order = [self.members.name_of(parameter) for parameter in round_.ready]
        if self.session is not None:
            names = [slot.name for slot in self.session.layout.slots]
            order = [*names, *order]  # the agreed order stands; newcomers follow as they were seen
            self._used |= dict(zip(names, self.session.used, strict=True))
            self.parked = {name: view.clone() for name, view in self.residuals().items()}
        members = self._members()
        session, self.steps = open_session(self.comm, self.config, members, order, self.steps, self._used)
        session.take(self.parked)
        if self.config.sparsifier is not None:
            self.config.sparsifier.retain(session.keys())
        self._hooks.attach(member.parameter for member in members)
        self.session, self._snapshot = session, self.members.snapshot()
        self._stale = round_.dirty = False
        return session

    def replace_residuals(self, residuals: Mapping[str, torch.Tensor], steps: int) -> None:
        """Take residuals from a checkpoint; they are agreed on and moved in at the next step."""
        self.check_idle("load_state_dict()")
        self.parked, self.steps = dict(residuals), steps
        self._round, self.synchronized = None, False
        self._stale = self.session is not None

    def residuals(self) -> dict[str, torch.Tensor]:
        """Every residual of this rank, by name."""
        current = self.session.residuals() if self.session is not None and not self._stale else {}
        return {**self.parked, **current}

    # -- backward -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_gradient(self, parameter: torch.Tensor) -> None:
        """The hook: ``parameter.grad`` has been accumulated once more."""
        if self.paused:
            return
        with self._lock:
            round_ = self._current_round()
            fired = round_.fired.get(parameter, 0) + 1
            if fired > self.passes:
                raise AssertionError(
                    f"{TOO_MANY} Parameter {self.members.name_of(parameter)!r} got gradient number {fired}; "
                    f"backward_passes_per_step is {self.passes}. Likely causes: a second backward() without "
                    "step(), or one part of the model checkpointed twice with use_reentrant=True."
                )
            round_.fired[parameter] = fired
            if fired == self.passes:
                round_.ready[parameter] = None
                if self.session is not None and not round_.dirty:
                    self._compensate(round_, self.session, parameter)
                    self._launch_complete(round_, self.session)

    def _current_round(self) -> Round:
        self._check_unbroken()
        if self._round is None or self.synchronized:
            # After synchronize() without step(): the update is discarded, the residuals are as they were.
            self._round = Round(self._changed())
            self.synchronized = False
            if self.session is not None:
                self._round.begin(self.session.plan.counts)
        return self._round

    def _changed(self) -> bool:
        return self.session is not None and (self._stale or self.members.snapshot() != self._snapshot)

    def _compensate(self, round_: Round, session: Session, parameter: torch.Tensor) -> None:
        slot = session.slot_of[parameter]
        session.arenas[slot.lane].compensate(slot, self._gradient(parameter))
        round_.compensated.add(slot.index)
        round_.missing[session.buffer_of[slot.index]] -= 1

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is None or gradient.layout == torch.strided:
            return gradient
        if not self.config.sparse_as_dense:
            raise ValueError(
                f"parameter {self.members.name_of(parameter)!r} has a gradient of layout {gradient.layout}; "
                "pass sparse_as_dense=True, or build the embedding with sparse=False"
            )
        return gradient.to_dense()

    def _launch_complete(self, round_: Round, session: Session) -> None:
        """Send merge buffers in plan order, as far as they are complete."""
        while round_.next < len(session.buffers) and round_.missing[round_.next] == 0:
            for route in session.buffers[round_.next]:
                round_.pending.append((route.exchange, route, self._start(round_, session, route)))
            round_.next += 1

    def _start(self, round_: Round, session: Session, route: Route) -> Pending:
        loads = [session.load(segment) for segment in route.segments]
        offers = [self._offer(round_, session, route, load.work, index) for index, load in enumerate(loads)]
        used = tuple(parameter.grad is not None for parameter in (session.parameters[s.index] for s in route.slots))
        flags = RELAYOUT if round_.dirty else 0
        control = Control(self.steps, session.fingerprint, route.buffer, flags, used)
        pending = route.exchange.start(route.name, loads, offers, control)
        self.stats.sent(pending.bytes, pending.elements)
        return pending

    def _offer(
        self, round_: Round, session: Session, route: Route, work: torch.Tensor, index: int
    ) -> Selection | None:
        segment, sparsifier = route.segments[index], self.config.sparsifier
        if not segment.lane.sparse or sparsifier is None:
            return None
        k, shapes = budget(sparsifier.density, segment.numel), segment.shapes
        if round_.dirty:
            capacity = sparsifier.capacity(segment.length, k=k, step=self.steps, shapes=shapes)
            return Selection(torch.zeros(capacity, dtype=torch.int32, device=work.device), 0)
        return sparsifier.select(work, k=k, key=route.key(segment), step=self.steps, shapes=shapes)

    # -- the end of a step ----------------------------------------------------------------------------------

    @torch.no_grad()
    def synchronize(self) -> None:
        """Send what is left, receive, and make every ``p.grad`` the agreed update. Collective."""
        with self._lock:
            self._check_unbroken()
            if self.synchronized:
                return  # nothing new: another backward pass would have begun a new round
            round_ = self._current_round()
            try:
                self._synchronize(round_)
            except BaseException as error:
                self._broken = error
                raise
            self.synchronized = True

    def _synchronize(self, round_: Round) -> None:
        session = self.session
        if session is None or not self._exchange(round_, session):
            session = self._open(round_)
            round_.begin(session.plan.counts)
            if not self._exchange(round_, session):
                raise AGMergeError("parameters changed again while ranks were agreeing on a change; change them between steps")
        self._attach(session)

    def _exchange(self, round_: Round, session: Session) -> bool:
        """Finish the round; False, with nothing written, if a rank asks for a new agreement."""
        for slot, parameter in zip(session.layout.slots, session.parameters, strict=True):
            if slot.index not in round_.compensated:
                if round_.dirty:
                    round_.missing[session.buffer_of[slot.index]] -= 1
                else:
                    self._compensate(round_, session, parameter)
        self._launch_complete(round_, session)
        agreed = True
        any_used = False
        for number, (exchange, route, pending) in enumerate(round_.pending):
            begin = time.perf_counter()
            control = exchange.wait(pending)
            self.stats.exposed_seconds += time.perf_counter() - begin
            if number == 0 and control.flags & RELAYOUT:
                agreed = False  # every rank sees this flag, in its first message, before it writes anything
            if agreed:
                exchange.finish(pending)
                for slot, used in zip(route.slots, control.used, strict=True):
                    session.used[slot.index] |= used
                    any_used |= used
        if agreed and not any_used:
            warnings.warn(
                "no rank had a gradient for any parameter in this step. If that is not intended, the optimizer may "
                "hold other parameters than the model (load_state_dict(assign=True) replaces them).",
                stacklevel=4,
            )
        round_.pending = []
        return agreed

    def _attach(self, session: Session) -> None:
        for slot, parameter in zip(session.layout.slots, session.parameters, strict=True):
            if parameter.dtype != slot.lane.dtype or parameter.device != slot.lane.device:
                raise AGMergeError(
                    f"parameter {slot.name!r} changed from {slot.lane.dtype} on {slot.lane.device} to "
                    f"{parameter.dtype} on {parameter.device} between backward() and step(); change it between steps"
                )
            if session.used[slot.index] or self.config.zero_unused:
                parameter.grad = session.gradient(slot)

    def end_step(self) -> None:
        """The inner optimizer has stepped: the residuals change places."""
        if self.session is None or self.comm is None:
            return
        self.session.swap()
        self.steps += 1
        self.stats.stepped(len(self.session.buffers), self.session.layout.numel)
        self._round, self.synchronized = None, False
        if self.config.check_every and self.steps % self.config.check_every == 0:
            sentinel.check(self.comm, self.members, self.steps, self.config.timeout)

    def close(self) -> None:
        """Take the hooks off and give the communicator back; collective on some backends."""
        self._hooks.remove()
        self._broken = AGMergeError("this optimizer was closed")
        if self.comm is not None:
            self.comm.close()

    # -- guards ---------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Whether gradients are on their way: neither synchronized nor untouched."""
        return self._round is not None and not self.synchronized and bool(self._round.ready)

    @property
    def begun(self) -> bool:
        """Whether a backward pass has been counted that no ``synchronize()`` has ended."""
        return self._round is not None and not self.synchronized and bool(self._round.fired)

    def check_idle(self, what: str) -> None:
        """Raise unless ``what`` may happen now: no gradient is on its way."""
        if self.begun:
            raise AGMergeError(f"{what} was called between backward() and step(); call it after step()")

    def reset_counters(self, passes: int) -> None:
        """Start counting backward passes anew."""
        self.check_idle("set_backward_passes_per_step()")
        self.passes, self._round = passes, None

    def _check_unbroken(self) -> None:
        if self._broken is not None:
            raise AGMergeError(f"an earlier error ended this exchange: {self._broken}") from self._broken
