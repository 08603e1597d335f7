# SPDX-License-Identifier: Apache-2.0
"""Participation of one optimizer in its group of workers: connect, announce, compare replicas, plan anew, leave."""

from __future__ import annotations

import hashlib
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from agmerge.backends import Backend, status
from agmerge.backends.handshake import gather_bytes, ranks_of
from agmerge.errors import (
    BETWEEN,
    OTHER_SHARDS,
    AGMergeError,
    DivergenceError,
    NoAnswer,
    TooFewWorkers,
    warn,
)
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.runtime import process_sets, workers
from agmerge.runtime.broadcast import broadcast_optimizer_state, broadcast_parameters, plain_state
from agmerge.runtime.process_sets import agree
from agmerge.step.agreed_state import OnAgreement, Plans, TensorTable
from agmerge.step.config import AUTO, SPARSE, Config, check_patterns
from agmerge.step.gradient_exchange import Combined, Due, GradientExchange
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.round import GradientOf
from agmerge.tensors.parameters import ParameterTable, fingerprints, local_of
from agmerge.version import __version__
from sparsifiers import Kind

# Settings that are not supported in an elastic job, because an exchange with them needs every worker to the end.

REFUSED = "AGM308: {what} is not supported in elastic training (init(elastic=True)). {instead} See docs/elastic.md."
LEAVE_OUT = "Remove it, or call agmerge.init() without elastic=True."
PLAIN = (
    "Use a plain PyTorch loop, or call agmerge.init() without elastic=True and restart from a checkpoint after a "
    "failure."
)
SECOND = "Wrap both in one list, agmerge.DistributedOptimizer([first, second], ...), or close() the first."
_process: weakref.ref[GradientExchange] | None = None  # the exchange of this process; written by admit alone


def refuse_elastic(config: Config) -> None:
    """Raise ``ValueError`` for the first setting of ``config`` that an elastic job cannot have."""
    exchange, sync, updates, compressor = (
        config.merging.exchange, config.sync, config.sync.updates, config.compression.compressor,
    )  # fmt: skip
    found = {
        f"exchange={exchange!r}": exchange not in (AUTO, SPARSE),
        f"compression={compressor.name!r}": bool(compressor.kinds & {Kind.LOW_RANK, Kind.CUSTOM}),
        "merging='dear'": sync.model is not None,
        "process_set=": bool(sync.process_set.ranks) or sync.process_set.horovod is not None,
        "dense='partial'": config.compression.partial is not None,
        "a GradScaler": config.guards.scaled and updates is None,
        "fragments=": updates is not None and updates.takes_turns,
    }
    for what, is_there in found.items():
        if is_there:
            raise ValueError(REFUSED.format(what=what, instead=LEAVE_OUT))


def refuse_feature(what: str, instead: str = LEAVE_OUT) -> None:
    """Raise ``ValueError`` in an elastic job: ``what``, in words, is not for it; ``instead``: a sentence of advice."""
    if workers.can_regroup():
        raise ValueError(REFUSED.format(what=what, instead=instead))


def admit_elastic(exchange: GradientExchange) -> None:
    """Raise ``ValueError`` where this process has another exchange that is in use: ranks could not tell them apart."""
    global _process
    if workers.bound() is not None:
        return
    other = None if _process is None else _process()
    if other is not None and not other.fault:
        raise ValueError(REFUSED.format(what="a second optimizer", instead=SECOND))
    _process = weakref.ref(exchange)


# Replicas: compared to the bit (guarantee G11), and made equal again.

DIGEST_BYTES = 16
WRITTEN = (
    "AGM152: Replicas differed in a backward pass, first in parameter {name!r}, because the script changed parameters "
    "since the last step. This is correct if each rank restores them before the step (SAM, for example). Otherwise "
    "change parameters in the same way on every rank."
)


