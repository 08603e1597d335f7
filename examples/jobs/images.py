# SPDX-License-Identifier: Apache-2.0
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
from torch import Generator, Tensor, nn

from jobs.base import Job, Recipe, Settings, folder, generator
from jobs.classification import Batch, Classification
from jobs.imagenet import FromFolders
from jobs.schedules import Linear, Steps

Arrays = tuple[idx.Bytes, idx.Bytes, idx.Bytes, idx.Bytes]  # pictures and classes for training, and those held out


@dataclass(frozen=True)
class Source:
    """Say what lies in memory, and how it is changed before it is trained with."""

    name: str  # of the folder in ``--data``
    load: Callable[[Path], Arrays]
    padding: int = 0  # pixels around a picture, a part of which is taken, and flipped or not; 0: it is taken as it is
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
    """Return MNIST's pictures with a channel. Raises ``ValueError`` if they are of another size."""
    train_x, train_y, test_x, test_y = idx.load(place)
    if train_x.shape[1:] != (28, 28):
        raise ValueError(f"{place}: pictures of {train_x.shape[2]} x {train_x.shape[1]} pixels; MNIST's are of 28 x 28")
    return train_x[:, None], train_y, test_x[:, None], test_y


def digits_cnn(tiny: bool = False) -> nn.Module:
    """Return the network of the digits for 28 x 28 pixels; tiny: two channels in place of 32."""
    return DigitsCNN(side=28, width=2 if tiny else 32)


MNIST = partial(InMemory, source=Source("mnist", mnist))
CIFAR10 = partial(InMemory, source=Source("cifar10", partial(cifar.load, classes=10), padding=4))
CIFAR100 = partial(InMemory, source=Source("cifar100", partial(cifar.load, classes=100), padding=4, degrees=15))
VIT_CIFAR100, VIT_FOLDERS = partial(CIFAR100, weights=True), partial(FromFolders, weights=True)

HOROVOD = Recipe("sgd", 0.01, batch_size=64, epochs=10, growth="workers", momentum=0.5, compressor="dgc")
HE = Recipe("sgd", 0.1, batch_size=128, epochs=141, momentum=0.9, wd=1e-4, schedule=Steps(((81, 0.1), (122, 0.01))))
HE_32 = replace(HE, batch_size=32)
GOYAL_STEPS = Steps(((30, 0.1), (60, 0.01), (80, 0.001)), warmup=5)
GOYAL = Recipe("sgd", 0.0125, 32, 80, growth="workers", momentum=0.9, wd=5e-5, schedule=GOYAL_STEPS)
ADAMW = Recipe("adamw", 5e-5, batch_size=32, epochs=80, schedule=Linear())

TINY = {"batch_size": 16, "epochs": 10, "schedule": Linear(warmup=0.1)}  # for some hundred pictures
TINY_RESNET, TINY_VGG, TINY_VIT = ({**TINY, "lr": lr} for lr in (0.05, 0.02, 1e-3))

RESNET20, RESNET56, RESNET110 = (partial(resnet.plain, layers) for layers in (20, 56, 110))
RESNET50, RESNET152 = (partial(resnet.bottlenecks, layers) for layers in (50, 152))
RESNET50_SMALL = partial(resnet.bottlenecks, 50, classes=100, small=True)
VGG16, VGG19 = (partial(vgg.imagenet, layers) for layers in (16, 19))
VGG16_10, VGG16_100 = partial(vgg.cifar, 16, classes=10, hidden=False), partial(vgg.cifar, 16, classes=100)
VIT_BASE, VIT_LARGE = (partial(ViT, size) for size in ("base", "large"))
VIT_BASE_100, VIT_LARGE_100 = (partial(ViT, size, classes=100) for size in ("base", "large"))

TABLE = (
    Job("mnist", "the network of the digits, MNIST", HOROVOD, digits_cnn, MNIST, TINY_RESNET),
    Job("resnet20-cifar10", "ResNet-20, CIFAR-10", HE_32, RESNET20, CIFAR10, TINY_RESNET),
    Job("resnet56-cifar10", "ResNet-56, CIFAR-10", HE, RESNET56, CIFAR10, TINY_RESNET),
    Job("resnet110-cifar10", "ResNet-110, CIFAR-10", HE, RESNET110, CIFAR10, TINY_RESNET),
    Job("vgg16-cifar10", "VGG-16 with batch norm, CIFAR-10", HE, VGG16_10, CIFAR10, TINY_VGG),
    Job("resnet50-cifar100", "ResNet-50 for small pictures, CIFAR-100", GOYAL, RESNET50_SMALL, CIFAR100, TINY_RESNET),
    Job("vgg16-cifar100", "VGG-16 with batch norm, CIFAR-100", GOYAL, VGG16_100, CIFAR100, TINY_VGG),
    Job("vit-base-cifar100", "ViT-B/16, CIFAR-100 enlarged to 224 pixels", ADAMW, VIT_BASE_100, VIT_CIFAR100, TINY_VIT),
    Job("vit-large-cifar100", "ViT-L/16, CIFAR-100 enlarged", ADAMW, VIT_LARGE_100, VIT_CIFAR100, TINY_VIT),
    Job("resnet50-imagenet", "ResNet-50, ImageNet", GOYAL, RESNET50, FromFolders, TINY_RESNET),
    Job("resnet152-imagenet", "ResNet-152, ImageNet", GOYAL, RESNET152, FromFolders, TINY_RESNET),
    Job("vgg16-imagenet", "VGG-16, ImageNet", GOYAL, VGG16, FromFolders, TINY_VGG),
    Job("vgg19-imagenet", "VGG-19, ImageNet", GOYAL, VGG19, FromFolders, TINY_VGG),
    Job("vit-base-imagenet", "ViT-B/16, ImageNet", ADAMW, VIT_BASE, VIT_FOLDERS, TINY_VIT),
    Job("vit-large-imagenet", "ViT-L/16, ImageNet", ADAMW, VIT_LARGE, VIT_FOLDERS, TINY_VIT),
)
JOBS = {job.name: job for job in TABLE}
