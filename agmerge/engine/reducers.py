# SPDX-License-Identifier: Apache-2.0
"""Choice of an optimizer's reducer: of gradients, of gradients by DeAR, or of the optimizer's updates."""

from __future__ import annotations

from typing import Any

import torch

from agmerge.engine.bucket_reducer import BucketReducer
from agmerge.engine.dear import DearReducer
from agmerge.engine.dear_modules import check_readers
from agmerge.engine.reducer import Reducer
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.step.config import Config
from agmerge.tensors.parameters import ParameterTable, optimizers_of

AnyReducer = Reducer | BucketReducer | UpdateReducer


def reducer_for(optimizer: torch.optim.Optimizer, named: Any, config: Config) -> Reducer | UpdateReducer:
    """Return the reducer that ``config`` asks for. Without ``named`` parameters, DeAR's have the names of its model."""
    if config.sync.updates is not None:
        return UpdateReducer(ParameterTable(optimizer, named), config)
    if config.sync.model is None:
        return Reducer(ParameterTable(optimizer, named), config)
    if len(optimizers_of(optimizer)) > 1:
        raise ValueError(
            f"merging='dear' is not supported with several optimizers ({type(optimizer).__name__}), because it steps "
            "a few parameters at a time. Use another merging."
        )
    check_readers(config.sync.model, optimizer)
    named = config.sync.model.named_parameters() if named is None else named
    return DearReducer(ParameterTable(optimizer, named), config)
