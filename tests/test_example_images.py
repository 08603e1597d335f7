# SPDX-License-Identifier: Apache-2.0
"""Jobs with pictures: what workers train with and evaluate, to the bit, and that tiny jobs learn."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from data import small_pictures
from jobs.base import Settings, Task
from jobs.images import JOBS
from torch import Tensor
from training import optimizers

TRAIN, HELD_OUT = 200, 60  # pictures


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with some of the small pictures, in every format."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("few")
    parts = small_pictures.parts()
    train, test = (
        small_pictures.Part(*(column[:count] for column in part))
        for part, count in zip(parts, (TRAIN, HELD_OUT), strict=True)
    )
    small_pictures.cifar10(folder / "cifar10/cifar-10-batches-bin", train, test)
    small_pictures.cifar100(folder / "cifar100/cifar-100-python", train, test)
    small_pictures.mnist(folder / "mnist", train, test)
    small_pictures.imagenet(folder / "imagenet/train", train)
    small_pictures.imagenet(folder / "imagenet/val", test)
    return folder


def task_of(name: str, data: Path, *, batch_size: int = 16, **settings: object) -> Task:
    """Return a tiny job's task."""
    if name.startswith("vit"):
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    recipe = replace(JOBS[name].settled(True), batch_size=batch_size)
    return JOBS[name].make(replace(Settings(recipe, data, tiny=True), **settings))


# -- tasks -----------------------------------------------------------------------------------------------------

KINDS = ("mnist", "resnet20-cifar10", "vgg16-cifar100", "vgg16-imagenet")


def equal(left: list[tuple[Tensor, ...]], right: list[tuple[Tensor, ...]]) -> bool:
    """Tell whether two lists of batches are equal to the bit."""
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_an_epoch_that_is_resumed_has_the_same_bits_and_another_one_has_others(name: str, few: Path) -> None:
    task, other = (task_of(name, few) for _ in range(2))
    whole = list(task.batches(1))
    torch.rand(3)  # what others draw changes nothing
    before = torch.get_rng_state()
    assert equal(list(other.batches(1, first=5)), whole[5:]) and len(whole) == task.passes(1) == 12
    assert torch.equal(before, torch.get_rng_state())  # and nothing is drawn from what dropout draws from
    assert not equal(list(other.batches(2)), whole)
    assert not equal(list(task_of(name, few, seed=1).batches(1)), whole)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("uneven", [False, True])
def test_the_parts_of_workers_are_disjoint_and_equal_unless_uneven(name: str, uneven: bool, few: Path) -> None:
    tasks = [task_of(name, few, rank=rank, workers=3, uneven=uneven) for rank in range(3)]
    orders = [torch.cat(task.order(4)).tolist() for task in tasks]
    together = [place for order in orders for place in order]
    assert len(set(together)) == len(together)
    assert [len(order) for order in orders] == ([67, 67, 66] if uneven else [64] * 3)  # of 200; 4 batches of 16
    for task in tasks:
        sizes = [len(classes) for _, classes in task.batches(4)]
        assert len(sizes) == task.passes(4)
        assert max(sizes) <= 16 if uneven else set(sizes) == {16}


@pytest.mark.parametrize("name", KINDS)
def test_all_that_is_held_out_is_evaluated_once(name: str, few: Path) -> None:
    def sums(workers: int) -> dict[str, float]:
        total: Counter[str] = Counter()
        for rank in range(workers):
            task = task_of(name, few, rank=rank, workers=workers)
            task.model.eval()
            with torch.no_grad():
                total.update({key: value.item() for key, value in task.evaluate().items()})
        return dict(total)

    alone, together = sums(1), sums(3)
    assert alone["count"] == together["count"] == HELD_OUT
    assert alone["hits"] == together["hits"] and alone["loss"] == pytest.approx(together["loss"], rel=1e-4)
    figures = task_of(name, few).figures({"loss": 30.0, "hits": 15.0, "hits5": 45.0, "count": 60.0})
    assert figures == {"accuracy": 0.25, "loss": 0.5, **({"top5": 0.75} if "imagenet" in name else {})}


@pytest.mark.slow
def test_processes_that_read_ahead_give_the_same_bits_in_the_same_order(few: Path) -> None:
    alone, helped = (task_of("resnet50-imagenet", few, readers=readers) for readers in (0, 2))
    batches = helped.batches(3, first=8)
    found = [next(batches), next(batches)]  # one of each process, which has begun then
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGTERM)  # as a launcher does: the training decides when it ends
    assert equal([*found, *batches], list(alone.batches(3, first=8)))


PUBLISHED = {  # job: the rates of 4 workers by epoch, and samples per worker
    "mnist": ({0: 0.04, 9: 0.04}, 64),
    "resnet20-cifar10": ({0: 0.1, 80: 0.1, 81: 0.01, 121: 0.01, 122: 0.001}, 32),
    "vgg16-cifar10": ({0: 0.1, 81: 0.01, 122: 0.001}, 128),
    "resnet50-cifar100": ({0: 0.0125, 2: 0.0275, 5: 0.05, 29: 0.05, 30: 0.005, 60: 0.0005}, 32),
    "vgg19-imagenet": ({0: 0.0125, 5: 0.05, 30: 0.005, 60: 0.0005}, 32),
    "vit-large-imagenet": ({0: 5e-5, 20: 3.75e-5, 60: 1.25e-5}, 32),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_rates_are_those_that_were_published(name: str) -> None:
    recipe, (rates, batch_size) = JOBS[name].settled(False), PUBLISHED[name]
    optimizer = optimizers.plain(recipe, torch.nn.Linear(1, 1), optimizers.rate(recipe, 4, 1))
    schedule, found = recipe.schedule.of(optimizer, 10, recipe.epochs, 4), []
    for _ in range(10 * recipe.epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert {epoch: found[10 * epoch] for epoch in rates} == pytest.approx(rates)
    assert recipe.batch_size == batch_size


@pytest.mark.parametrize("name", JOBS)
def test_a_tiny_job_learns_a_batch_and_reaches_every_parameter(name: str, few: Path) -> None:
    task = task_of(name, few)
    recipe, model = task.settings.recipe, task.model.train()
    optimizer = optimizers.plain(recipe, model, recipe.lr)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # which is another network at every step
    batch, losses = next(task.batches(0)), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = task.loss(batch)
        loss.backward()
        assert loss.isfinite() and loss.dim() == 0
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]
