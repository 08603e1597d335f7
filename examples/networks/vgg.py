# SPDX-License-Identifier: Apache-2.0
"""Define the VGG networks of the published experiments (Simonyan and Zisserman, ICLR 2015)."""

from __future__ import annotations

from torch import nn

from networks.resnet import started

DEPTHS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}  # convolutions in each stage
WIDTHS = (64, 128, 256, 512, 512)  # of the stages
HIDDEN = 4096
TINY, TINY_HIDDEN = 8, 128  # channels of the first stage; with fewer outputs dropout leaves too little


def imagenet(layers: int, classes: int = 1000, tiny: bool = False) -> nn.Sequential:
    """Return VGG-16 or -19 as published: 138,357,544 parameters in 32 tensors, and 143,667,240 in 38."""
    stages, channels = convolutions(layers, norm=False, tiny=tiny)
    side, hidden = (1, TINY_HIDDEN) if tiny else (7, HIDDEN)  # tiny: 32 pixels, of which the stages leave one
    return started(
        nn.Sequential(
            *stages, nn.AdaptiveAvgPool2d(side), nn.Flatten(), *classifier(side * side * channels, classes, hidden)
        )
    )


def cifar(layers: int, classes: int = 100, hidden: bool = True, tiny: bool = False) -> nn.Sequential:
    """Return VGG with batch norm for pictures of 32 pixels, of which the five stages leave one.

    hidden: three linear layers, as the CIFAR-100 experiments have (VGG-16: 34,015,396 parameters in 58 tensors); else
    a single one, as those with CIFAR-10 have (14,728,266 in 54 with 10 classes).
    """
    stages, channels = convolutions(layers, norm=True, tiny=tiny)
    linear = (
        classifier(channels, classes, TINY_HIDDEN if tiny else HIDDEN) if hidden else [nn.Linear(channels, classes)]
    )
    return started(nn.Sequential(*stages, nn.Flatten(), *linear))


def convolutions(layers: int, norm: bool, tiny: bool) -> tuple[list[nn.Module], int]:
    """Return the five stages, each of which halves both sides, and the channels of the last; tiny: one convolution."""
    modules: list[nn.Module] = []
    inputs = 3
    for count, width in zip((1,) * 5 if tiny else DEPTHS[layers], WIDTHS, strict=True):
        outputs = width * TINY // WIDTHS[0] if tiny else width
        for _ in range(count):
            modules.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            if norm:
                modules.append(nn.BatchNorm2d(outputs))
            modules.append(nn.ReLU(inplace=True))
            inputs = outputs
        modules.append(nn.MaxPool2d(2))
    return modules, inputs


def classifier(inputs: int, classes: int, hidden: int) -> list[nn.Module]:
    """Return three linear layers with dropout between them."""
    return [
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout()),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout()),
        nn.Linear(hidden, classes),
    ]
