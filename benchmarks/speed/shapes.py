# SPDX-License-Identifier: Apache-2.0
"""Parameter shapes of well-known models, in readiness order (the last layer's gradient is ready first)."""

from __future__ import annotations

import math
from collections.abc import Callable

Shapes = list[tuple[int, ...]]

BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet152": (3, 8, 36, 3)}
VGG16 = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)


def resnet(blocks: tuple[int, ...]) -> Shapes:
    """Return a bottleneck ResNet on ImageNet (He et al., 2016); each convolution has a batch norm, none a bias."""

    def conv(inputs: int, outputs: int, size: int) -> Shapes:
        return [(outputs, inputs, size, size), (outputs,), (outputs,)]

    shapes, inputs = conv(3, 64, 7), 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            shapes += conv(inputs, width, 1) + conv(width, width, 3) + conv(width, 4 * width, 1)
            if block == 0:
                shapes += conv(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


def vgg16() -> Shapes:
    """Return VGG-16 on ImageNet (Simonyan and Zisserman, 2015), without batch norm."""
    shapes: Shapes = []
    for inputs, outputs in zip((3, *VGG16), VGG16, strict=False):
        shapes += [(outputs, inputs, 3, 3), (outputs,)]
    for inputs, outputs in ((512 * 49, 4096), (4096, 4096), (4096, 1000)):
        shapes += [(outputs, inputs), (outputs,)]
    return shapes


def block(width: int, fused: bool) -> Shapes:
    """Return one transformer layer: attention, two layer norms, a feed-forward of 4 x width."""
    attention = [(3 * width, width), (3 * width,)] if fused else [(width, width), (width,)] * 3
    norm, feed = [(width,), (width,)], [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*norm, *attention, (width, width), (width,), *norm, *feed]


def bert(width: int, layers: int) -> Shapes:
    """Return BERT (Devlin et al., 2019), uncased: embeddings, encoder, pooler."""
    embeddings = [(30522, width), (512, width), (2, width), (width,), (width,)]
    return [*embeddings, *block(width, fused=False) * layers, (width, width), (width,)]


def gpt2(width: int = 768, layers: int = 12) -> Shapes:
    """Return GPT-2 (Radford et al., 2019), output tied to the token embedding."""
    return [(50257, width), (1024, width), *block(width, fused=True) * layers, (width,), (width,)]


def vit(width: int = 1024, layers: int = 24) -> Shapes:
    """Return ViT-L/16 at 224 pixels (Dosovitskiy et al., 2021)."""
    patches = [(1, 1, width), (1, 197, width), (width, 3, 16, 16), (width,)]
    return [*patches, *block(width, fused=True) * layers, (width,), (width,), (1000, width), (1000,)]


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": lambda: resnet(BLOCKS["resnet50"]),
    "resnet152": lambda: resnet(BLOCKS["resnet152"]),
    "vgg16": vgg16,
    "bert-base": lambda: bert(768, 12),
    "bert-large": lambda: bert(1024, 24),
    "gpt2": gpt2,
    "vit-large": vit,
}


LARGER: dict[str, Callable[[], Shapes]] = {"gpt2-large": lambda: gpt2(1280, 36)}
"""For scale.py alone: planning.py has its grid from the others."""


def shapes(model: str) -> Shapes:
    """Return the shape of each tensor of `model`, the first to be ready first."""
    return {**MODELS, **LARGER}[model]()[::-1]


def sizes(model: str) -> list[int]:
    """Return elements per tensor of `model`, the first to be ready first."""
    return [math.prod(shape) for shape in shapes(model)]


def small_gpt2() -> Shapes:
    """Return the GPT-2 of examples/models.py."""
    return [(8192, 384), (128, 384), *block(384, fused=True) * 6, (384,), (384,)]


MEASURED: dict[str, Callable[[], Shapes]] = {
    "gpt2": small_gpt2,
    "resnet50": MODELS["resnet50"],
}
"""What step_time.py trains."""
