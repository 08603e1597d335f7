# SPDX-License-Identifier: Apache-2.0
"""Samples of a data set, dealt out anew where workers of an elastic job come or go."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch

from agmerge.errors import AGMergeError
from agmerge.runtime import workers

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
