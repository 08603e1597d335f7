# SPDX-License-Identifier: Apache-2.0
"""A :class:`GradientExchange` by itself, and what one step of it must come to, computed without it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparsifiers
from agmerge.options.resolve import resolve
from agmerge.options.typed import Options
from agmerge.runtime import process_sets, workers
from agmerge.step.config import Config
from agmerge.step.gradient_exchange import Combined, GradientExchange
from agmerge.tensors.parameters import ParameterInfo

SHAPES = {"a": (48, 32), "b": (1030,), "c": (64, 32), "small": (7,)}
SPARSE = {"compression": "topk", "density": 0.05, "dense": []}  # also of what is small
Tensors = Mapping[str, "Tensor | None"]


class Table:
    """Tensors by name, in the order in which they were given. ``tensors`` may change from outside between steps."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.frozen: set[str] = set()  # names of others, which are still in a group

    def active(self) -> list[ParameterInfo]:
        return [
            ParameterInfo(name, tensor, tensor.dtype, tensor.device, tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def names(self) -> Collection[str]:
        return self.tensors.keys() | self.frozen

    def snapshot(self) -> object:
        return [(name, id(tensor)) for name, tensor in self.tensors.items()]


def table(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Table:
    return Table({name: torch.zeros(shape) for name, shape in shapes.items()})


def config_of(**options: Any) -> Config:
    """Return the config of these arguments of ``DistributedOptimizer``, with one merge buffer a tensor by default."""
    return resolve(Options(**{"compression": "none", "exchange": "sparse", "merging": "layerwise", **options}))


def connected(table: Table, config: Config | None = None, **options: Any) -> GradientExchange:
    """Return an exchange of this rank's own, connected to the other ranks. ``config``: instead of ``options``."""
    exchange = GradientExchange(table, config_of(**options) if config is None else config)
    world = workers.world()
    chosen, wants_second = exchange.agreed.config.sync.process_set, exchange.agreed.config.quantises and world.size > 2
    comm, second = process_sets.communicators(world, chosen, 30.0, wants_second=wants_second)
    exchange.connect(world, comm, second=second)
    return exchange


def updates_of(combined: Combined) -> dict[str, Tensor | None]:
    """Return copies: updates are views until the next round begins."""
    return {name: None if update is None else update.clone() for name, update in combined.updates.items()}


def stepped(exchange: GradientExchange, tensors: Tensors) -> dict[str, Tensor | None]:
    """Make one step: hand ``tensors`` over in their order, and return copies of the updates."""
    for name, tensor in tensors.items():
        exchange.ready(name, tensor)
    updates = updates_of(exchange.finish())
    exchange.commit()
    return updates


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def drawn(rank: int, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """Return what ``rank`` exchanges in ``step``: normal numbers, which round when they are added."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}


def mean_in_rank_order(tensors: list[Tensor], summed: bool = False) -> np.ndarray:
    """Add up from rank 0 on, each sum rounded to float32, then divide by the number of ranks."""
    total = tensors[0].numpy().copy()
    for tensor in tensors[1:]:
        total = total + tensor.numpy()
    return total if summed else total * np.float32(1 / len(tensors))


class BruteForce:
    """All ranks of an exchange of top-k with residuals, one tensor a merge buffer, in numpy and in one thread."""

    def __init__(self, ranks: int, density: float) -> None:
        self.ranks, self.density = ranks, density
        self.residuals: list[dict[str, np.ndarray]] = [{} for _ in range(ranks)]

    def step(self, tensors: list[Tensors]) -> dict[str, np.ndarray]:
        """Return the updates of one step. ``tensors``: by rank; one that a rank does not name it has not."""
        updates = {}
        for name in {name: None for of_rank in tensors for name in [*of_rank, *self.residuals[0]]}:
            shape = next(of_rank[name].shape for of_rank in tensors if of_rank.get(name) is not None)
            update = np.zeros(shape, np.float32)
            for rank, of_rank in enumerate(tensors):
                whole = self.residuals[rank].get(name, np.zeros(shape, np.float32))
                if of_rank.get(name) is not None:
                    whole = whole + of_rank[name].numpy()
                k = sparsifiers.budget(self.density, whole.size)
                chosen = np.argsort(-np.abs(whole).ravel(), kind="stable")[:k]  # the lowest index of equal ones
                sent = np.zeros_like(whole)
                sent.ravel()[chosen] = whole.ravel()[chosen]
                self.residuals[rank][name] = whole - sent
                update = update + sent * np.float32(1 / self.ranks)
            updates[name] = update
        return updates


def with_compressor(config: Config, compressor: sparsifiers.Compressor, memory: str) -> Config:
    """Return ``config`` with another compressor, as a plug-in would have it."""
    return config.changed(compressor=compressor, memory=sparsifiers.memory(memory))
