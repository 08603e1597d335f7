"""Jobs with pictures: what workers train with and evaluate, to the bit, and that tiny jobs learn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import optimizers
import pytest
import torch
from data import cifar, idx, small_pictures
from jobs.base import Settings, Task
from jobs.images import JOBS
from torch import Tensor

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


def test_a_guess_among_the_first_five_counts_for_top_5(few: Path) -> None:
    task = task_of("resnet50-imagenet", few)

    class Fixed(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.arange(10.0).expand(len(x), 10)  # guesses class 9, then 8, 7, 6, 5

    task.model = Fixed()
    sums = task.evaluate()
    labels = task.listings[1].labels
    assert sums["hits"] == (labels == 9).sum() and sums["hits5"] == (labels >= 5).sum()


def test_pictures_that_are_held_out_are_not_changed_but_normalised(few: Path) -> None:
    task = task_of("resnet20-cifar10", few)
    pictures = torch.cat([x for x, _ in task.held_batches()])
    raw = torch.tensor(cifar.load(few / "cifar10", 10)[2])
    assert torch.allclose(pictures * task.deviation + task.mean, raw.float(), atol=1e-3)
    every = torch.cat([x for x, _ in task.batches(0)])
    assert every.mean().abs() < 0.2 and 0.8 < every.std() < 1.2


@pytest.mark.slow
def test_processes_that_read_ahead_give_the_same_bits_in_the_same_order(few: Path) -> None:
    alone, helped = (task_of("resnet50-imagenet", few, readers=readers) for readers in (0, 2))
    assert equal(list(helped.batches(3, first=8)), list(alone.batches(3, first=8)))


@pytest.mark.parametrize("name", ["mnist", "vgg16-imagenet"])
def test_too_few_pictures_for_a_batch_of_every_worker_are_told(name: str, few: Path) -> None:
    with pytest.raises(ValueError, match="200 pictures are not one batch of 128 for each of 2 workers: .*--batch-size"):
        task_of(name, few, batch_size=128, workers=2)
    assert task_of(name, few, batch_size=128, workers=2, uneven=True).passes(0) == 1


def test_weights_are_refused_where_there_are_none(few: Path) -> None:
    with pytest.raises(ValueError, match="--weights: only networks of transformers"):
        task_of("resnet20-cifar10", few, weights=few)


def test_a_vit_with_weights_begins_where_they_end(few: Path, tmp_path: Path) -> None:
    task = task_of("vit-base-cifar100", few)
    with torch.no_grad():
        task.model.inner.vit.layernorm.weight.fill_(0.5)
    task.model.inner.save_pretrained(tmp_path)
    again = task_of("vit-base-cifar100", few, weights=tmp_path)
    assert (again.model.inner.vit.layernorm.weight == 0.5).all()


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


def test_a_label_of_mnist_out_of_range_is_told(few: Path, tmp_path: Path) -> None:
    for path in (few / "mnist").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    labels = bytes((0, 0, 8, 1)) + HELD_OUT.to_bytes(4, "big") + bytes([10] * HELD_OUT)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(labels)
    with pytest.raises(ValueError, match="a label of the t10k set is 10"):
        idx.load(tmp_path)
