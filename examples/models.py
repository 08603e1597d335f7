# SPDX-License-Identifier: Apache-2.0
"""Models by name for benchmarks, with random weights, and one random batch for each: nothing is downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from networks import vgg
from networks.resnet import bottlenecks, norm_conv
from networks.vit import ViT
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
    others, missing = _torchvision()
    if name in others:
        return Workload(others[name](), x, y, "img")
    known = sorted({*_OURS, *BERTS, "gpt2", *others})
    raise ValueError(f"unknown model {name!r}; models: {', '.join(known)}{missing}")


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


def _cnn() -> nn.Module:
    """Three convolutions and a linear layer: 606,472 parameters, for any image size, quick on a CPU."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [*norm_conv(inputs, outputs, 3, 2), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128 * 4, CLASSES))


_OURS: dict[str, Callable[[], nn.Module]] = {
    "cnn": _cnn,
    "resnet50": partial(bottlenecks, 50, CLASSES),
    "resnet152": partial(bottlenecks, 152, CLASSES),
    "vgg16": partial(vgg.imagenet, 16, CLASSES),
    "vgg19": partial(vgg.imagenet, 19, CLASSES),
    "vit_base": partial(ViT, "base", CLASSES),
    "vit_large": partial(ViT, "large", CLASSES),
}


def _torchvision() -> tuple[dict[str, Callable[[], Any]], str]:
    """Return the classifiers of torchvision, without weights, and why there are none: it is missing, or broken.

    A torchvision that was built for another torch, such as one with CUDA, raises ``RuntimeError`` when it is imported.
    """
    try:
        from torchvision import models
    except ModuleNotFoundError:
        return {}, "; torchvision, which brings more, is not installed"
    except (ImportError, RuntimeError) as error:
        return {}, f"; torchvision, which brings more, cannot be imported: {error}"
    return {name: models.get_model_builder(name) for name in models.list_models(module=models)}, ""