def compare_replicas(
    comm: Backend,
    parameters: Mapping[str, torch.Tensor],
    steps: int,
    timeout: float,
    *,
    written: bool = False,
    warns: bool = False,
) -> None:
    """Collective. Raise :class:`agmerge.DivergenceError` on every rank unless all parameters are bitwise equal.

    Reads every parameter twice, and costs one all-gather of 16 bytes for each of them. Where replicas differ and the
    script of a rank has written parameters since the last step, that is a warning: it may put them back.

    Args:

        comm: the ranks with the replicas.
        parameters: by the names for the error, in an order that is the same on every rank.
        steps: how many were committed, for the error.
        timeout: seconds.
        written: the script of this rank has written parameters since the last step.
        warns: a difference is a warning.
    """
    own = fingerprints(parameters.values()).numpy().tobytes() + bytes([written])
    rows = gather_bytes(comm, own, "check_every", timeout)
    for i, name in enumerate(parameters):
        digests = [row[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)].hex() for row in rows]
        if len(set(digests)) > 1:
            if any(row[-1] for row in rows):
                warn(WRITTEN.format(name=name), comm.rank)
                return
            sets = "; ".join(f"{value} on {ranks_of(digests, value)}" for value in dict.fromkeys(digests))
            text = (
                f"AGM102: Step {steps}: replicas differ, first in parameter {name!r}: digest {sets}. Parameters were "
                "changed on some ranks only. Call broadcast_parameters first, and change them only through the "
                "optimizer. Otherwise data was damaged in transit: restart from a checkpoint. With sync='updates', "
                "initialize new parameters inside optimizer.shared()."
            )
            if not warns:
                raise DivergenceError(text)
            warn(text, comm.rank)
            return


def level_replicas(
    comm: Backend, members: ParameterTable, optimizer: torch.optim.Optimizer, root: int, timeout: float
) -> None:
    """Collective. Give every rank the parameters and optimizer state of rank ``root``, if those of any rank differ.

    Raises :class:`agmerge.DivergenceError` on every rank where they differ among the ranks of a process set.

    Args:

        comm: the ranks with the replicas.
        members: the parameters.
        optimizer: the wrapped one; its state is compared too.
        root: a rank of ``comm``.
        timeout: seconds, for the comparison.
    """
    parameters, fingerprint = members.name_all(), hashlib.blake2b(digest_size=DIGEST_BYTES)
    state, tensors = plain_state(optimizer)
    fingerprint.update(fingerprints([*parameters, *tensors]).numpy().tobytes())
    fingerprint.update(repr(state).encode())
    if len(set(gather_bytes(comm, fingerprint.digest(), "join/replicas", timeout))) == 1:
        return
    if comm.size < workers.size():
        raise DivergenceError(
            "AGM120: join(): the ranks of this process set differ afterwards. Clip gradients and change learning "
            "rates in hooks of the optimizer's step (register_step_pre_hook, register_step_post_hook), which also run "
            "on ranks that joined."
        )
    broadcast_parameters(parameters, root_rank=root)
    broadcast_optimizer_state(optimizer, root_rank=root)


