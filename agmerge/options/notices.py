"""Warn a script once, on one rank, of what compression does that it may not expect."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from agmerge.runtime import workers
from sparsifiers import Kind, LowRank

ENOUGH = 0.1  # the density at which AdamW has lost nothing
ENOUGH_RANK = 16  # at which PowerSGD has lost about nothing with AdamW
TAKEN = (
    "memory {memory!r} applies the momentum of {optimizer} ({momenta}) before selection, so that none is lost on the "
    "way, and {optimizer} does not apply it again; param_groups stay as they are.{decay}"
)
DECAY = (
    " Weight decay then acts without momentum, as with SGD(momentum=0): with momentum m it is 1 - m times as strong as "
    "in {optimizer} by itself (docs/compressors.md)."
)
OWN = (
    "the groups that were loaded have no momentum, and memory {memory!r} applies its own before selection, 0.9. Give "
    "the groups another one, or pass memory='residual' for none"
)
# Optimizers that scale each coordinate by what it has been so far, besides those whose groups have "betas".
ADAPTIVE = ("Adadelta", "Adafactor", "Adagrad", "Adam", "Lion", "Muon", "RMSprop", "Rprop", "SignSGD")
ADAM = (
    "what is selected of gradients reaches {optimizer} late and in bursts: density 0.01 with AdamW cost 22 % of the "
    "loss of a small language model in our runs (docs/parity.md). Pass sync='updates', which exchanges what "
    "{optimizer} did instead (docs/adaptive.md); or density=0.1, which lost nothing"
)
FACTORS = (
    "factors of rank {rank} reach {optimizer} late, too: {compressor} of rank 4 cost {cost} % of the loss of a small "
    "language model with AdamW in our runs, 1 % with sync='updates' (docs/parity.md). Pass that (docs/adaptive.md), "
    "or rank=16"
)
COST = {"powersgd": 4, "acpsgd": 12}  # % at rank 4


def warn_of_changes(exchange: Any, optimizer: torch.optim.Optimizer | None, before: Any) -> None:
    """Warn, on rank 0, of what holds now and did not with the config ``before`` (None: there was none).

    The warnings point at the caller of the wrapper's method. Nothing communicates.

    Args:
        exchange: the ``GradientExchange`` of the wrapper, with its config of now.
        optimizer: the one that steps; None: it is not known, and nothing is said.
        before: a ``Config``, or None.
    """
    alone = exchange.comm is None and workers.is_initialized() and workers.rank() == 0  # elastic: not connected yet
    if optimizer is None or exchange.outside or not (alone or (exchange.comm is not None and exchange.comm.rank == 0)):
        return
    config, name, groups = exchange.config, type(optimizer).__name__, optimizer.param_groups
    followed = before is not None and before.rates is not None
    if config.rates is not None and not followed:
        momenta = ", ".join(f"{value:g}" for value in dict.fromkeys(float(group["momentum"]) for group in groups))
        decay = DECAY.format(optimizer=name) if any(group.get("weight_decay") for group in groups) else ""
        text = TAKEN.format(memory=config.memory.name, optimizer=name, momenta=momenta, decay=decay)
        warnings.warn(text, stacklevel=3)
    if followed and config.rates is None and config.memory.has_momentum:
        warnings.warn(OWN.format(memory=config.memory.name), stacklevel=3)
    selected_before = before is not None and before.compressor.selects
    if config.updates is None and config.compressor.selects and not selected_before and _is_adaptive(optimizer):
        if config.density.least < ENOUGH:
            warnings.warn(ADAM.format(optimizer=name), stacklevel=3)
    factors = _small_factors(config)
    new = before is None or _small_factors(before) is None
    if config.updates is None and factors is not None and new and _is_adaptive(optimizer):
        figures = {"rank": factors.least_rank, "compressor": factors.name, "cost": COST[factors.name]}
        warnings.warn(FACTORS.format(optimizer=name, **figures), stacklevel=3)


def _small_factors(config: Any) -> LowRank | None:
    """Return the low-rank compressor of a config, if the rank that it gives some tensors is known to cost something."""
    part = config.compressor.part(Kind.LOW_RANK)
    return part if isinstance(part, LowRank) and part.name in COST and part.least_rank < ENOUGH_RANK else None


def _is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether ``optimizer`` moves coordinates of small gradients about as fast as the others."""
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    adaptive = any(word.lower() in name for word in ADAPTIVE for name in names)
    return adaptive or any("betas" in group for group in optimizer.param_groups)
