# SPDX-License-Identifier: Apache-2.0
"""Look up the measured cost of a compressor with the optimizer of a script.

The figures are data, in one table: docs/compressor_reference.md shows it, and a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import sparsifiers
from agmerge.options import defaults
from agmerge.tensors.parameters import optimizers_of
from sparsifiers import Kind
from sparsifiers.quantising.choice import NONE

WARNED = 5.0  # % of the loss from which on a script that names the compressor is warned
MOMENTUM = "SGD with momentum"


class Cost(NamedTuple):
    """Cost of one compressor with one kind of optimizer: % of the held-out loss of small language models."""

    compressor: str  # its canonical name
    optimizer: str  # the name of its class, or MOMENTUM
    bound: float | None  # the density or the rank at which; smaller ones cost no less. None: it has neither
    least: float  # %, in several runs
    most: float

    @property
    def percent(self) -> str:
        """Return the figures as text."""
        return f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"

    @property
    def size(self) -> str:
        """Return the density or the rank as text; empty: there is neither."""
        if self.bound is None:
            return ""
        return f"rank {self.bound:g}" if sparsifiers.is_low_rank(self.compressor) else f"density {self.bound:g}"

    @property
    def text(self) -> str:
        """Return it as a sentence without an end."""
        what = f"compression={self.compressor!r}{f' ({self.size})' if self.size else ''} increased the loss"
        return f"{what} of a small language model by {self.percent} % in our tests with {self.optimizer}"


COSTS = (
    Cost("topk", "AdamW", 0.01, 22, 40),
    Cost("topk", "AdamW", 0.1, 0.1, 5.7),
    Cost("topk", "Muon", 0.01, 25, 25),
    Cost("topk", "Lion", 0.01, 25, 25),
    Cost("topk", "NAdam", 0.01, 7.5, 7.5),
    Cost("topk", "Adafactor", 0.01, 5.7, 5.7),
    Cost("topk", MOMENTUM, 0.01, 7.9, 18),
    Cost("topk", "SGD", 0.01, 12, 12),
    Cost("dgc", MOMENTUM, 0.01, 0, 1.3),
    Cost("adtopk", "AdamW", 0.01, 29, 29),
    Cost("sidco-gp", "AdamW", 0.01, 24, 24),
    Cost("powersgd", "AdamW", 4, 3.9, 3.9),
    Cost("powersgd", MOMENTUM, 4, 1.9, 1.9),
    Cost("acpsgd", "AdamW", 4, 12, 12),
    Cost("acpsgd", "AdamW", 16, 2.9, 2.9),
    Cost("acpsgd", MOMENTUM, 4, 16, 16),
    Cost("acpsgd", MOMENTUM, 16, 5, 5),
    Cost("eden-1", "AdamW", None, 0.3, 2.2),
    Cost("eden-2", MOMENTUM, None, 0, 10),
    Cost("eden-2", "RMSprop", None, 1.2, 1.2),
    Cost("eden-2", "Muon", None, 1.7, 6.2),
    Cost("eden-4", "Muon", None, 1.5, 2.6),
)


def known_cost(config: Any, optimizer: torch.optim.Optimizer) -> Cost | None:
    """Return the highest cost of ``config``'s compressors with ``optimizer``; None: there is nothing to warn of.

    Args:
        config: a ``Config``.
        optimizer: the one that steps, or one that stands for several.
    """
    if config.sync.updates is not None:
        return None
    high = [
        cost._replace(compressor=own)
        for own, name, bound in _named(config)
        for each in optimizers_of(optimizer)
        if (cost := cost_of(name, bound, each)) is not None and cost.most >= WARNED
    ]
    return max(high, key=lambda cost: cost.most, default=None)


def cost_of(name: str, bound: float | None, optimizer: torch.optim.Optimizer) -> Cost | None:
    """Return the cost of a compressor at the smallest ``bound`` that is no smaller. ``bound``: its density or rank."""
    for kind in kinds_of(optimizer):
        about = [cost for cost in COSTS if (cost.compressor, cost.optimizer) == (name, kind)]
        if found := [cost for cost in about if bound is None or cost.bound is None or bound <= cost.bound]:
            return min(found, key=lambda cost: cost.bound or 0)
    return None


def kinds_of(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield the names in the table that an optimizer may have, its own class first. Adam counts as AdamW."""
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    for kind in type(optimizer).__mro__:
        name = "Muon" if "muon" in kind.__name__.casefold() else {"Adam": "AdamW"}.get(kind.__name__, kind.__name__)
        yield MOMENTUM if name == "SGD" and momentum else name


def told_cost(name: str, bound: float | None, optimizer: torch.optim.Optimizer) -> str:
    """Return in words how much a compressor increases the loss. ``bound``: its density or rank."""
    cost = cost_of(name, bound, optimizer)
    if cost is not None:
        return f"{cost.percent} % higher in our tests"
    if name in defaults.candidates_for(optimizer):
        return "less than 1 % higher in our tests" if name != NONE else "none"
    return "not measured with this optimizer"


def _named(config: Any) -> Iterator[tuple[str, str, float | None]]:
    """Yield the names of a config's compressors, theirs in the table, and the smallest density or rank given."""
    compressor, memory = config.compression.compressor, config.compression.memory
    sparse, low_rank, quantised = map(compressor.part, (Kind.SPARSE, Kind.LOW_RANK, Kind.QUANTISED))
    if sparse is not None and memory.has_residual:
        # Without the memory of its paper dgc selects what topk does, and with it topk what dgc does.
        same = "dgc" if memory.has_momentum else "topk"
        name = same if sparse.name in ("topk", "dgc") else sparse.name
        yield sparse.name, name, config.compression.density.least
    if low_rank is not None and low_rank.rank is not None:
        rank = low_rank.rank
        yield low_rank.name, low_rank.name, rank if isinstance(rank, int) else min(rows for _, rows in rank)
    if quantised is not None:
        yield quantised.name, quantised.name, None
