# SPDX-License-Identifier: Apache-2.0
"""Make the Vision Transformers of the published experiments (Dosovitskiy et al., ICLR 2021), which transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from networks import pretrained

SIZES = {"base": (768, 12, 12), "large": (1024, 24, 16)}  # width, layers, heads
TINY = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class ViT(nn.Module):
    """Classify pictures of any size, which are enlarged or made smaller to that of the network: 224, tiny 32.

    So CIFAR's pictures of 32 pixels meet the network that a folder of weights was made for, with patches of 16 x 16.

    size: "base" or "large", of 86,567,656 parameters in 200 tensors and 304,326,632 in 392 with 1000 classes. weights:
    a folder that ``save_pretrained`` has written; it decides on all sizes then, and its last layer is kept if that is
    of as many classes.
    """

    def __init__(self, size: str, classes: int = 1000, weights: Path | None = None, tiny: bool = False) -> None:
        super().__init__()
        width, layers, heads = SIZES[size]
        sizes: dict[str, Any] = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
        }
        if tiny:
            sizes = {**TINY, "intermediate_size": 64}
        if weights is not None:
            sizes = {"ignore_mismatched_sizes": True}
        self.inner = pretrained.make("ViTForImageClassification", "ViTConfig", weights, num_labels=classes, **sizes)
        self.side = int(self.inner.config.image_size)  # pixels

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.side:
            x = F.interpolate(x, size=(self.side, self.side), mode="bilinear", align_corners=False, antialias=True)
        return self.inner(x).logits
