# SPDX-License-Identifier: Apache-2.0
"""Language models from 0.25 to 124 million parameters, their optimizers, and the schedule of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention

from evidence.text import BYTES, PAIRS

CLIP, BETAS, DECAY = 1.0, (0.9, 0.95), 0.1
WARM_UP, LAST = 0.05, 0.1  # share of the steps in which the rate rises; the rate at the end, of the highest one
AT_ONCE = 1 << 15  # tokens of which dense training has activations at a time, at most
STATE_BYTES = 32  # of a worker for each parameter: weights, gradients, moments, and up to 16 of the library


@dataclass(frozen=True)
class Size:
    """Shape of a model, and how it is trained."""

    layers: int
    width: int
    heads: int
    context: int  # tokens
    batch: int  # tokens of a step, of all workers together
    rate: float  # of AdamW, near dense's best

    @property
    def parameters(self) -> int:
        """Return the number of parameters without embeddings."""
        return self.layers * (12 * self.width**2 + 13 * self.width) + 2 * self.width

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens: bytes for small models, so that embeddings do not dominate."""
        return BYTES if self.parameters < 5_000_000 else PAIRS

    def bytes_needed(self, workers: int, batch: int) -> int:
        """Return the bytes that a training takes at most, about: states of all workers, and one step's activations."""
        weights = self.parameters + (self.vocabulary + self.context) * self.width
        live = max(batch // workers, min(batch, AT_ONCE))  # tokens: workers take turns, and dense accumulates
        activations = 4 * live * (self.layers * 40 * self.width + 4 * self.vocabulary)
        return workers * weights * STATE_BYTES + activations


SIZES = {
    "0.25m": Size(layers=2, width=104, heads=4, context=64, batch=2048, rate=3e-3),
    "1m": Size(layers=4, width=144, heads=4, context=128, batch=4096, rate=3e-3),
    "4m": Size(layers=5, width=256, heads=4, context=256, batch=16384, rate=2e-3),
    "14m": Size(layers=8, width=384, heads=6, context=512, batch=32768, rate=1.5e-3),
    "30m": Size(layers=10, width=512, heads=8, context=512, batch=65536, rate=1e-3),
    "124m": Size(layers=13, width=896, heads=14, context=1024, batch=131072, rate=6e-4),
}
OPTIMIZERS = {"adamw": 1.0, "muon": 5.0, "sgd": 75.0, "lion": 0.15}  # the rate of each, in those of AdamW


class Block(nn.Module):
    """Layer of a transformer: attention, then two linear maps, each added to what comes in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm, self.mixed, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.second, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape: (rows, tokens, width)."""
        rows, length, width = hidden.shape
        parts = self.mixed(self.norm(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        moved: Tensor = hidden + self.down(gelu(self.up(self.second(hidden))))
        return moved


class GPT(nn.Module):
    """Causal transformer with learned positions, as GPT-2; the output shares the weights of the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith(("out.weight", "down.weight"))  # as in GPT-2: sums of layers keep their size
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return linear(self.norm(hidden), self.tokens.weight)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy of each next token, in nats."""
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(torch.lerp(momentum, parameter.grad, 0.1).sign_(), alpha=group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


def optimizers_of(kind: str, model: GPT, rate: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model; ``rate`` is the learning rate of the first one.

    Matrices decay, vectors do not. Muon steps the matrices of the blocks, and AdamW the rest.
    """
    every = list(model.parameters())
    matrices, vectors = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    if kind == "muon":
        inner = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
        known = set(inner)
        groups[0]["params"] = [parameter for parameter in matrices if parameter not in known]
        others = torch.optim.AdamW(groups, lr=rate / OPTIMIZERS["muon"], betas=BETAS, fused=True)
        return [torch.optim.Muon(inner, lr=rate, weight_decay=DECAY), others]
    if kind == "adamw":
        return [torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)]
    if kind == "lion":
        return [Lion(groups, lr=rate)]
    return [torch.optim.SGD(every, lr=rate, momentum=0.9)]


def rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate in a step, counted from 0: a linear warm-up, then a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
