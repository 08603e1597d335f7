# SPDX-License-Identifier: Apache-2.0
"""Look up the measured cost of a compressor that a script has named, and one that costs less.

The figures are data, in one table: docs/compressor_reference.md shows it, and a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import sparsifiers
from agmerge.options import defaults
from agmerge.tensors.parameters import optimizers_of
from sparsifiers import Kind
from sparsifiers.quantising.choice import NONE

ENOUGH = 1.0  # % of the loss: there is no notice of a lower cost


@dataclass(frozen=True)
class Cost:
    """Cost of one compressor with one optimizer: % of the held-out loss of small language models, at equal steps."""

    compressor: str  # its canonical name
    optimizer: str  # the name of its class
    least: float  # %, in several runs
    most: float
    bound: float | None = None  # the density or the rank at which; smaller ones cost no less. None: it has neither
    momentum: bool | None = None  # of SGD: with one, or without; None: whatever it is
    decay: bool | None = None  # likewise, of weight decay
    instead: str = ""  # one that costs less for about as many bytes; empty: see :func:`cheaper`
    # The compressor and the memory that the script has, where these select what this one does; empty: it has this one.
    written: tuple[str, str] | tuple[()] = ()

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
    def setting(self) -> str:
        """Return the optimizer as text, with what it has and has not."""
        kinds = (("momentum", self.momentum), ("weight decay", self.decay))
        more = [f"{'with' if has else 'without'} {what}" for what, has in kinds if has is not None]
        return f"{self.optimizer} {' and '.join(more)}" if more else self.optimizer

    @property
    def text(self) -> str:
        """Return it as a sentence without an end, which begins with what the script has."""
        if self.written:
            name, memory = self.written
            at = f" at {self.size}" if self.bound is not None else ""
            what = (
                f"compression={name!r} with memory={memory!r} selects the same values as {self.compressor!r}, "
                f"which{at} increased"
            )
            return f"{what} the loss of a small language model by {self.percent} % in our tests with {self.setting}"
        at = f" ({self.size})" if self.bound is not None else ""
        what = f"compression={self.compressor!r}{at} increased the loss of a small language model by {self.percent} %"
        return f"{what} in our tests with {self.setting}"


COSTS = (
    Cost("topk", "AdamW", 22, 40, 0.01),
    Cost("topk", "AdamW", 0.1, 5.7, 0.1),
    Cost("topk", "Muon", 25, 25, 0.01),
    Cost("topk", "Lion", 25, 25, 0.01),
    Cost("topk", "NAdam", 7.5, 7.5, 0.01),
    Cost("topk", "Adafactor", 5.7, 5.7, 0.01),
    Cost("topk", "SGD", 18, 18, 0.01, momentum=True, decay=True, instead="dgc"),
    Cost("topk", "SGD", 7.9, 7.9, 0.01, momentum=True, decay=False, instead="dgc"),
    Cost("topk", "SGD", 12, 12, 0.01, momentum=False, decay=False),
    Cost("dgc", "SGD", 1.3, 1.3, 0.01, momentum=True, decay=True),
    Cost("adtopk", "AdamW", 29, 29, 0.01),
    Cost("sidco-gp", "AdamW", 24, 24, 0.01),
    Cost("powersgd", "AdamW", 3.9, 3.9, 4),
    Cost("powersgd", "SGD", 1.9, 1.9, 4, momentum=True, decay=False),
    Cost("acpsgd", "AdamW", 12, 12, 4),
    Cost("acpsgd", "AdamW", 2.9, 2.9, 16),
    Cost("acpsgd", "SGD", 16, 16, 4, momentum=True, decay=False),
    Cost("acpsgd", "SGD", 5, 5, 16, momentum=True, decay=False),
    Cost("eden-1", "AdamW", 0.3, 2.2),
    Cost("eden-2", "SGD", 0, 10, momentum=True),
    Cost("eden-2", "RMSprop", 1.2, 1.2),
    Cost("eden-2", "Muon", 1.7, 6.2),
    Cost("eden-4", "Muon", 1.5, 2.6),
)

# Of ``sync="updates"`` with its defaults: workers, and % of the loss with AdamW, from "Exchanging updates" in
# benchmarks/notebook/parity.md.
OF_UPDATES = ((2, 0.2), (4, 1.1), (8, 4.7))
FOR_UPDATES = ("AdamW", "NAdam", "RAdam", "Adamax", "Adafactor", "Lion")  # optimizers that it is for


def known_cost(config: Any, optimizer: torch.optim.Optimizer) -> Cost | None:
    """Return the cost of ``config``'s compressors with ``optimizer``: of several the highest.

    None: nothing was measured, or it cost less than ``ENOUGH``.

    Args:
        config: a ``Config``.
        optimizer: the one that steps, or one that stands for several.
    """
    if config.sync.updates is not None:
        return None
    found = [
        replace(cost, written=written)
        for name, bound, written in _named(config)
        for each in optimizers_of(optimizer)
        if (cost := _cost(name, bound, each)) is not None
    ]
    return max((cost for cost in found if cost.most >= ENOUGH), key=lambda cost: cost.most, default=None)


def cheaper(cost: Cost, optimizer: torch.optim.Optimizer) -> str:
    """Return a compressor that costs less: the default's with the fewest bits, if the table has no other."""
    instead = "" if cost.instead in cost.written else cost.instead
    return instead or defaults.candidates_for(optimizer)[-1]


