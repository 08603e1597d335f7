# SPDX-License-Identifier: Apache-2.0
"""``agmerge.elastic.Sampler``: samples of an epoch are dealt out once, whoever comes and goes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

import agmerge
from agmerge.checkpoint.elastic import Sampler
from agmerge.runtime import workers
from tests.support import elastic


@dataclass
class Place:
    """Rank and number of workers that a sampler is told."""

    rank: int = 0
    size: int = 1


@dataclass
class Worker:
    """Worker that trains with a sampler's batches, of which its loader draws ``ahead`` before they are needed."""

    sampler: Sampler
    ahead: int
    place: Place = field(default_factory=Place)
    loaded: list[list[int]] = field(default_factory=list)
    batches: Iterator[int] | None = None

    def step(self, batch: int) -> list[int]:
        """Return the samples of one step."""
        if self.batches is None:
            self.batches = self.sampler.endless()
        while len(self.loaded) <= self.ahead:
            self.loaded.append([next(self.batches) for _ in range(batch)])
        return self.loaded.pop(0)


class Job:
    """Workers of a job whose number changes between two steps; ``is_told`` is the place of the one that is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, batch: int, ahead: int) -> None:
        self.count, self.batch, self.ahead = count, batch, ahead
        self.told = Place()
        monkeypatch.setattr(workers, "rank", lambda: self.told.rank)
        monkeypatch.setattr(workers, "size", lambda: self.told.size)
        self.workers: list[Worker] = []

    def change(self, gone: list[int], come: int) -> None:
        """Take workers away, and let others in, at a commit."""
        for worker in self.workers:
            self.told = worker.place
            worker.sampler.advance()
        donor = self.workers[0].sampler.state_dict() if self.workers else None
        self.workers = [worker for rank, worker in enumerate(self.workers) if rank not in gone]
        for _ in range(come):
            self.workers.append(Worker(Sampler(range(self.count), self.batch), self.ahead))
            if donor is not None:
                self.workers[-1].sampler.load_state_dict(donor)
        for rank, worker in enumerate(self.workers):
            worker.place = Place(rank, len(self.workers))
            self.told = worker.place
            worker.sampler.begin()

    def step(self) -> tuple[int, list[int]]:
        """Return the epoch of a step, and the samples of all workers."""
        epochs, taken = set(), []
        for worker in self.workers:
            self.told = worker.place
            epochs.add(worker.sampler.epoch)
            taken += worker.step(self.batch)
        assert len(epochs) == 1, "all are in one epoch"
        return epochs.pop(), taken


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_each_sample_is_taken_once_an_epoch_whoever_comes_and_goes(
    monkeypatch: pytest.MonkeyPatch, seed: int, ahead: int
) -> None:
    """What loaders had drawn ahead of a change may be taken twice; no epoch takes more than there is, else."""
    chance, count, batch = random.Random(seed), 97, 3
    job = Job(monkeypatch, count, batch, ahead)
    job.change([], 3)
    taken: dict[int, Counter[int]] = {}
    changes: dict[int, int] = {}
    ending: dict[int, int] = {}  # workers for which what was left of an epoch was not enough
    for _ in range(120):
        epoch, samples = job.step()
        taken.setdefault(epoch, Counter()).update(samples)
        size = len(job.workers)
        ending.setdefault(epoch - 1, size)
        gone = [chance.randrange(size)] if size > 1 and chance.random() < 0.1 else []
        come = int(size < 5 and chance.random() < 0.1)
        changes[epoch] = changes.get(epoch, 0) + bool(gone or come)
        job.change(gone, come)
    assert len(taken) > 8
    for epoch, counts in list(taken.items())[:-1]:
        twice = sum(number - 1 for number in counts.values())
        assert twice <= (changes[epoch] + changes.get(epoch - 1, 0)) * ahead * batch * 5
        if ahead == 0:
            assert count - len(counts) < ending[epoch] * batch, "only what is not enough for all is left out"
    if ahead == 0 or not any(changes.values()):
        assert all(set(counts.values()) == {1} for counts in taken.values())


def test_epochs_have_orders_of_their_own_which_a_seed_determines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "rank", lambda: 0)
    monkeypatch.setattr(workers, "size", lambda: 1)

    def epochs(seed: int, *, shuffle: bool = True) -> list[list[int]]:
        sampler, found = Sampler(range(10), 2, seed=seed, shuffle=shuffle), []
        sampler.begin()
        for _ in range(3):
            assert len(sampler) == 10
            found.append([])
            for number, index in enumerate(sampler):
                found[-1].append(index)
                if number % 2:
                    sampler.advance()
        return found

    first = epochs(1)
    assert first == epochs(1) != epochs(2)
    assert first[0] != first[1] != first[2] and all(sorted(one) == list(range(10)) for one in first)
    assert epochs(1, shuffle=False) == [list(range(10))] * 3


def test_workers_of_a_job_take_parts_of_the_data_and_survivors_take_what_is_left() -> None:
    """Through a loader and ``State``: worker 2 dies in the epoch, after its second step."""

    def trained(worker: int) -> list[list[int]]:
        model = torch.nn.Linear(4, 4)
        optimizer = agmerge.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        sampler = agmerge.elastic.Sampler(range(60), batch_size=2)
        state = agmerge.elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0)
        taken: list[list[int]] = []
        for indices in torch.utils.data.DataLoader(range(60), batch_size=2, sampler=sampler):  # type: ignore[arg-type]
            if worker == 2 and len(taken) == 2:
                raise elastic.Killed(taken)
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            taken.append(indices.tolist())
            assert state.commit()
        assert sampler.epoch == 1
        return taken

    first, second, dead = elastic.run(3, trained)
    assert isinstance(dead, elastic.Killed) and isinstance(first, list) and isinstance(second, list)
    assert len(first) == len(second) == 2 + 1 + 10  # its third step was of three workers
    seen = [index for batches in (first, second, dead.args[0]) for batch in batches for index in batch]
    assert len(seen) == len(set(seen)) == 56


def test_it_refuses_what_would_give_all_workers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(agmerge.AGMergeError, match="AGM219"):
        next(iter(Sampler(range(4), 2)))
    with pytest.raises(ValueError, match="0 samples in batches of 2"):
        Sampler([], 2)
    with pytest.raises(agmerge.AGMergeError, match="3 samples, but 4 when"):
        Sampler(range(3), 2).load_state_dict(Sampler(range(4), 2).state_dict())
