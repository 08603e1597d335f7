# SPDX-License-Identifier: Apache-2.0
"""State and samples of a worker in an elastic job: what newcomers are handed, and what a worker that leaves hands over.

``agmerge.elastic.State`` is for jobs of ``agmerge.init(elastic=True)``; an elastic Horovod has a state of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch

from agmerge.backends import Backend, timeouts
from agmerge.backends.handshake import broadcast_bytes, gather_bytes
from agmerge.checkpoint import rank_state
from agmerge.checkpoint.dcp import gather_parts, packed, unpacked
from agmerge.checkpoint.redistribute import displaced, displacements, redistribute
from agmerge.engine.optimizer_group import load_state
from agmerge.engine.optimizer_wrapper import AnyReducer
from agmerge.engine.participation import RETRIED
from agmerge.errors import AGMergeError, NoAnswer
from agmerge.ops import Sum
from agmerge.runtime import tensor_stream, workers
from agmerge.step.kept_results import Settled

# Hand-over: what a worker that leaves an elastic job has not sent goes to the oldest worker that stays.
#
# There residuals, and momenta of own gradients, are added to its own. A step is a mean over workers, and all residuals
# are scaled to the new number of workers afterwards, so the sum of what is applied and what is kept stays the same.
#
# Where a worker is lost meanwhile, either all survivors count on the hand-over or none does: nothing is added, and none
# leaves, before all have heard of its end (:mod:`agmerge.step.kept_results`).

RANKS_OWN = ("residuals", "momenta")  # a rank's own, linear in gradients


class HandedOver(NamedTuple):
    """Result of one hand-over on one rank."""

    goes: bool  # this rank has said that it leaves
    received: list[dict[str, Any]]  # what others have not sent, if this rank is to take it


def let_worker_go(reducer: AnyReducer, leaves: Callable[[], bool], regroup: Callable[[], None]) -> bool:
    """Collective. Let those leave that want to; return whether this rank is one of them, and is to end now.

    ``leaves``: returns whether this rank wants to. ``regroup``: forms a group of those that are there still. All are
    between two steps, but for some that may have lost the end of the last one, with a worker: then none leaves.
    """
    participation, between = reducer.participation, reducer.exchange.between
    try:
        outcome = participation.handed_over(lambda: hand_over(reducer, workers.world(), leaves=leaves()))
        if outcome is None or outcome.goes:
            return outcome is not None
        for unsent in outcome.received:
            _add(reducer, unsent)
        while between.going:
            _await_end(workers.world())
            regroup()
        return False
    finally:
        between.leave()


def hand_over(reducer: AnyReducer, world: Backend, *, leaves: bool) -> HandedOver:
    """Collective. Give what the ranks of ``world`` that leave have not sent to the first one that stays.

    ``leaves``: this rank does. Nothing changes but what ``reducer.exchange.between`` says. All are between two steps. 4
    bytes a number that is kept travel, to one rank; nothing with settings that keep nothing back.
    """
    between, timeout = reducer.exchange.between, reducer.exchange.agreed.config.guards.timeout
    between.enter(goes=leaves)
    said = [bool(one[0]) for one in gather_bytes(world, bytes([leaves]), "who leaves", timeout)]
    between.hears(sum(said))
    if all(said) or not any(said):
        return HandedOver(leaves, [])
    data = _unsent(reducer) if leaves else b""
    parts = gather_parts(world, data, said.index(False), "what was not sent", timeout)
    return HandedOver(leaves, [unpacked(part) for part in parts or () if part])


def _await_end(world: Backend) -> None:
    """Collective. Wait until workers that leave have left ``world``: they take no part, so it comes to no other end."""
    with suppress(NoAnswer):
        world.barrier("workers leave").wait(timeouts.default())


def _unsent(reducer: AnyReducer) -> bytes:
    """Return what this rank has not sent; empty if that is nothing."""
    section = rank_state.save(reducer)
    unsent: dict[str, Any] = {kind: section[kind] for kind in RANKS_OWN}
    if section["updates"]:
        unsent["displacements"] = displacements(section["updates"], section["residuals"])
    return packed(unsent) if any(unsent.values()) else b""


def _add(reducer: AnyReducer, unsent: dict[str, Any]) -> None:
    """Add what another rank has not sent to what this one has not."""
    own = rank_state.save(reducer)
    other = {**own, **{kind: unsent[kind] for kind in RANKS_OWN}, "window": {}}
    if own["updates"]:
        other["updates"] = displaced(own["updates"], unsent["displacements"])
    both = redistribute([own, other], 0, 1, Sum)
    kept = {key: own[key] for key in ("rank", "size", "compressor")}
    rank_state.load(reducer, {**both, **kept}, own=True)


# Samples, dealt out again where workers of an elastic job come or go.

NOT_GIVEN = (
    "AGM219: agmerge.elastic.Sampler: samples are not counted. Pass it to agmerge.elastic.State(sampler=...), whose "
    "commit() counts the samples that were used."
)
OTHER_SAMPLER = (
    "AGM407: agmerge.elastic.Sampler has {name}={own} on this worker and {other} on the others. Use the same value on "
    "all workers."
)


class Sampler(torch.utils.data.Sampler[int]):
    """Distribute the samples of a data set over the workers of an elastic job: a sampler for ``DataLoader``.

    Pass it to :class:`State`, too. Each epoch has its own order, the same on all workers. Each step takes the next
    ``batch_size`` samples for every worker. Samples at the end of the epoch that are not enough for all workers are
    left out. When workers fail or join, the rest of the epoch is distributed over the present workers, and all end the
    epoch at the same step. Batches that a loader has already prefetched are still used, so a few samples may be used
    twice, and others not at all.

    Args:
        data (sized object): The data set, or anything with a length.
        batch_size (int): Samples of one worker in one step, over all its backward passes.
        seed (int): Seed of the orders. Default: 0.
        shuffle (bool): Draw a random order for each epoch. With False the order is that of the data set. Default: True.
    """

    def __init__(self, data: Sized, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if batch_size < 1 or not len(data):
            raise ValueError(
                "AGM309: agmerge.elastic.Sampler: expected at least one sample and a batch size of at least 1, got "
                f"{len(data)} samples in batches of {batch_size}"
            )
        self._count, self._batch, self._seed, self._shuffle = len(data), batch_size, seed, shuffle
        self._at = 0, 0  # epoch, and samples of it that all workers have trained with
        self._workers = 1  # of the step that is under way
        self._drawn = 0  # batches of this worker that are drawn, and not trained with yet
        self._is_given = False  # to a State
        self._order: tuple[int, list[int]] = -1, []  # epoch, and the indices in its order

    @property
    def epoch(self) -> int:
        """Return the epoch of the next step, from 0."""
        return self._begins(*self._at, workers.size())[0]

    @property
    def passes(self) -> float:
        """Return how often the data set has been used so far, for example 1.5."""
        epoch, taken = self._begins(*self._at, workers.size())
        return epoch + taken / self._count

    def __len__(self) -> int:
        """Return how many indices are left for this worker in the epoch, unless workers come or go."""
        size = workers.size()
        taken = self._begins(*self._at, size)[1]
        return self._batch * max((self._count - taken) // (self._batch * size), 1)

    def __iter__(self) -> Iterator[int]:
        """Yield this worker's indices of what is left of the epoch."""
        first = None
        for epoch, indices in self._batches():
            if first not in (None, epoch):
                return
            first = epoch
            self._drawn += 1
            yield from indices

    def endless(self) -> Iterator[int]:
        """Yield this worker's indices of what is left of the epoch, then of the epochs that follow it."""
        for _, indices in self._batches():
            self._drawn += 1
            yield from indices

    def _batches(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the epoch and the indices of one batch of this worker after another."""
        if not self._is_given:
            raise AGMergeError(NOT_GIVEN)
        self._drawn = 0  # what an earlier iterator had drawn is dropped with it
        while True:
            size = workers.size()
            epoch, taken = self._begins(*self._at, size)
            for _ in range(self._drawn):
                epoch, taken = self._begins(epoch, taken + self._batch * size, size)
            order = self._ordered(epoch)
            first = taken + workers.rank() * self._batch
            yield epoch, [order[number % self._count] for number in range(first, first + self._batch)]

    def _begins(self, epoch: int, taken: int, size: int) -> tuple[int, int]:
        """Return where a step of ``size`` workers begins: in the next epoch, where too few are left for all."""
        fits = taken + self._batch * size <= self._count
        return (epoch, taken) if fits or not taken else (epoch + 1, 0)

    def _ordered(self, epoch: int) -> list[int]:
        """Return the indices in the order of an epoch."""
        if self._order[0] != epoch:
            source = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(self._count, generator=source) if self._shuffle else torch.arange(self._count)
            self._order = epoch, order.tolist()
        return self._order[1]

    # -- what State calls ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step of the workers that there are now."""
        self._is_given, self._workers = True, workers.size()

    def advance(self) -> None:
        """Count the step that was under way, of the workers with which it has begun."""
        epoch, taken = self._begins(*self._at, self._workers)
        self._at = epoch, taken + self._batch * self._workers
        self._drawn = max(self._drawn - 1, 0)

    def check_same(self, state: dict[str, Any] | None) -> None:
        """Raise :class:`agmerge.AGMergeError` unless a sampler of that ``state`` deals out as this one does."""
        for name, own in self._dealing().items():
            other = (state or {}).get(name)
            if own != other:
                raise AGMergeError(OTHER_SAMPLER.format(name=name, own=own, other=other))

    def _dealing(self) -> dict[str, Any]:
        """Return what must be the same on all workers, so that each sample is dealt out once."""
        return {"batch_size": self._batch, "seed": self._seed, "shuffle": self._shuffle}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, how many samples of it all workers have trained with, and how they are dealt out."""
        return {"epoch": self._at[0], "taken": self._at[1], "count": self._count, **self._dealing()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place. Raises :class:`agmerge.AGMergeError` if it is of a data set of another length."""
        if state["count"] != self._count:
            raise AGMergeError(
                f"AGM407: The data set has {self._count} samples, but {state['count']} when its position was saved. "
                "Use the same data on all workers."
            )
        self._at = state["epoch"], state["taken"]


# The state of a job.

P = ParamSpec("P")
T = TypeVar("T")
OWN = ("optimizer", "model", "scheduler")
HOROVODS = (
    "it belongs to Horovod. With horovodrun, use horovod.torch.elastic, which supports agmerge.DistributedOptimizer. "
    "agmerge's own elastic training has agmerge.elastic.State. See docs/elastic.md"
)
NOT_ELASTIC = (
    "AGM015: agmerge.elastic.State requires an elastic job. Call agmerge.init(elastic=True) first. See docs/elastic.md."
)
NOT_WRAPPED = (
    "AGM310: agmerge.elastic.State(optimizer=...) got {kind}, which exchanges nothing. Pass the result of "
    "agmerge.DistributedOptimizer or LocalOptimizer."
)
OTHERS_STATE = (
    "AGM407: This worker cannot use the state of the others: {error}. Run the same script on all workers, and use a "
    "separate lighthouse for each job."
)


class State:
    """Collective. Keep model, optimizer and numbers of a training the same on all workers of an elastic job.

    Create it once on every worker, before the first step. A worker that joins later receives the values from an
    existing one. Call :meth:`commit` after each step (docs/elastic.md).

    Args:
        model (torch.nn.Module): The model.
        optimizer (DistributedOptimizer or LocalOptimizer): The wrapped optimizer.
        scheduler (object): Learning-rate scheduler, or another object with ``state_dict()``. Default: None.
        sampler (Sampler): Distributes the samples over the present workers. Default: None.
        on_change (callable): Called as ``on_change(before, now)`` on every worker after the number of workers has
            changed, before the next step. Use it, for example, to adapt the learning rate. Default: None.
        **values: Further values, such as ``step=0``. They become attributes. Numbers, strings, tensors, lists and dicts
            are supported, and objects with ``state_dict()`` and ``load_state_dict()``.

    Raises:
        agmerge.AGMergeError: Without ``agmerge.init(elastic=True)``, for a plain optimizer, and if the state of the
            other workers does not fit.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any = None,
        sampler: Sampler | None = None,
        on_change: Callable[[int, int], None] | None = None,
        **values: Any,
    ) -> None:
        if not workers.can_regroup():
            raise AGMergeError(NOT_ELASTIC)
        if not hasattr(optimizer, "_reducer"):
            raise AGMergeError(NOT_WRAPPED.format(kind=type(optimizer).__name__))
        self._model, self._optimizer, self._scheduler, self._sampler = model, optimizer, scheduler, sampler
        self._on_change, self._names, self._leaves = on_change, tuple(values), False
        self._is_new = True  # it has not got the state of the others
        vars(self).update(values)
        self._begin()
        if sampler is not None:
            sampler.begin()
        self._size = workers.size()

    def commit(self) -> bool:
        """Collective. Admit new workers, if any wait. Call it between two steps, on all workers.

        With fewer than ``min_workers`` it waits for more.

        Returns:
            False on a worker that has called :meth:`leave`, which must end its training loop. Otherwise True.

        Raises:
            agmerge.TooFewWorkers: If there are too few workers for longer than ``patience``.
        """
        if not self._end_step():
            return False
        self._begin_step()
        return True

    def retried(self, function: Callable[P, T]) -> Callable[P, T]:
        """Make a function with collectives of its own survive the loss of a worker: a decorator.

        If a worker fails while the function runs, all survivors call it again. Use it, for example, for an evaluation
        that calls ``agmerge.allreduce``. All workers must call the function between two steps, at the same places. It
        ends with a message of 16 bytes per worker. The function must be able to run twice.

        Args:
            function (callable): The function.

        Returns:
            The decorated function. It raises :class:`agmerge.AGMergeError` within a step, and
            :class:`agmerge.RankMismatchError` if workers are in different functions.
        """

        @functools.wraps(function)
        def called(*arguments: P.args, **options: P.kwargs) -> T:
            """Collective."""
            name = getattr(function, "__qualname__", "a function")
            reducer: AnyReducer = self._optimizer._reducer
            reducer.check_idle(RETRIED.format(name=name))
            return reducer.participation.retried(lambda: function(*arguments, **options), name)

        return called

    def leave(self) -> None:
        """Announce that this worker leaves after its next exchange, for example before its machine is taken away.

        The next :meth:`commit` after that exchange returns False here, or a later one if another worker fails
        meanwhile. This worker's residuals go to another worker. You can call this from any thread, such as a signal
        handler.
        """
        self._leaves = True
        workers.announce_leaving()

    if TYPE_CHECKING:  # step=0 makes an attribute

        def __getattr__(self: State, name: str) -> Any: ...

        def __setattr__(self: State, name: str, value: Any) -> None: ...

    def _begin(self) -> None:
        """Collective. Meet the others as one that has nothing yet, also where one of them is lost meanwhile."""
        members = workers.world()
        while True:
            try:
                self._meet(members)
                break
            except NoAnswer as error:
                if members.rank in error.missing:  # the others are within a step, and go on without this one
                    raise
                members = workers.regroup()
        self._is_new = False
        workers.announce_begun()

    def _end_step(self) -> bool:
        """Collective. End a step, and let those leave that want to; return whether this worker stays.

        Between this and :meth:`_begin_step` comes what belongs to the step, such as an evaluation, without newcomers.
        """
        if self._sampler is not None:
            self._sampler.advance()
        if self._let_go():
            workers.shutdown()
            return False
        return True

    def _begin_step(self) -> None:
        """Collective. Let newcomers in, if any wait, and begin the next step."""
        participation = self._optimizer._reducer.participation
        if workers.world().has_failed:  # as a collective of the script has found out
            self._optimizer._reducer.check_idle("commit()")
        if workers.world().has_failed:  # nothing was under way
            self._regroup(lets_in=False)
        # A lone worker may exchange nothing: no message tells it that others wait, and there is none to agree with.
        if participation.lets_in or (workers.size() == 1 and workers.newcomers_wait()):
            self._let_in()
        while workers.has_too_few():
            self._let_in()
        if self._sampler is not None:
            self._sampler.begin()
        before, self._size = self._size, workers.size()
        participation.committed()
        if before != self._size and self._on_change is not None:
            self._on_change(before, self._size)

    def _let_go(self) -> bool:
        """Collective. Let those leave that have announced it; return whether this worker is one of them."""
        reducer = self._optimizer._reducer
        if reducer.participation.lets_go and workers.size() > 1:
            reducer.check_idle("commit()")
            if let_worker_go(reducer, lambda: self._leaves, lambda: self._regroup(lets_in=False)):
                return True
        return self._leaves and workers.size() == 1

    def _let_in(self) -> None:
        """Collective. Form a group with the workers that wait, and hand them the state."""
        self._optimizer._reducer.check_idle("commit()")
        with suppress(NoAnswer):  # whoever gives the group up ends what others are still receiving of the last step
            workers.world().barrier("newcomers are let in").wait(timeouts.default())
        self._regroup(lets_in=True)

    def _regroup(self, *, lets_in: bool) -> None:
        """Collective. Form the next group, between two steps. ``lets_in``: with the workers that wait."""
        before = workers.size()
        while True:
            try:
                self._meet(workers.regroup(lets_in=lets_in))
                break
            except NoAnswer:  # another one was lost meanwhile
                lets_in = False
        self._optimizer._reducer.participation.count_change(before)

    def _meet(self, members: Backend) -> None:
        """Collective. Settle with the members of a new group; newcomers are handed the state of one of the others."""
        reducer = self._optimizer._reducer
        outcome = reducer.exchange.meet(members, is_new=self._is_new)
        receivers = [rank for rank in outcome.new if rank != outcome.donor]
        if receivers:
            self._hand_over(members, outcome, receivers)

    def _hand_over(self, members: Backend, outcome: Settled, receivers: list[int]) -> None:
        """Collective. Send the donor's state to ``receivers``; the other members merely wait until it is there."""
        timeout, gives = timeouts.default(), members.rank == outcome.donor
        outline, tensors = tensor_stream.outlined(self._state()) if gives else (b"", [])
        size = torch.tensor([tensor_stream.size_of(tensors)])
        members.broadcast(size, outcome.donor, "elastic state/size").wait(timeout)
        part = members.subgroup([outcome.donor, *receivers], "elastic state", timeout)
        pauses: Iterable[Any] = range(int(size) // tensor_stream.PAUSE)
        state: dict[str, Any] = {}
        if part is not None:
            outline = broadcast_bytes(part, outline, 0, "elastic state", timeout)
            if not gives:
                state, tensors = tensor_stream.unfilled(outline)
            pauses = tensor_stream.broadcast_tensors(part, tensors, 0, "elastic state/tensors", timeout)
        for _ in pauses:  # those that wait would count the others as lost else, with a state that takes minutes
            members.barrier("elastic state is on its way").wait(timeout)
        if part is not None:
            if not gives:
                self._load(state)
            part.drop()
            self._is_new = False  # from here on: others may be a step ahead when they hear that this one is lost
        members.barrier("elastic state is there").wait(timeout)

    # -- what is handed over ------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Return this worker's state as a newcomer needs it: without what is this worker's own."""
        state = self._optimizer.state_dict()
        section = dict(state.pop(rank_state.SECTION))
        section |= {plural: {} for plural in rank_state.LOST}
        if section["updates"] is not None:
            section["updates"] = rank_state.common_part(section["updates"])
        return {
            "section": {**section, "window": {}},
            "optimizer": state,
            "model": self._model.state_dict(),
            "scheduler": _saved(self._scheduler),
            "sampler": _saved(self._sampler),
            "values": {name: _saved(getattr(self, name)) for name in self._names},
        }

    def _load(self, whole: dict[str, Any]) -> None:
        """Take over the state of a donor, as :meth:`_state` has returned it there."""
        if set(whole["values"]) != set(self._names):
            raise AGMergeError(
                f"AGM407: agmerge.elastic.State has {sorted(self._names)} on this worker and "
                f"{sorted(whole['values'])} on the others. Run the same script on all workers."
            )
        if self._sampler is not None:
            self._sampler.check_same(whole["sampler"])
        try:
            self._model.load_state_dict(whole["model"])
            load_state(self._optimizer._inner, whole["optimizer"])
            rank_state.load(self._optimizer._reducer, whole["section"], own=True)
            _restored(self._scheduler, whole["scheduler"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise AGMergeError(OTHERS_STATE.format(error=error)) from error
        _restored(self._sampler, whole["sampler"])
        for name, saved in whole["values"].items():
            setattr(self, name, _restored(getattr(self, name), saved))


def _saved(value: Any) -> Any:
    """Return what newcomers are handed of a value of :class:`State`."""
    return value.state_dict() if hasattr(value, "state_dict") else value


def _restored(value: Any, saved: Any) -> Any:
    """Return ``value`` with the state that :func:`_saved` has returned of another.

    Without a state it is ``saved``, with tensors where those of ``value`` lie.
    """
    if isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(value.device)
    if isinstance(value, dict) and isinstance(saved, dict):
        return {key: _restored(value.get(key), one) for key, one in saved.items()}
    if isinstance(value, (list, tuple)) and isinstance(saved, (list, tuple)) and len(value) == len(saved):
        return type(saved)(map(_restored, value, saved))
    if not hasattr(value, "load_state_dict"):
        return saved
    value.load_state_dict(saved)
    return value


def __getattr__(name: str) -> Any:
    hint = f": {HOROVODS}" if name in ("run", "TorchState", "ElasticSampler", "ObjectState", "TensorFlowState") else ""
    raise AttributeError(f"module 'agmerge.elastic' has no attribute {name!r}{hint}")
