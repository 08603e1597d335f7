"""Models by name for benchmarks, with random weights, and one random batch for each: nothing is downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 1000
VOCABULARY, POSITIONS = 8192, 128
BERT_VOCABULARY = 30_528  # the published 30,522, padded to a multiple of 8 as the ACP-SGD project's benchmark does
BERTS = {"bert_base": (768, 12), "bert_large": (1024, 24)}  # width and layers; a head has 64 of the width


@dataclass
class Workload:
    """Hold a model and a batch for it."""

    model: nn.Module
    x: Tensor
    y: Tensor
    unit: str  # what a batch is a number of
    criterion: Callable[[Any, Tensor], Tensor] = F.cross_entropy  # of what the model returns, and ``y``
    rate: float = 0.01  # a learning rate for one worker

    def to(self, device: torch.device) -> Workload:
        """The same on ``device``."""
        return replace(self, model=self.model.to(device), x=self.x.to(device), y=self.y.to(device))

    def loss(self) -> Tensor:
        """Return the loss of the batch: its cross entropy, unless the workload has a criterion of its own."""
        return self.criterion(self.model(self.x), self.y)


def build(name: str, batch_size: int, image_size: int = 224, sentence_len: int = 64) -> Workload:
    """Return the workload called ``name``. Raises ``ValueError`` that lists the names, or says what is not installed.

    image_size: pixels, both ways, of classifiers' images. sentence_len: tokens a sentence, of bert_base and bert_large.
    """
    if name == "gpt2":
        x, y = (torch.randint(VOCABULARY, (batch_size, POSITIONS)) for _ in range(2))
        return Workload(_gpt2(), x, y, "sequences")
    if name in BERTS:
        x, words = (torch.randint(BERT_VOCABULARY, (batch_size, sentence_len)) for _ in range(2))
        y = torch.cat([torch.randint(2, (batch_size, 1)), words], 1)
        return Workload(_bert(*BERTS[name]), x, y, "sentences", pretraining_loss, rate=2e-5)
    x, y = torch.randn(batch_size, 3, image_size, image_size), torch.randint(CLASSES, (batch_size,))
    if name in _OURS:
        return Workload(_OURS[name](), x, y, "img")
    if name in _torchvision():
        return Workload(_torchvision()[name](), x, y, "img")
    known = sorted({*_OURS, *BERTS, "gpt2", *_torchvision()})
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
    _need_transformers("gpt2")
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


class Pretraining(nn.Module):
    """Return the logits of words [batch, length, words] and of "is the next sentence" [batch, 2]: a BERT."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = self.inner(x)
        return output.prediction_logits, output.seq_relationship_logits


def pretraining_loss(logits: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Return the sum of both cross entropies; ``y`` [batch, 1 + length] has the next one's class, then words."""
    words, follows = logits
    return F.cross_entropy(words.flatten(0, 1), y[:, 1:].flatten()) + F.cross_entropy(follows, y[:, 0])


def _bert(width: int, layers: int) -> nn.Module:
    """BERT (Devlin et al., NAACL 2019) with both of its pretraining heads, the embeddings shared with the output.

    That is transformers' ``BertForPreTraining``, which the benchmark of the ACP-SGD project trains, with the same
    configuration: of width 768 and 12 layers 110,111,042 parameters in 206 tensors, of 1024 and 24 336,232,258 in 398.
    """
    _need_transformers("BERT")
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=BERT_VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    return Pretraining(BertForPreTraining(config))


def _need_transformers(model: str) -> None:
    """Raise ``ValueError`` unless transformers is installed, which ``model`` is taken from."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{model} needs transformers: pip install transformers")


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


def _resnet(depths: tuple[int, ...]) -> nn.Module:
    """ResNet-50 or -152 (He et al., CVPR 2016), by the number of blocks in each stage.

    They have 25,557,032 parameters in 161 tensors, and 60,192,808 in 467.
    """
    layers: list[nn.Module] = [*_norm_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = 64
    for stage, blocks in enumerate(depths):
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


_OURS: dict[str, Callable[[], nn.Module]] = {
    "cnn": _cnn,
    "resnet50": partial(_resnet, (3, 4, 6, 3)),
    "resnet152": partial(_resnet, (3, 8, 36, 3)),
}


def _torchvision() -> dict[str, Callable[[], Any]]:
    """The classifiers of torchvision, without weights; none if it is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        return {}
    from torchvision import models

    return {name: models.get_model_builder(name) for name in models.list_models(module=models)}
