# SPDX-License-Identifier: Apache-2.0
"""Exchange of named tensors among all ranks, which returns the combined ones.

This is the interface between a round, below it, and a caller with tensors to combine, above it. It knows no hooks, no
``p.grad``, no backward passes and no optimizer. The hook-driven :class:`agmerge.engine.reducer.Reducer` is one caller.

No collective here is chosen from what only this rank knows. A rank with tensors changed since the last agreement
raises a flag in its messages; then every rank discards the round, agrees again and repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch

import merging
from agmerge.backends import Backend
from agmerge.backends.handshake import Fact
from agmerge.errors import AGMergeError
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.step_times import StoppedClock
from agmerge.step.agreed_state import AgreedState, OnAgreement, TensorTable
from agmerge.step.carried_state import CarriedState
from agmerge.step.config import TWO_LEVEL, Config
from agmerge.step.fault import Fault
from agmerge.step.gradient_norm import GradientNorm
from agmerge.step.group import Group
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.nonfinite_verdict import resolve_nonfinite
from agmerge.step.round import GradientOf, Round
from agmerge.step.two_level_round import TwoLevelRound
from agmerge.tensors.difference import Difference
from agmerge.tensors.layout import Slot

Due = Callable[[int], Collection[int]]  # of so many merge buffers, the numbers of those that are exchanged


class Combined:
    """Result of one round. Tensors are views, valid until the next round begins."""

    def __init__(self, attempt: Round, zero_unused: bool, norm: GradientNorm | None = None) -> None:
        self._round, self._zero_unused, self._norm = attempt, zero_unused, norm
        self.buffers: MergeBuffers = attempt.buffers
        self.skipped = attempt.nonfinite  # the step comes to nothing: a rank has found an infinity or NaN
        self.used: Sequence[bool] = attempt.used  # by slot: whether any rank had a tensor
        self.flags = attempt.flags_of_all  # flags of all ranks, see Flag

    @cached_property
    def updates(self) -> Mapping[str, torch.Tensor | None]:
        """Return the combined tensor of each name, in the shape and strides of the table's.

        None: no rank had one, and no residual of it was sent. All are infinite in a skipped step. Nothing is computed
        in a step in which this is not read. Tensors in ``buffers.store.received`` are missing.
        """
        received = {slot.name for segment, *_ in self.buffers.store.received for slot in segment.slots}
        updates = {
            slot.name: self.buffers.flat.update(slot) if self._zero_unused or self._round.has_update(slot) else None
            for slot in self._round.slots()
            if slot.name not in received
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
            (of(slot) for slot in slots if slot.index not in noisy),
            (of(slot) for slot in slots if slot.index in noisy),
            noises,
            may_hold=not any(slot.index in self.buffers.flat.in_place for slot in slots),
        )


class GradientExchange:
    """Exchange that combines the tensors of ``table`` over the ranks of one group, step by step.

    :meth:`connect` once. In each step :meth:`ready` for each tensor as soon as it exists, :meth:`finish` for the
    combined ones, :meth:`commit` to keep the residuals, and ``agreed.replan()`` if plans may change. Or :meth:`discard`
    in place of ``commit``: then nothing of the step is kept. ``is_current`` returns whether ``world``, from which it
    was connected, still exists: where it does not, nothing is sent before it is connected again.
    """

    def __init__(
        self,
        table: TensorTable,
        config: Config,
        on_agreement: OnAgreement = lambda buffers, times: None,
        is_current: Callable[[Backend | None], bool] = lambda world: True,
    ) -> None:
        self.group = Group()
        self.fault = Fault(self.group.abort)
        self.agreed = AgreedState(table, config, on_agreement, self.group)
        self._is_current = is_current
        self.norm = GradientNorm()  # of the last step, where gradients are combined before it ends
        self._handed: dict[str, torch.Tensor | None] = {}  # gradients of this step, in readiness order
        self._round: Round | None = None  # under way
        self._why_given_up = ""  # while this rank gives a step up: why

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
        self.fault.record(AGMergeError("this optimizer was closed"))
        self.group.close()

    # -- a step ---------------------------------------------------------------------------------------------------

    def ready(self, name: str, tensor: torch.Tensor | None, *, stays: bool = False) -> torch.Tensor | None:
        """Collective. Hand over a tensor (None: this rank has none), and send the merge buffers that are complete now.

        ``tensor``: of the table's shape, dtype and device; not to be changed before :meth:`finish`. Returns the tensor
        to use in its place until then: the same numbers, perhaps where the update will be, so that memory is freed.
        ``stays``: the caller keeps it in any case.
        """
        self.fault.check()
        held, attempt = tensor, self._attempt()
        # A tensor that joined the table since the last agreement has no place: the next agreement gives it one.
        if attempt is not None and not attempt.dirty and name in attempt.buffers.slot_of:
            try:
                held = attempt.add(attempt.buffers.slot_of[name], tensor, stays=stays)
            except BaseException as error:  # as fault.recording() does, without a generator a tensor
                self.fault.record(error)
                raise
        self._handed[name] = held
        return held

    def agree(self) -> MergeBuffers:
        """Collective. Return the merge buffers. Before the first agreement, all ranks agree first."""
        self.fault.check()
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
        self.fault.check()
        with self.fault.recording():
            attempt = self._attempt(flags, due, nonfinite)
            if attempt is not None:
                attempt.add_all(gradient_of)

    def finish(
        self,
        gradient_of: GradientOf = lambda name: None,
        flags: int = Flag.ACTIVE,
        due: Due | None = None,
        nonfinite: Sequence[str] = (),
    ) -> Combined:
        """Collective. Send the remaining messages, receive all, and return the combined tensors.

        ``gradient_of``: called with the name of each tensor that was not handed over, and again where the round is
        repeated. It may return a :class:`agmerge.tensors.difference.Difference`, which saves a pass. ``flags``: bits
        that this rank announces. ``due``: returns which of so many merge buffers are exchanged; None: all.
        ``nonfinite``: names of parameters that this rank already knows not to be finite. Raises
        :class:`agmerge.NonFiniteError` on every rank, according to ``config.guards.nonfinite``: the exchange stays
        usable, and the step begins again.
        """

        def late(name: str) -> torch.Tensor | Difference | None:
            return self._handed[name] if name in self._handed else gradient_of(name)

        self.fault.check()
        with self.fault.recording():
            attempt = self._attempt(flags, due, nonfinite)
            if attempt is None or not attempt.receive(late):
                if attempt is not None:
                    attempt.undo()
                buffers = self.agreed.agree_anew(list(self._handed))
                self._round = attempt = self._new_round(buffers, False, flags, due, nonfinite)
                if not attempt.receive(late):
                    raise AGMergeError("parameters changed while ranks agreed on them; change them between steps")
            if attempt.is_complete:  # a round of some merge buffers teaches nothing about the plan
                self.agreed.times.observe(attempt.recorder)
            error = resolve_nonfinite(attempt)
            if attempt.nonfinite:
                attempt.undo()
        if error is not None:
            self.discard()
            raise error
        now = self.agreed.config.sync.updates is None and self.agreed.config.sync.model is None
        return Combined(attempt, self.agreed.config.sync.zero_unused, self.norm if now else None)

    def give_up(self, why: str) -> None:
        """Collective. End the round under way with nothing, on all ranks: theirs raise :class:`agmerge.AGMergeError`.

        Messages that have left are received; a later message carries the news, so at least one must not have left.
        ``why``: the reason, for the errors of the others. Nothing is raised here, unless the exchange breaks.
        """
        assert self._round is not None
        self._why_given_up = why
        self._round.guard.give_up(why)
        try:
            self.finish()
        except AGMergeError:
            self.fault.check()
        finally:
            self._why_given_up = ""
        self.discard()

    def commit(self, *, drops_unused: bool = False) -> None:
        """End the step: ``work`` becomes the residual, and the next step begins.

        ``drops_unused``: the update of a tensor that no rank had, which stems from residuals, is not applied: its
        residual and momentum stay as before the step.
        """
        assert self._round is not None
        self.agreed.end_step(self._round.left_out(unused=drops_unused))
        self._handed, self._round = {}, None

    def discard(self) -> None:
        """Discard the step: residuals and the compressor's state are as before it."""
        if self._round is not None:
            self._round.undo()
            self._round.buffers.flat.in_place.let_go()
        self._handed, self._round = {}, None

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
        numbers = None if due is None else due(len(buffers.plan.counts))
        clock = buffers.clock if self.agreed.times.measures_next(buffers.clock) else StoppedClock()
        attempt = kind(
            buffers, self.agreed.step, self.agreed.totals, dirty=dirty, flags=flags, due=numbers, clock=clock
        )
        attempt.guard.report(nonfinite)
        if self._why_given_up:
            attempt.guard.give_up(self._why_given_up)
        return attempt