def told_cost(name: str, bound: float | None, optimizer: torch.optim.Optimizer) -> str:
    """Return in words how much a compressor increases the loss. ``bound``: its density or rank."""
    cost = _cost(name, bound, optimizer)
    if cost is not None:
        return f"{cost.percent} % higher in our tests"
    if name in defaults.candidates_for(optimizer):
        return f"less than {ENOUGH:g} % higher in our tests" if name != NONE else "none"
    return "not measured with this optimizer"


def takes_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``sync="updates"`` is for this optimizer: AdamW and its kind, where selection costs most."""
    return any(kind in FOR_UPDATES for kind in _kinds(optimizer))


def told_cost_of_updates(workers: int, optimizer: torch.optim.Optimizer) -> str:
    """Return in words how much ``sync="updates"`` increases the loss."""
    if "AdamW" not in _kinds(optimizer):
        return "not measured with this optimizer"
    number, percent = next((row for row in OF_UPDATES if row[0] >= workers), OF_UPDATES[-1])
    return f"{percent:g} % higher with {number} workers in our tests"


def _named(config: Any) -> Iterator[tuple[str, float | None, tuple[str, str] | tuple[()]]]:
    """Yield the compressors of a config by name, with the smallest density or rank that they are given.

    And what the script has, as ``Cost.written``.
    """
    compressor = config.compression.compressor
    sparse, low_rank, quantised = map(compressor.part, (Kind.SPARSE, Kind.LOW_RANK, Kind.QUANTISED))
    if sparse is not None and config.compression.memory.has_residual:
        # Without the memory of its paper dgc selects what topk does, and with it topk what dgc does.
        memory = config.compression.memory
        same = "dgc" if memory.has_momentum else "topk"
        name = same if sparse.name in ("topk", "dgc") else sparse.name
        yield name, config.compression.density.least, () if name == sparse.name else (sparse.name, memory.name)
    if low_rank is not None and low_rank.rank is not None:
        rank = low_rank.rank
        yield low_rank.name, rank if isinstance(rank, int) else min(rows for _, rows in rank), ()
    if quantised is not None:
        yield quantised.name, None, ()


def _cost(name: str, bound: float | None, optimizer: torch.optim.Optimizer) -> Cost | None:
    """Return the cost of one compressor with one optimizer: that of the smallest bound that is no smaller."""
    groups = optimizer.param_groups
    momentum, decay = (any(group.get(key) for group in groups) for key in ("momentum", "weight_decay"))
    for kind in _kinds(optimizer):
        about = [
            cost
            for cost in COSTS
            if (cost.compressor, cost.optimizer) == (name, kind)
            and cost.momentum in (None, momentum)
            and cost.decay in (None, decay)
            and (bound is None or cost.bound is None or bound <= cost.bound)
        ]
        if about:
            return min(about, key=lambda cost: cost.bound or 0)
    return None


def _kinds(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield the names in the table that an optimizer may have, its own class first. Adam counts as AdamW."""
    for kind in type(optimizer).__mro__:
        yield "Muon" if "muon" in kind.__name__.casefold() else {"Adam": "AdamW"}.get(kind.__name__, kind.__name__)
