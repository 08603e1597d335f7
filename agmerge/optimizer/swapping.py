"""Go on with another compressor, in the middle of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from agmerge.checkpoint import rank_state
from agmerge.engine.synchronizer import Synchronizer
from agmerge.options import compressors
from agmerge.options.arguments import Options
from agmerge.options.config import with_momentum_of
from agmerge.options.resolve import resolve


def swap_compressor(
    reducer: Synchronizer,
    options: Options,
    optimizer: torch.optim.Optimizer | None,
    compression: Any,
    chosen: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Options:
    """Collective. Have ``reducer`` compress otherwise from the next step on; return the options that it goes by then.

    What was not sent is sent by the new compressor; with one that drops nothing, all of it in the next step.

    Args:
        reducer: between steps.
        options: those in use.
        optimizer: the one that steps; None: it is not known.
        compression: as the constructor takes it.
        chosen: ``density``, ``rank``, ``memory`` and ``warmup``; a density or rank that is None is the one in use.
        own: options of the compressor, by name.
    """
    changed = compressors.swapped(options, optimizer, compression, chosen, own)
    config = with_momentum_of(resolve(changed), optimizer)
    config = rank_state.with_memory_for_unsent(reducer.exchange, config, chosen["memory"])
    reducer.reconfigure(config, "set_compressor()", "Give every rank the same compressor, at the same step.")
    return changed
