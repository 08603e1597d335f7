# SPDX-License-Identifier: Apache-2.0
"""Warn a script once, on one rank, of effects of compression that it may not expect."""

from __future__ import annotations

from typing import Any

import torch

from agmerge.errors import warn
from agmerge.options import defaults
from agmerge.options.named_costs import known_cost
from agmerge.runtime import workers

TAKEN = (
    "AGM707: memory={memory!r} applies the momentum of {optimizer} ({momenta}) before selection, and {optimizer} does "
    "not apply it again. param_groups stay unchanged.{decay}"
)
DECAY = (
    " Weight decay then acts without momentum, as with SGD(momentum=0): with momentum m, it is 1 - m times as strong "
    "as in plain {optimizer} (docs/compressors.md)."
)
OWN = (
    "AGM405: The loaded parameter groups have no momentum, so memory={memory!r} applies its default, 0.9. Set another "
    "momentum in the groups, or pass memory='residual' for none."
)
NAMED = "AGM705: {what}. compression={instead!r} increased it less. See docs/compressors.md."


def warn_of_changes(exchange: Any, optimizer: torch.optim.Optimizer | None, before: Any) -> None:
    """Warn, on rank 0, of effects that are new with this config, since ``before`` (None: there was none).

    All ranks call this, see :func:`agmerge.errors.warn`. Nothing communicates.

    Args:
        exchange: the ``GradientExchange`` of the wrapper, with its config of now.
        optimizer: the one that steps; None: it is not known, and there is no warning.
        before: a ``Config``, or None.
    """
    alone = exchange.group.comm is None and workers.is_initialized()  # elastic: not connected yet
    if optimizer is None or exchange.group.outside or not (alone or exchange.group.comm is not None):
        return
    rank = workers.rank() if alone else exchange.group.comm.rank
    config, name, groups = exchange.agreed.config, type(optimizer).__name__, optimizer.param_groups
    followed = before is not None and before.compression.rates is not None
    if config.compression.rates is not None and not followed:
        momenta = ", ".join(f"{value:g}" for value in dict.fromkeys(float(group["momentum"]) for group in groups))
        decay = DECAY.format(optimizer=name) if any(group.get("weight_decay") for group in groups) else ""
        text = TAKEN.format(memory=config.compression.memory.name, optimizer=name, momenta=momenta, decay=decay)
        warn(text, rank)
    if followed and config.compression.rates is None and config.compression.memory.has_momentum:
        warn(OWN.format(memory=config.compression.memory.name), rank)
    cost = known_cost(config, optimizer)
    if cost is not None and (before is None or known_cost(before, optimizer) != cost):
        warn(NAMED.format(what=cost.text, instead=defaults.candidates_for(optimizer)[-1]), rank)
