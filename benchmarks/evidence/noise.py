# SPDX-License-Identifier: Apache-2.0
"""Noise scale of the gradient, near which batches stop paying (McCandlish et al., "An Empirical Model of Large-Batch
Training", 2018): the trace of the covariance of a token's gradient over the squared norm of the mean gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evidence import models, text
from evidence.models import CLIP, GPT, SIZES
from evidence.training import Training, first_model

SAMPLES, ROWS = 64, 8  # gradients, of so many rows each
AT = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # shares of the training
FAR = 1_000_000_000  # seeds of samples: none is that of a batch


def noise_scales(training: Training, corpus: text.Corpus) -> Iterator[tuple[int, float]]:
    """Train dense, and yield pairs of the tokens so far and the noise scale in tokens."""
    size, steps = SIZES[training.size], training.steps
    model, tokens = first_model(training), corpus.part("train")
    (optimizer,) = models.optimizers_of("adamw", model, training.rate)
    highest, when = training.rate, {max(1, round(share * steps)) for share in AT}
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = highest * models.rate_factor(step - 1, steps)
        gradient(model, tokens, size.context, training.batch // size.context, training.seed * 1_000_000 + step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if step in when:
            seeds = range(FAR + SAMPLES * step, FAR + SAMPLES * (step + 1))
            samples = torch.stack([gradient(model, tokens, size.context, ROWS, seed) for seed in seeds])
            yield step * training.batch, noise_scale(samples, ROWS * size.context)


def gradient(model: GPT, tokens: torch.Tensor, context: int, rows: int, seed: int) -> torch.Tensor:
    """Return the gradient of some rows as one vector; it is also in the parameters."""
    source = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(tokens) - context - 1, (rows,), generator=source)
    model.zero_grad()
    models.loss_of(model, text.windows(tokens, starts, context + 1)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def noise_scale(samples: torch.Tensor, tokens: int) -> float:
    """Return the noise scale in tokens.

    Args:
        samples: gradients of independent batches, a row each.
        tokens: of each batch.
    """
    covariance = samples.var(dim=0).sum().item() * tokens  # of one token
    count = len(samples)
    signal = samples.mean(dim=0).square().sum().item() - covariance / (tokens * count)
    return covariance / signal