class SyncedReplica:
    """Replica of the parameters that is equal on all ranks after every step, where gradients are exchanged."""

    def __init__(self, members: ParameterTable, exchange: GradientExchange) -> None:
        self._members, self._exchange = members, exchange

    @property
    def steps(self) -> int:
        """Return how many steps the optimizer has made."""
        return self._exchange.agreed.steps

    def compared(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks after a step, by name: all parameters."""
        return {self._members.name_of(parameter): parameter for parameter in self._members.name_all()}

    def unsent(self) -> dict[str, torch.Tensor]:
        """Return the residuals of this rank, by name, in the shape of the parameter or of this rank's shard."""
        return self._exchange.agreed.current.residuals()

    def saved(self) -> None:
        """Return None: a rank has no state beside residuals and the optimizer's."""

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Make the parameters the shared ones that a training with local steps has saved, if one has."""
        base: Mapping[str, torch.Tensor] = {} if saved is None else saved["base"]
        for name, parameter in self.compared().items():
            if name in base:
                local_of(parameter).copy_(base[name])


# Participation.

T = TypeVar("T")
TOO_FEW = (
    "AGM209: This elastic job has {size} workers, fewer than min_workers, and starts another step. Call commit() of "
    "agmerge.elastic.State after each step, which waits for workers, or lower min_workers."
)
WAITS = ", fewer than min_workers. The next commit() waits for other workers"
UNCOMMITTED = 20  # exchanges without commit(), after which a warning says so
NO_COMMIT = (
    "AGM220: {count} exchanges of an elastic job without commit(). Call commit() of agmerge.elastic.State after each "
    "step: only commit() admits new workers and counts the samples of an agmerge.elastic.Sampler."
)
RETRIED = "{name}, of state.retried,"


def open_exchange(
    members: ParameterTable, table: TensorTable, config: Config, on_agreement: OnAgreement
) -> GradientExchange:
    """Return an exchange, not connected yet, of the tensors of ``table``.

    Args:

        members: the parameters of the wrapped optimizer, for checks.
        table: the tensors of them that are exchanged.
        config: for the first agreement. Raises ``ValueError`` where it does not fit the parameters.
        on_agreement: returns the maker of plans from measured times.
    """
    if workers.can_regroup():
        refuse_elastic(config)
    check_patterns(config, (members.name_of(parameter) for parameter in members.name_all()))
    exchange = GradientExchange(table, config, on_agreement, workers.current, _notices, survives=workers.can_regroup())
    if workers.can_regroup():
        admit_elastic(exchange)
    if config.merging.plan is not None:
        config.merging.plan.check(len(exchange.agreed.members()))
    return exchange


def _notices() -> int:
    """Return flags of messages that begin now."""
    return (Flag.NEWCOMER if workers.newcomers_wait() else 0) | (Flag.LEAVING if workers.leaves() else 0)


def weakly(method: OnAgreement) -> OnAgreement:
    """Return a function that calls a bound method as long as its object lives.

    An optimizer that was dropped must not live on in its own exchange.
    """
    held = weakref.WeakMethod(method)

    def called(buffers: MergeBuffers, times: RunningStepTimes) -> Plans | None:
        living = held()
        return None if living is None else living(buffers, times)

    return called


class Participation:
    """Participation of one exchange in the group of workers that there is.

    ``compared``: returns the tensors that must be equal on all ranks after a step, by name.
    """

    def __init__(self, exchange: GradientExchange, compared: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self.exchange, self._compared_tensors = exchange, compared
        self.flag = Flag.ACTIVE  # in this rank's messages; JOINED in joined()
        self.lets_in = False  # the messages of the last exchange have said that newcomers wait
        self.lets_go = False  # they have said that a worker leaves
        # Of an elastic group; seconds of those in which workers were lost.
        self.changes: dict[str, float] = {"lost": 0, "left": 0, "arrived": 0, "repeated": 0, "seconds": 0.0}
        self._has_compared = False  # replicas, after the first step among these workers
        self._uncommitted = 0  # exchanges since the script has called commit()
        self._went_on_with_few = False  # one of these has begun with fewer than min_workers
        self._communicators: list[weakref.finalize[..., Participation]] = []  # drop those of the present group

    @property
    def outdated(self) -> bool:
        """Return whether the exchange is connected to a group of workers that exists no more.

        That is so after ``shutdown()`` and ``init()``, and after a reset of an elastic Horovod.
        """
        return self.exchange.group.world is not None and self.exchange.group.world is not workers.world()

    def connect(self) -> None:
        """Collective. Connect to the present workers, and compare facts (G1).

        Residuals of an earlier group are scaled to the number of workers of this one.
        """
        exchange, config, world = self.exchange, self.exchange.agreed.config, workers.world()
        facts = [("library version", __version__), *exchange.agreed.facts()]  # refuses before anything is sent
        workers.listen()
        wants_second = config.quantises and world.size > 2
        comm, second = process_sets.communicators(
            world, config.sync.process_set, config.guards.timeout, wants_second=wants_second
        )
        keeps_state = exchange.connect(world, comm, facts, second)
        for held in (comm, second):
            if held is not None:  # an optimizer that was dropped holds no threads and no connections
                self._communicators.append(weakref.finalize(self, held.drop))
        if not keeps_state:
            warnings.warn(OTHER_SHARDS, stacklevel=5)

    def leave(self) -> None:
        """Forget the group of workers."""
        self.exchange.leave()
        while self._communicators:
            self._communicators.pop()()
        self._has_compared = False

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Use another config from the next step on, with residuals and plan unchanged.

        ``what``: the call of the script, and ``advice`` for it, where ranks differ.
        """
        before = self.exchange.agreed.config.compression.partial
        if config.compression.partial is not None:
            config = config.changed(partial=before)  # tensors that have a residual by now stay sparse
        self.exchange.reconfigure(config, what, advice)

    def finish(
        self,
        connect: Callable[[], None],
        gradient_of: GradientOf,
        due: Due | None = None,
        nonfinite: Sequence[str] = (),
    ) -> Iterator[Combined]:
        """Collective. Yield what :meth:`GradientExchange.finish` returns.

        Where workers can be lost, the exchange goes on among the survivors, in a group that ``connect`` connects to.
        Then all but the last of what is yielded are parts: the caller applies and commits each.
        """
        self._check_committed()
        while True:
            try:
                connect()
                combined = self.exchange.finish(gradient_of, self.flag, due, nonfinite)
                self.lets_in, self.lets_go = (bool(combined.flags & one) for one in (Flag.NEWCOMER, Flag.LEAVING))
            except NoAnswer as error:
                if self.exchange.group.kept is None:
                    raise
                if self.exchange.fault.lost is None:
                    self.exchange.fault.record(error)
                caught_up = self._regroup()
                if caught_up is None:
                    continue
                combined = caught_up  # its flags do not count: who was ahead is in another group by now
            yield combined
            if not combined.is_part:
                return

    def committed(self) -> None:
        """Record that the script of an elastic job has called ``commit()``."""
        self._uncommitted, self._went_on_with_few = 0, False

    def _check_committed(self) -> None:
        """Raise :class:`TooFewWorkers` for a second exchange without ``commit()`` that begins with too few workers.

        For the first one these were lost after ``commit()``, in a function of the script, say.
        """
        few = workers.has_too_few()
        if few and self._went_on_with_few:
            raise TooFewWorkers(TOO_FEW.format(size=workers.size()))
        self._went_on_with_few = few
        self._uncommitted += 1
        if workers.can_regroup() and self._uncommitted == UNCOMMITTED:
            warn(NO_COMMIT.format(count=UNCOMMITTED), workers.rank())

    def connected(self, connect: Callable[[], None]) -> None:
        """Collective. Call ``connect`` before a step; again among the survivors, where a worker is lost in it."""
        while True:
            try:
                connect()
                return
            except NoAnswer:
                if self.exchange.group.kept is None:
                    raise
                ahead = self._survived(self.exchange.catch_up, lambda _: True)
                assert ahead is None, "a rank has received a message of a step that this rank has not begun"

    def retried(self, function: Callable[[], T], name: str) -> T:
        """Collective. Return the result of ``function()``, called again by the survivors where a worker is lost in it.

        ``function``: any that communicates by the module's collectives; for the ranks that are in it between two steps.
        ``name``: the same on all ranks. It ends with an agreement: where that has ended on any survivor, none calls the
        function again, else all do.
        """
        if self.exchange.under_way:
            raise AGMergeError(BETWEEN.format(what=RETRIED.format(name=name)))
        between = self.exchange.between
        while True:
            ended = self._attempted(function, name, between.count, bool, repeats=True)
            if ended is not None:
                return ended[0]

    def handed_over(self, hand_over: Callable[[], T]) -> T | None:
        """Collective. Return the result of ``hand_over()``, once all survivors count on it: those that leave may go.

        ``hand_over``: changes nothing but ``exchange.between``, of which it enters the hand-over. Where a worker is
        lost the survivors call it again, unless one that leaves may have gone. None: they cannot, for one of them is
        within a step, and all give it up, until the next exchange.
        """
        between = self.exchange.between
        given: tuple[T] | None = None
        while True:
            if not between.is_given:
                given = self._attempted(hand_over, "the hand-over", between.gave, lambda _: between.is_given)
                if given is None and not between.all_are_in:
                    return None
            elif self._attempted(lambda: None, "the hand-over's news", between.count, bool) is not None:
                assert given is not None
                return given[0]

    def _attempted(
        self,
        function: Callable[[], T],
        name: str,
        end: Callable[[], None],
        has_ended: Callable[[bool], bool],
        *,
        repeats: bool = False,
    ) -> tuple[T] | None:
        """Collective. Return the result of ``function()``, in a tuple; None where a worker was lost before its end.

        Args:

            function: between two steps.
            name: the same on all ranks.
            end: is called once all ranks have come to the end of ``function``.
            has_ended: returns, after a worker was lost, whether all survivors have. It is given whether a function that
                is counted has ended on any of them.
            repeats: a function that has not ended counts as repeated.
        """
        try:
            result = function()
            agree(workers.world(), f"the end of {name}", [("function", name)], "state.retried")
            end()
            return (result,)
        except NoAnswer:
            counted = self._survived(self.exchange.end_call, lambda counted: counted or not repeats)
            if has_ended(counted):
                return (result,)  # it is there: nobody has seen the end of the agreement before all were in it
            return None

    def _regroup(self) -> Combined | None:
        """Collective. Form a group of the survivors; return what :meth:`GradientExchange.catch_up` does."""
        return self._survived(self.exchange.catch_up, lambda caught_up: caught_up is not None and not caught_up.is_part)

    def _survived(self, settle: Callable[[Backend], T], has_ended: Callable[[T], bool]) -> T:
        """Collective. Form a group of the survivors; return the result of ``settle``, called with it.

        ``has_ended``: returns whether, with that result, nothing is repeated.
        """
        began, before = time.monotonic(), workers.size()
        while True:
            try:
                outcome = settle(workers.regroup())
                break
            except NoAnswer as error:  # another one is lost
                self.exchange.fault.record(error)
        left, now = self.exchange.between.take_gone(), workers.size()
        if left and left == before - now:  # nobody is lost: the others have seen one go who had said so
            self._count(left=left)
            self._say_change(before, "left")
            return outcome
        self._count(left=left, lost=before - now - left, repeated=not has_ended(outcome))
        self.changes["seconds"] += time.monotonic() - began
        words = (
            f"AGM213: A worker failed in step {self.exchange.agreed.step}; training continues with {now} workers "
            f"(before: {before})"
        )
        warn(words + (WAITS if workers.has_too_few() else ""), workers.rank())
        return outcome

    def count_change(self, before: int) -> None:
        """Count workers that have come or gone between two steps, of ``before`` that there were, and say so."""
        left, now = self.exchange.between.take_gone(), workers.size()
        self._count(arrived=max(now - before, 0), left=left, lost=max(before - now - left, 0))
        if now != before:
            self._say_change(before, "joined" if now > before else "left" if left else "failed")

    def _count(self, **changes: int) -> None:
        self.lets_in = self.lets_go = False
        for what, count in changes.items():
            self.changes[what] += count

    def _say_change(self, before: int, what: str) -> None:
        warn(
            f"AGM213: A worker {what}; training continues with {workers.size()} workers (before: {before}).",
            workers.rank(),
        )

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Announce inside that this rank has no batches left: its messages carry only residuals."""
        self.flag = Flag.JOINED
        try:
            yield
        finally:
            self.flag = Flag.ACTIVE

    def compare_soon(self) -> None:
        """Compare replicas after the next exchange, as after the first one: there are new parameters."""
        self._has_compared = False

    def end_exchange(
        self, *, compares: bool = True, plans: bool = True, written: Callable[[], bool] = lambda: False
    ) -> None:
        """Collective. Compare replicas and plan again, where that is due: an exchange has been committed.

        ``compares``: replicas are comparable now. They are after the first exchange, and after every ``check_every``.
        ``plans``: the plan in use is one that can be planned from. ``written``: asked
        when replicas are compared, see :func:`compare_replicas`.
        """
        exchange, guards = self.exchange, self.exchange.agreed.config.guards
        if exchange.group.kept is not None and self.outdated:
            return  # a worker was lost during this exchange: the next one begins with the survivors
        status.current().enter("is in its script, before a backward pass", exchange.agreed.step)
        is_due = not self._has_compared or (guards.check_every and exchange.agreed.steps % guards.check_every == 0)
        with exchange.fault.surviving():
            if compares and is_due:  # G11
                assert exchange.group.comm is not None
                tensors, steps = self._compared_tensors(), exchange.agreed.steps
                compare_replicas(
                    exchange.group.comm, tensors, steps, guards.timeout, written=written(), warns=guards.warns
                )
                self._has_compared = True
            if plans:
                exchange.agreed.replan()
