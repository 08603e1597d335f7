"""Parameter sizes of well-known models, in readiness order (the last layer's gradient is ready first)."""

from __future__ import annotations

from collections.abc import Callable

Sizes = list[int]

BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet152": (3, 8, 36, 3)}
VGG16 = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)


def resnet(blocks: tuple[int, ...]) -> Sizes:
    """Bottleneck ResNet on ImageNet (He et al., 2016); each convolution has a batch norm, none a bias."""

    def conv(inputs: int, outputs: int, size: int) -> Sizes:
        return [inputs * outputs * size * size, outputs, outputs]

    sizes, inputs = conv(3, 64, 7), 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            sizes += conv(inputs, width, 1) + conv(width, width, 3) + conv(width, 4 * width, 1)
            if block == 0:
                sizes += conv(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*sizes, inputs * 1000, 1000]


def vgg16() -> Sizes:
    """VGG-16 on ImageNet (Simonyan and Zisserman, 2015), without batch norm."""
    sizes: Sizes = []
    for inputs, outputs in zip((3, *VGG16), VGG16, strict=False):
        sizes += [inputs * outputs * 9, outputs]
    for inputs, outputs in ((512 * 49, 4096), (4096, 4096), (4096, 1000)):
        sizes += [inputs * outputs, outputs]
    return sizes


def block(width: int, fused: bool) -> Sizes:
    """One transformer layer: attention, two layer norms, a feed-forward of 4 x width."""
    attention = [3 * width * width, 3 * width] if fused else [width * width, width] * 3
    norm = [width, width]
    return [*norm, *attention, width * width, width, *norm, 4 * width * width, 4 * width, 4 * width * width, width]


def bert(width: int, layers: int) -> Sizes:
    """BERT (Devlin et al., 2019), uncased: embeddings, encoder, pooler."""
    embeddings = [30522 * width, 512 * width, 2 * width, width, width]
    return [*embeddings, *block(width, fused=False) * layers, width * width, width]


def gpt2(width: int = 768, layers: int = 12) -> Sizes:
    """GPT-2 (Radford et al., 2019), output tied to the token embedding."""
    return [50257 * width, 1024 * width, *block(width, fused=True) * layers, width, width]


def vit(width: int = 1024, layers: int = 24) -> Sizes:
    """ViT-L/16 at 224 pixels (Dosovitskiy et al., 2021)."""
    patches = [width, 197 * width, 3 * 16 * 16 * width, width]
    return [*patches, *block(width, fused=True) * layers, width, width, width * 1000, 1000]


MODELS: dict[str, Callable[[], Sizes]] = {
    "resnet50": lambda: resnet(BLOCKS["resnet50"]),
    "resnet152": lambda: resnet(BLOCKS["resnet152"]),
    "vgg16": vgg16,
    "bert-base": lambda: bert(768, 12),
    "bert-large": lambda: bert(1024, 24),
    "gpt2": gpt2,
    "vit-large": vit,
}


LARGER: dict[str, Callable[[], Sizes]] = {"gpt2-large": lambda: gpt2(1280, 36)}
"""For scale.py alone: planning.py has its grid from the others."""


def sizes(model: str) -> Sizes:
    """Return elements per tensor of `model`, the first to be ready first."""
    return {**MODELS, **LARGER}[model]()[::-1]


def small_gpt2() -> Sizes:
    """The GPT-2 of examples/models.py."""
    return [8192 * 384, 128 * 384, *block(384, fused=True) * 6, 384, 384]


MEASURED: dict[str, Callable[[], Sizes]] = {
    "gpt2": small_gpt2,
    "resnet50": MODELS["resnet50"],
}
"""What step_time.py trains."""
