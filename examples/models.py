"""Models by name for benchmarks, with random weights, and one random batch for each: nothing is downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 1000
VOCABULARY, POSITIONS = 8192, 128


@dataclass
class Workload:
    """A model and a batch for it. ``unit``: what a batch is a number of."""

    model: nn.Module
    x: Tensor
    y: Tensor
    unit: str

    def to(self, device: torch.device) -> Workload:
        """The same on ``device``."""
        return Workload(self.model.to(device), self.x.to(device), self.y.to(device), self.unit)

    def loss(self) -> Tensor:
        """The cross entropy of the batch."""
        return F.cross_entropy(self.model(self.x), self.y)


def build(name: str, batch_size: int, image_size: int = 224) -> Workload:
    """The workload called ``name``. Raises ``ValueError`` that lists the names, or says what is not installed."""
    if name == "gpt2":
        x, y = (torch.randint(VOCABULARY, (batch_size, POSITIONS)) for _ in range(2))
        return Workload(_gpt2(), x, y, "sequences")
    x, y = torch.randn(batch_size, 3, image_size, image_size), torch.randint(CLASSES, (batch_size,))
    if name in _OURS:
        return Workload(_OURS[name](), x, y, "img")
    if name in _torchvision():
        return Workload(_torchvision()[name](), x, y, "img")
    known = sorted({*_OURS, "gpt2", *_torchvision()})
    more = "" if _torchvision() else "; torchvision, which brings more, is not installed"
    raise ValueError(f"unknown model {name!r}; models: {', '.join(known)}{more}")


class NextToken(nn.Module):
    """A language model whose output has the classes where ``cross_entropy`` looks for them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, use_cache=False).logits.transpose(1, 2)


def _gpt2() -> nn.Module:
    """Six layers of width 384; 13.8 million parameters, the word embeddings shared with the output."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("gpt2 needs transformers: pip install transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=384,
        n_layer=6,
        n_head=6,
        bos_token_id=None,  # those of the published model are outside this vocabulary
        eos_token_id=None,
    )
    return NextToken(GPT2LMHeadModel(config))


def _norm_conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class _Bottleneck(nn.Module):
    """Three convolutions beside a shortcut, the middle one with the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_norm_conv(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_norm_conv(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_norm_conv(width, outputs, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_norm_conv(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def _resnet50() -> nn.Module:
    """ResNet-50 (He et al., CVPR 2016): 25,557,032 parameters."""
    layers: list[nn.Module] = [*_norm_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            layers.append(_Bottleneck(inputs, width, stride=2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def _cnn() -> nn.Module:
    """Three convolutions and a linear layer: 606,472 parameters, for any image size, quick on a CPU."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [*_norm_conv(inputs, outputs, 3, 2), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128 * 4, CLASSES))


_OURS: dict[str, Callable[[], nn.Module]] = {"cnn": _cnn, "resnet50": _resnet50}


def _torchvision() -> dict[str, Callable[[], Any]]:
    """The classifiers of torchvision, without weights; none if it is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        return {}
    from torchvision import models

    return {name: models.get_model_builder(name) for name in models.list_models(module=models)}
