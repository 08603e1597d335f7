# SPDX-License-Identifier: Apache-2.0
"""DiLoCo and SparseLoCo are settings of ``LocalOptimizer``: each equals a reference of the paper's recurrence in numpy.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, Algorithm 1; Sarfi et al.,
"Communication Efficient LLM Pre-training with SparseLoCo", 2025, Algorithm 1. Workers fit lines of their own by AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support import agreed, digest
from torch import nn

import agmerge
import sparsifiers
from agmerge import testing

ROWS, COLUMNS, EXCHANGES = 64, 32, 10
START = np.random.default_rng(0).normal(size=(ROWS, COLUMNS))


def batch_of(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets; those of rank r are of a line of its own."""
    source = np.random.default_rng([rank, step])
    x = source.normal(size=(16, ROWS))
    return x, x @ np.random.default_rng([7, rank]).normal(size=(ROWS, COLUMNS))


@dataclass
class Worker:
    """Make AdamW's steps on the mean of squares, in numpy."""

    rank: int
    steps: int = 0
    first: np.ndarray = field(default_factory=lambda: np.zeros((ROWS, COLUMNS)))
    second: np.ndarray = field(default_factory=lambda: np.zeros((ROWS, COLUMNS)))
    residual: np.ndarray = field(default_factory=lambda: np.zeros((ROWS, COLUMNS)))

    def stepped(self, weights: np.ndarray, lr: float = 0.01, decay: float = 0.1) -> np.ndarray:
        x, y = batch_of(self.rank, self.steps)
        gradient = 2 * x.T @ (x @ weights - y) / y.size
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        root = np.sqrt(self.second / (1 - 0.999**self.steps)) + 1e-8
        return weights * (1 - lr * decay) - lr * self.first / (1 - 0.9**self.steps) / root

    def local(self, shared: np.ndarray, every: int) -> np.ndarray:
        """Return how far ``every`` steps lead away from ``shared``, as an outer gradient: what is to be taken off."""
        weights = shared
        for _ in range(every):
            weights = self.stepped(weights)
        return shared - weights


def diloco(ranks: int, every: int, lr: float, momentum: float) -> np.ndarray:
    shared, velocity, workers = START, np.zeros_like(START), [Worker(rank) for rank in range(ranks)]
    for _ in range(EXCHANGES):
        outer_gradient = sum(worker.local(shared, every) for worker in workers) / ranks
        velocity = momentum * velocity + outer_gradient
        shared = shared - lr * (outer_gradient + momentum * velocity)
    return shared


def two_bits(values: np.ndarray) -> np.ndarray:
    """Return a block of at most 256 values as four numbers: two magnitudes of 16 significant bits, and signs."""
    sizes = np.abs(values)
    above = sizes > sizes.mean()
    means = [sizes[chosen].mean() if chosen.any() else 0.0 for chosen in (~above, above)]
    low, high = (np.array(means, np.float32).view(np.int32) & -256).view(np.float32).astype(np.float64)
    return np.sign(values) * np.where(above, high, low)


def sparseloco(ranks: int, every: int, decay: float, density: float) -> np.ndarray:
    shared, workers = START, [Worker(rank) for rank in range(ranks)]
    for _ in range(EXCHANGES):
        update = np.zeros_like(shared)
        for worker in workers:
            worker.residual = decay * worker.residual + worker.local(shared, every)
            flat, sent = worker.residual.ravel(), np.zeros(shared.size)
            chosen = np.sort(np.argsort(-np.abs(flat), kind="stable")[: sparsifiers.budget(density, flat.size)])
            sent[chosen] = two_bits(flat[chosen])
            worker.residual = worker.residual - sent.reshape(shared.shape)
            update += sent.reshape(shared.shape) / ranks
        shared = shared - update
    return shared


class Line(nn.Module):
    """Hold the weights of a line, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.from_numpy(START.copy()))


def trained(ranks: int, every: int, **options: object) -> np.ndarray:
    """Return what all workers have in common after ten exchanges by the library."""

    def body(rank: int) -> tuple[str, np.ndarray]:
        model = Line()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        optimizer = agmerge.LocalOptimizer(inner, model.named_parameters(), every=every, carry="hold", **options)
        for step in range(EXCHANGES * every):
            x, y = map(torch.from_numpy, batch_of(rank, step))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(x @ model.weights, y).backward()
            optimizer.step()
        assert optimizer.stats()["exchanges"] == EXCHANGES
        return digest(model), model.weights.detach().numpy()

    digests, weights = zip(*testing.run(ranks, body), strict=True)
    agreed(list(digests))
    return weights[0]


@pytest.mark.parametrize("ranks, every", [(2, 1), (2, 5), (4, 10)])
@pytest.mark.parametrize("lr, momentum", [(0.7, 0.9), (1.0, 0.0)])
def test_nesterov_without_compression_is_diloco(lr: float, momentum: float, ranks: int, every: int) -> None:
    ours = trained(ranks, every, compression="none", outer=agmerge.Nesterov(lr=lr, momentum=momentum))
    np.testing.assert_allclose(ours, diloco(ranks, every, lr, momentum), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks, every", [(2, 1), (2, 5), (3, 15)])
@pytest.mark.parametrize("decay", [0.95, 1.0])
def test_held_residuals_that_decay_in_two_bits_are_sparseloco(decay: float, ranks: int, every: int) -> None:
    options = {"compression": "topk", "exchange": "sparse", "density": 0.03, "wire": "2bit", "decay": decay}
    ours = trained(ranks, every, **options)
    expected = sparseloco(ranks, every, decay, 0.03)
    assert np.abs(expected - START).max() > 0.01
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)
