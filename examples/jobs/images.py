"""Classify pictures: the jobs with MNIST, CIFAR and ImageNet, with the hyper-parameters that were published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from data import augment, cifar, idx
from digits import DigitsCNN
from networks import resnet, vgg
from networks.vit import ViT
from schedules import Linear, Steps
from torch import Generator, Tensor, nn

from jobs.base import Job, Recipe, Settings, folder, generator
from jobs.classification import Batch, Classification
from jobs.imagenet import FromFolders

Arrays = tuple[idx.Bytes, idx.Bytes, idx.Bytes, idx.Bytes]  # pictures and classes for training, and those held out


@dataclass(frozen=True)
class Source:
    """Say what lies in memory, and how it is changed before it is trained with."""

    name: str  # of the folder in ``--data``
    load: Callable[[Path], Arrays]
    padding: int = 0  # pixels around a picture, of which a part in its size is taken; 0: it is taken, and never flipped
    degrees: float = 0.0  # a picture is turned by up to so many, either way


class InMemory(Classification):
    """Train with pictures that are one tensor of bytes, on the device, and are changed there, a batch at a time."""

    def __init__(
        self, settings: Settings, network: Callable[..., nn.Module], *, source: Source, weights: bool = False
    ) -> None:
        parts = [torch.tensor(part, device=settings.device) for part in source.load(folder(settings, source.name))]
        self.pictures, self.classes, self.held_pictures, self.held_classes = parts
        super().__init__(settings, network, (len(self.pictures), len(self.held_pictures)), weights)
        self.source = source
        self.mean, self.deviation = augment.moments(self.pictures)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        for step, places in enumerate(self.order(epoch)[first:], first):
            places = places.to(self.settings.device)
            pictures = self._changed(self.pictures[places], generator(self.settings, epoch, step))
            yield self._normal(pictures), self.classes[places].long()

    def held_batches(self) -> Iterator[Batch]:
        for places in self.held.to(self.settings.device).split(self.samples):
            yield self._normal(self.held_pictures[places]), self.held_classes[places].long()

    def _changed(self, pictures: Tensor, draws: Generator) -> Tensor:
        if self.source.padding:
            pictures = augment.flip(augment.crop(pictures, self.source.padding, draws), draws)
        if self.source.degrees:
            pictures = augment.rotate(pictures.float(), self.source.degrees, draws)
        return pictures

    def _normal(self, pictures: Tensor) -> Tensor:
        return (pictures.float() - self.mean) / self.deviation


def mnist(place: Path) -> Arrays:
    """Return MNIST's pictures with a channel."""
    train_x, train_y, test_x, test_y = idx.load(place)
    return train_x[:, None], train_y, test_x[:, None], test_y


def digits_cnn(tiny: bool = False) -> nn.Module:
    """Return the network of the digits for 28 x 28 pixels; tiny: two channels in place of 32."""
    return DigitsCNN(side=28, width=2 if tiny else 32)


MNIST = partial(InMemory, source=Source("mnist", mnist))
CIFAR10 = partial(InMemory, source=Source("cifar10", partial(cifar.load, classes=10), padding=4))
CIFAR100 = partial(InMemory, source=Source("cifar100", partial(cifar.load, classes=100), padding=4, degrees=15))

HE = Recipe("sgd", 0.1, 128, 141, momentum=0.9, wd=1e-4, schedule=Steps(((81, 0.1), (122, 0.01))))
GOYAL = Recipe(
    *("sgd", 0.0125, 32, 80, "workers"),
    momentum=0.9,
    wd=5e-5,
    schedule=Steps(((30, 0.1), (60, 0.01), (80, 0.001)), warmup=5),
)
VIT = Recipe("adamw", 5e-5, 32, 80, schedule=Linear())
LECUN = Recipe("sgd", 0.01, 64, 10, "workers", momentum=0.5)

TINY = {"batch_size": 16, "epochs": 10, "schedule": Linear(warmup=0.1)}  # for some hundred pictures
TINY_NORM, TINY_VGG, TINY_VIT = ({**TINY, "lr": lr} for lr in (0.05, 0.02, 1e-3))


def table() -> Iterator[Job]:
    """Yield the jobs."""
    yield Job("mnist", "two convolutions on MNIST, as Horovod's example", LECUN, digits_cnn, MNIST, TINY_NORM)
    for layers in (20, 56, 110):
        recipe = replace(HE, batch_size=32) if layers == 20 else HE
        network = partial(resnet.plain, layers)
        yield Job(f"resnet{layers}-cifar10", f"ResNet-{layers} on CIFAR-10", recipe, network, CIFAR10, TINY_NORM)
    small = partial(vgg.cifar, 16, classes=10, hidden=False)
    yield Job("vgg16-cifar10", "VGG-16 with batch norm on CIFAR-10", HE, small, CIFAR10, TINY_VGG)
    small = partial(resnet.bottlenecks, 50, classes=100, small=True)
    yield Job("resnet50-cifar100", "ResNet-50 for small pictures on CIFAR-100", GOYAL, small, CIFAR100, TINY_NORM)
    small = partial(vgg.cifar, 16, classes=100)
    yield Job("vgg16-cifar100", "VGG-16 with batch norm on CIFAR-100", GOYAL, small, CIFAR100, TINY_VGG)
    for layers in (50, 152):
        network = partial(resnet.bottlenecks, layers)
        yield Job(f"resnet{layers}-imagenet", f"ResNet-{layers} on ImageNet", GOYAL, network, FromFolders, TINY_NORM)
    for layers in (16, 19):
        network = partial(vgg.imagenet, layers)
        yield Job(f"vgg{layers}-imagenet", f"VGG-{layers} on ImageNet", GOYAL, network, FromFolders, TINY_VGG)
    for size in ("base", "large"):
        about = f"ViT-{size[0].upper()}/16 on"
        network, on_cifar = partial(ViT, size), partial(CIFAR100, weights=True)
        small = partial(ViT, size, classes=100)
        yield Job(f"vit-{size}-cifar100", f"{about} CIFAR-100, enlarged", VIT, small, on_cifar, TINY_VIT)
        on_folders = partial(FromFolders, weights=True)
        yield Job(f"vit-{size}-imagenet", f"{about} ImageNet", VIT, network, on_folders, TINY_VIT)


JOBS = {job.name: job for job in table()}
