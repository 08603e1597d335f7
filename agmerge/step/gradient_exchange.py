# SPDX-License-Identifier: Apache-2.0
"""Exchange of named tensors among all ranks, which returns the combined ones.

This is the interface between a round, below it, and a caller with tensors to combine, above it. It knows no hooks, no
``p.grad``, no backward passes and no optimizer. The hook-driven :class:`agmerge.engine.reducer.Reducer` is one caller.

No collective here is chosen from what only this rank knows. A rank with tensors changed since the last agreement
raises a flag in its messages; then every rank discards the round, agrees again and repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

import merging
from agmerge.backends import Backend
from agmerge.backends.handshake import Fact, gather_texts
from agmerge.errors import AGMergeError, NoAnswer, NonFiniteError, and_more
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.step_times import StoppedClock
from agmerge.step.agreed_state import AgreedState, CarriedState, OnAgreement, TensorTable
from agmerge.step.config import TWO_LEVEL, Config
from agmerge.step.gradient_norm import GradientNorm
from agmerge.step.group import Group
from agmerge.step.kept_results import NEW, BetweenSteps, KeptResults, Position, Settled, settle
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.round import GradientOf, Round
from agmerge.step.two_level_round import TwoLevelRound
from agmerge.tensors.arena import Difference
from agmerge.tensors.layout import Slot
from agmerge.tensors.nonfinite import SKIP


class Combined:
    """Result of one round. Tensors are views, valid until the next round begins.

    ``is_part``: the merge buffers that had been received when a worker was lost. The others are exchanged in a round of
    their own, once this one is committed and the exchange is connected to the survivors. ``follows``: such a part.
    """

    def __init__(
        self,
        attempt: Round,
        zero_unused: bool,
        norm: GradientNorm | None = None,
        *,
        is_part: bool = False,
        follows: bool = False,
    ) -> None:
        self._round, self._zero_unused, self._norm = attempt, zero_unused, norm
        self.is_part, self.follows = is_part, follows
        self.is_whole = attempt.is_complete  # has all tensors
        self.buffers: MergeBuffers = attempt.buffers
        self.skipped = attempt.nonfinite  # the step comes to nothing: a rank has found an infinity or NaN
        self.used: Sequence[bool] = attempt.used  # by slot: whether any rank had a tensor
        self.flags = attempt.flags_of_all  # flags of all ranks, see Flag
        # Once computed. A cached_property would do, but before Python 3.12 one lock is for all ranks that are threads.
        self._updates: Mapping[str, torch.Tensor | None] | None = None

    @property
    def updates(self) -> Mapping[str, torch.Tensor | None]:
        """Return the combined tensor of each name, in the shape and strides of the table's.

        None: no rank had one, and no residual of it was sent. All are infinite in a skipped step. Nothing is computed
        in a step in which this is not read. Tensors in ``buffers.store.received`` are missing, and those of which
        ``buffers.store.pieces`` has pieces.
        """
        if self._updates is None:
            self._updates = self._computed()
        return self._updates

    def _computed(self) -> Mapping[str, torch.Tensor | None]:
        """Return the combined tensors, see :attr:`updates`."""
        if self.skipped:
            for slot in self._round.slots():
                if slot.index in self.buffers.flat.in_place.slots and not self.buffers.flat.takes_pieces(slot):
                    self.buffers.flat.updates.of(slot).fill_(torch.inf)
        received = {slot.name for segment, *_ in self.buffers.store.received for slot in segment.slots}
        updates = {
            slot.name: self.buffers.flat.update(slot) if self._zero_unused or self._round.has_update(slot) else None
            for slot in self._round.slots()
            if slot.name not in received and not self.buffers.flat.takes_pieces(slot)
        }
        if self._norm is not None:
            self._look_at([slot for slot in self._round.slots() if updates.get(slot.name) is not None], self._norm)
        self.buffers.flat.in_place.let_go()  # else gradients would be held until the next backward pass
        return updates

    def _look_at(self, slots: Sequence[Slot], norm: GradientNorm) -> None:
        """Give the updates of ``slots``, which exist, to ``norm``."""
        of, noises = self.buffers.flat.updates.of, self._round.noises
        noisy = {slot.index for slot in slots if noises and self.buffers.is_quantised(slot)}
        norm.take(
            lambda: (of(slot) for slot in slots if slot.index not in noisy),
            (of(slot) for slot in slots if slot.index in noisy),
            noises,
            may_hold=not any(slot.index in self.buffers.flat.in_place.slots for slot in slots),
            adds=self.follows,
        )


# The error that has ended an exchange: after it ranks are at different places, and nothing can be exchanged. In an
# elastic group a lost rank ends nothing: the others meet in the next group, and continue.


class Fault:
    """The error that has ended an exchange; none at first. ``abort``: called where a rank is missing.

    ``survives``: the others go on without a rank that is missing: see ``lost``.
    """

    def __init__(self, abort: Callable[[], None], *, survives: bool = False) -> None:
        self.lost: NoAnswer | None = None  # in an elastic group: a rank is missing, and nothing can be sent in it
        self._error: BaseException | None = None
        self._abort, self._survives = abort, survives

    def __bool__(self) -> bool:
        return self._error is not None

    def record(self, error: BaseException | None) -> None:
        """Record an error, after which :meth:`check` raises; None: there is none, in another group."""
        self.lost = None
        if isinstance(error, NoAnswer):
            self._abort()
            if self._survives:
                self.lost = error
                return
        self._error = error

    def check(self) -> None:
        """Raise :class:`agmerge.AGMergeError` if an error has ended the exchange."""
        if self._error is not None:
            raise AGMergeError(f"AGM124: An earlier error ended this exchange: {self._error}") from self._error

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record an error that leaves the block, and let it pass."""
        try:
            yield
        except BaseException as error:
            self.record(error)
            raise

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Record an error that leaves the block, and let it pass, unless the next exchange goes on without the lost."""
        try:
            with self.recording():
                yield
        except NoAnswer:
            if self.lost is None:
                raise


# The verdict of all ranks on gradients that are infinite or NaN, at the same step. It comes once all messages of the
# step have arrived. Nothing of an attempt is kept before ``step()``, so there is little to undo.

MOST_IN_A_ROW = 100  # skipped steps: a scaler halves its scale at each, and has found the right one long before
GIVEN_UP = (
    "AGM119: Step {step} is abandoned on all ranks: {why}. Parameters and residuals are unchanged. Call zero_grad() "
    "to continue with the next batch, or end the script."
)


def resolve_nonfinite(attempt: Round) -> AGMergeError | None:
    """Collective. Decide about an attempt in which a rank has found an infinity or NaN, or has given up.

    Either all updates become infinite, so that every GradScaler backs off, and None is returned; or the result is an
    error, the same on every rank, for the caller to raise. With every gradient finite, nothing happens.
    """
    if not attempt.nonfinite:
        return None
    buffers, totals = attempt.buffers, attempt.totals
    config = buffers.config
    policy = config.guards.nonfinite
    if config.sync.updates is None and policy == SKIP:
        totals.skipped(buffers.layout.numel, buffers.flat.tensors.numel)
        if totals.skipped_in_a_row < MOST_IN_A_ROW:
            for slot in buffers.layout.slots:
                if slot.index not in buffers.flat.in_place.slots:  # a gradient of this rank, until its update is read
                    buffers.flat.updates.of(slot).fill_(torch.inf)
            return None
    own = json.dumps([attempt.guard.given_up, attempt.guard.parameters_found()])
    texts = gather_texts(buffers.comm, own.encode(), "nonfinite", buffers.config.guards.timeout)
    said = [json.loads(text) for text in texts]
    why = "; ".join(f"rank {rank} {words}" for rank, (words, _) in enumerate(said) if words)
    if why:
        return AGMergeError(GIVEN_UP.format(step=attempt.step, why=why))
    where = _described([names for _, names in said])
    if config.sync.updates is not None:
        return NonFiniteError(
            f"AGM106: Gradients or updated parameters are infinite or NaN: {where}. The shared parameters are "
            "unchanged. Call zero_grad() to continue without this step. nonfinite='skip' skips such steps on the "
            "affected rank. If the parameters are not finite, load a checkpoint.",
            where,
        )
    if policy == SKIP:
        return NonFiniteError(
            f"AGM108: {totals.skipped_in_a_row} steps in a row were skipped because of infinite or NaN gradients; in "
            f"this step: {where}. Training does not recover by itself. Check the loss, the data and the learning rate.",
            where,
        )
    return NonFiniteError(
        f"AGM106: Gradients are infinite or NaN: {where}. Parameters and residuals are unchanged. Call zero_grad() to "
        "continue without this step. nonfinite='skip' skips such steps, and scaler= supports float16 under autocast.",
        where,
    )


def _described(names_by_rank: Iterable[list[str]]) -> str:
    """Return a text that names the parameters that each rank has found."""
    return "; ".join(f"rank {rank}: {and_more(names)}" for rank, names in enumerate(names_by_rank) if names)


# The exchange.

Due = Callable[[int], Collection[int]]  # of so many merge buffers, the numbers of those that are exchanged


class GradientExchange:
    """Exchange that combines the tensors of ``table`` over the ranks of one group, step by step.

    :meth:`connect` once. In each step :meth:`ready` for each tensor as soon as it exists, :meth:`finish` for the
    combined ones, :meth:`commit` to keep the residuals, and ``agreed.replan()`` if plans may change. Or :meth:`discard`
    in place of ``commit``: then nothing of the step is kept. ``is_current`` returns whether ``world``, from which it
    was connected, still exists: where it does not, nothing is sent before it is connected again. ``notices``: returns
    further flags for the messages of a round that begins. ``survives``: if a rank is lost the others go on, see
    :meth:`catch_up`; the results of collectives are kept for that.
    """

    def __init__(
        self,
        table: TensorTable,
        config: Config,
        on_agreement: OnAgreement = lambda buffers, times: None,
        is_current: Callable[[Backend | None], bool] = lambda world: True,
        notices: Callable[[], int] = lambda: 0,
        *,
        survives: bool = False,
    ) -> None:
        self.group = Group(KeptResults() if survives else None)
        self.fault = Fault(self.group.abort, survives=survives)
        self.agreed = AgreedState(table, config, on_agreement, self.group)
        self._is_current, self._notices = is_current, notices
        self.norm = GradientNorm()  # of the last step, where gradients are combined before it ends
        self._handed: dict[str, torch.Tensor | None] = {}  # gradients of this step, in readiness order
        self._round: Round | None = None  # under way
        self._why_given_up = ""  # while this rank gives a step up: why
        self._rounds = 0  # that were received to their end
        self._is_received = False  # the round under way was, and is neither committed nor discarded
        self._parts = 0  # merge buffers of this step that are committed, in an earlier group
        self.between = BetweenSteps()  # what is told to the survivors of a lost worker

    # -- the group ------------------------------------------------------------------------------------------------

    def connect(
        self,
        world: Backend,
        comm: Backend | None,
        facts: Sequence[Fact] | None = None,
        second: Backend | None = None,
    ) -> bool:
        """Collective. Exchange among the ranks of ``comm``, as :meth:`Group.connect` does; None: not this one.

        ``facts``: compared between ranks; None: those of the config and the tensors. Residuals of an earlier group are
        scaled to the number of workers of this one. Returns False where they are of other shards than this rank has
        now, and are dropped.
        """
        agreed, shard_before = self.agreed, self.group.shard
        facts, devices = agreed.facts() if facts is None else facts, agreed.devices()
        self.group.connect(world, comm, second, agreed.config, facts, devices)
        if comm is None:
            return True
        agreed.totals.among(comm.size)
        carried = agreed.carried
        if carried.origin is not None and carried.tensors and self.group.shard != shard_before:
            agreed.restore(replace(carried, tensors={}, origin=None), agreed.steps)
            return False
        carried.fit(agreed.config.sync.op, comm.size)
        return True

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Use another config from the next step on, as :meth:`AgreedState.reconfigure` does."""
        self.agreed.reconfigure(config, what, advice)
        self.discard()

    def restore(self, carried: CarriedState, steps: int, shard: tuple[int, int] | None) -> None:
        """Replace the state and the number of exchanges by earlier ones, as :meth:`AgreedState.restore` does.

        ``shard``: which shard of each tensor ``carried`` has, for a rank that has no group yet.
        """
        self.agreed.restore(carried, steps)
        if self.group.comm is None:
            self.group.assume(shard)
        self.discard()

    def leave(self) -> None:
        """Forget the group, and how it broke. The state after the last step is carried over."""
        self.agreed.leave()
        self.group.leave()
        self.fault.record(None)
        self._round = None

    def close(self) -> None:
        """Close the communicators. Nothing can be exchanged any more."""
        if self._round is not None:
            self._round.let_go()
        self.fault.record(AGMergeError("AGM123: This optimizer is closed. Create a new one."))
        self.group.close()

    # -- a step ---------------------------------------------------------------------------------------------------

    def ready(self, name: str, tensor: torch.Tensor | None, *, stays: bool = False) -> torch.Tensor | None:
        """Collective. Hand over a tensor (None: this rank has none), and send the merge buffers that are complete now.

        ``tensor``: of the table's shape, dtype and device; not to be changed before :meth:`finish`. Returns the tensor
        to use in its place until then: the same numbers, perhaps where the update will be, so that memory is freed.
        ``stays``: the caller keeps it in any case.
        """
        self.fault.check()
        held, attempt = tensor, None if self.fault.lost else self._attempt()
        # A tensor that joined the table since the last agreement has no place: the next agreement gives it one.
        if attempt is not None and not attempt.dirty and name in attempt.buffers.slot_of:
            try:
                held = attempt.add(attempt.buffers.slot_of[name], tensor, stays=stays)
            except BaseException as error:  # as fault.recording() does, without a generator a tensor
                self.fault.record(error)
                if self.fault.lost is None:
                    raise
        self._handed[name] = held
        return held

    def agree(self) -> MergeBuffers:
        """Collective. Return the merge buffers. Before the first agreement, all ranks agree first."""
        self._check()
        with self.fault.recording():
            return self.agreed.agree_anew([]) if self.agreed.buffers is None else self.agreed.buffers

    def start(
        self,
        gradient_of: GradientOf,
        flags: int = Flag.ACTIVE,
        due: Due | None = None,
        nonfinite: Sequence[str] = (),
    ) -> None:
        """Collective. Send everything not yet on its way, and return at once; :meth:`finish` receives it.

        Arguments are those of :meth:`finish`. Before the first agreement nothing is sent.
        """
        self._check()
        with self.fault.recording():
            attempt = self._attempt(flags, due, nonfinite)
            if attempt is not None:
                attempt.add_all(gradient_of)

    def poll(self) -> None:
        """Collective. Start second phases of messages of which the first one has ended. Waits for nothing."""
        if self._round is not None and not self.fault:
            with self.fault.surviving():
                self._round.poll()

    def finish(
        self,
        gradient_of: GradientOf = lambda name: None,
        flags: int = Flag.ACTIVE,
        due: Due | None = None,
        nonfinite: Sequence[str] = (),
    ) -> Combined:
        """Collective. Send the remaining messages, receive all, and return the combined tensors.

        ``gradient_of``: called with the name of each tensor that was not handed over, and again where the round is
        repeated. It may return a :class:`agmerge.tensors.arena.Difference`, which saves a pass. ``flags``: bits
        that this rank announces. ``due``: returns which of so many merge buffers are exchanged; None: all.
        ``nonfinite``: names of parameters that this rank already knows not to be finite. Raises
        :class:`agmerge.NonFiniteError` on every rank, according to ``config.guards.nonfinite``: the exchange stays
        usable, and the step begins again.
        """

        def late(name: str) -> torch.Tensor | Difference | None:
            return self._handed[name] if name in self._handed else gradient_of(name)

        self._check()
        with self.fault.recording():
            attempt = self._attempt(flags, due, nonfinite)
            if attempt is None or not attempt.receive(late):
                if attempt is not None:
                    attempt.undo()
                buffers = self.agreed.agree_anew(list(self._handed))
                self._round = attempt = self._new_round(buffers, False, flags, due, nonfinite)
                if not attempt.receive(late):
                    raise AGMergeError(
                        "AGM113: Parameters changed while ranks agreed on them. Change them between steps."
                    )
            if attempt.is_complete:  # a round of some merge buffers teaches nothing about the plan
                self.agreed.times.observe(attempt.recorder)
        return self._received(attempt)

    def _received(self, attempt: Round) -> Combined:
        """Collective. Return what a round has combined, to its end, or raise the error of all ranks."""
        with self.fault.recording():
            error = resolve_nonfinite(attempt)
            if attempt.nonfinite:
                attempt.undo()
        self._is_received = True
        if error is not None:
            self.discard()
            raise error
        return self._combined(attempt)

    def _combined(self, attempt: Round, *, is_part: bool = False) -> Combined:
        sync, norm = self.agreed.config.sync, None
        if sync.updates is None and sync.model is None:
            norm = self.norm
        return Combined(attempt, sync.zero_unused, norm, is_part=is_part, follows=self._parts > 0)

    def give_up(self, why: str) -> None:
        """Collective. End the round under way with nothing, on all ranks: theirs raise :class:`agmerge.AGMergeError`.

        Messages that have left are received; a later message carries the news, so at least one must not have left.
        Before the first agreement ranks agree first. ``why``: the reason, for the errors of the others. Nothing is
        raised here, unless the exchange breaks.
        """
        self._why_given_up = why
        if self._round is not None:
            self._round.guard.give_up(why)
        try:
            self.finish()
        except AGMergeError:
            self.fault.check()
        finally:
            self._why_given_up = ""
        self.discard()

    def commit(self, *, drops_unused: bool = False, dropped: Container[str] = ()) -> None:
        """End the step: ``work`` becomes the residual, and the next step begins.

        ``drops_unused``: the update of a tensor that no rank had, which stems from residuals, is not applied: its
        residual and momentum stay as before the step. ``dropped``: names of tensors with updates that are not applied.
        """
        assert self._round is not None
        is_part = not self._is_received
        self.agreed.end_step(self._round.left_out(unused=drops_unused, dropped=dropped), counts=not is_part)
        self._round = None
        if not is_part:
            self._end_round()

    def commit_some(self, names: Container[str]) -> None:
        """Make ``work`` of some tensors, those that a rank had, the residual; :meth:`commit` ends the step later."""
        assert self._round is not None
        self._round.keep(names)

    def discard(self) -> None:
        """Discard the step: residuals and the compressor's state are as before it."""
        if self._round is not None:
            self._round.undo()
            self._round.buffers.flat.in_place.let_go()
        self._round = None
        self._end_round()

    def _end_round(self) -> None:
        """Forget the tensors of the round that has ended: the next one begins."""
        self._handed, self._parts = {}, 0
        if self._is_received:
            self._rounds, self._is_received = self._rounds + 1, False
            if self.group.kept is not None:
                self.group.kept.conclude()

    # -- without a rank that was lost -------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Return how far this rank is, to be compared with others of its group."""
        if self._is_received:
            return Position(self._rounds + 1, 0)
        received = 0 if self._round is None or self._round.comes_to_nothing else self._round.received
        return Position(self._rounds, max(self._parts, received))

    def catch_up(self, survivors: Backend) -> Combined | None:
        """Collective. Go on where that rank of ``survivors`` is that is furthest: its results count for all.

        Returns what this rank has still got of the round under way; None: nothing, and all of it is to be exchanged
        again. Either way the exchange is to be connected anew first, once what is returned is committed.
        """
        kept, attempt, own = self.group.kept, self._round, self.position
        assert kept is not None
        outcome = settle(survivors, own, kept, self.agreed.config.guards.timeout, between=self.between.told)
        target = outcome.position
        self.fault.record(None)
        if target.rounds == own.rounds and target.buffers == self._parts:
            self._give_round_up()
            return None
        assert attempt is not None, "others have received a message that this rank has not sent"
        kept.replay(outcome.results)
        try:
            if target.rounds > own.rounds:
                attempt.receive(lambda name: self._handed[name])  # sent already: nothing is asked for
                return self._received(attempt)
            attempt.receive_first(target.buffers)
        finally:
            kept.replay(None)
        # Of those to be exchanged again: they may lie where the end of this round is about to write.
        self._handed = {name: None if held is None else held.clone() for name, held in self._handed.items()}
        attempt.cut(target.buffers)
        part, self._parts = self._combined(attempt, is_part=True), target.buffers
        return part

    def meet(self, members: Backend, *, is_new: bool) -> Settled:
        """Collective. Settle with ``members`` of a new group, between two steps; a newcomer is where the others are.

        ``is_new``: this rank has nothing yet. The exchange is to be connected anew first.
        """
        kept, own = self.group.kept, NEW if is_new else self.position
        assert kept is not None and not self.under_way
        outcome = settle(members, own, kept, self.agreed.config.guards.timeout, gives=True, between=self.between.told)
        self._rounds = max(outcome.position.rounds, 0)
        self.between.settle(outcome.between)
        return outcome

    def end_call(self, survivors: Backend) -> bool:
        """Collective. Settle with ``survivors`` in a function between two steps; return whether it has ended for any.

        The exchange is to be connected anew first.
        """
        kept, timeout = self.group.kept, self.agreed.config.guards.timeout
        assert kept is not None and not self.under_way
        outcome = settle(survivors, self.position, kept, timeout, between=self.between.told)
        self.fault.record(None)
        return self.between.settle(outcome.between)

    def _give_round_up(self) -> None:
        """Forget the round under way, but not its tensors."""
        if self._round is not None:
            self._round.undo()
            self._round.buffers.flat.in_place.let_go()
        self._round = None

    def _check(self) -> None:
        """Raise the error that has ended the exchange, or that of a rank that was lost meanwhile."""
        self.fault.check()
        if self.fault.lost is not None:
            raise self.fault.lost

    @property
    def under_way(self) -> bool:
        """Return whether a round has begun, and has not been committed or discarded."""
        return self._round is not None

    @contextmanager
    def sending_whole(self) -> Iterator[None]:
        """Send every element, uncompressed, in the rounds inside, which end inside. Used on every rank alike.

        After a new agreement inside, later rounds are compressed again.
        """
        buffers = self.agreed.buffers
        assert buffers is not None and self._round is None
        plan = buffers.plan
        whole = merging.Plan(plan.counts, names=plan.names, dense=(True,) * len(plan.counts))
        buffers.rebuild(whole, exact=True)
        try:
            yield
        finally:
            buffers.rebuild(plan)
            buffers.flat.release_unused()

    def _attempt(self, flags: int = Flag.ACTIVE, due: Due | None = None, nonfinite: Sequence[str] = ()) -> Round | None:
        """Return the round under way; None before the first agreement. It begins with the first tensor of a step."""
        if self._round is None and self.agreed.buffers is not None and self._is_current(self.group.world):
            self._round = self._new_round(self.agreed.buffers, self.agreed.changed, flags, due, nonfinite)
        return self._round

    def _new_round(
        self, buffers: MergeBuffers, dirty: bool, flags: int, due: Due | None, nonfinite: Sequence[str]
    ) -> Round:
        kind = TwoLevelRound if buffers.config.merging.exchange == TWO_LEVEL else Round
        buffers.forget_round()
        if not self._handed:  # else a step goes on, and its gradients may lie where its updates will be
            buffers.flat.let_updates_go()
        numbers = None if due is None else due(len(buffers.plan.counts))
        if self._parts:  # the others are committed
            all_of_them = range(len(buffers.plan.counts)) if numbers is None else numbers
            numbers = [number for number in all_of_them if number >= self._parts]
        clock = buffers.clock if self.agreed.times.measures_next(buffers.clock) else StoppedClock()
        step, totals, flags = self.agreed.step, self.agreed.totals, flags | self._notices()
        attempt = kind(buffers, step, totals, dirty=dirty, flags=flags, due=numbers, clock=clock)
        attempt.guard.report(nonfinite)
        if self._why_given_up:
            attempt.guard.give_up(self._why_given_up)
        return attempt
