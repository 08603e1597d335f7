# SPDX-License-Identifier: Apache-2.0
"""Contenders of ``prove.py``: formats that are pinned, because ``auto`` sends uncompressed where nothing is slow."""

from __future__ import annotations

from typing import Any

import torch

import agmerge
import sparsifiers
from agmerge.options.defaults import candidates_for
from evidence.models import CLIP

DENSE = "dense"
PLAN = {"merging": "threshold"}  # the same merge buffers whatever was measured
SPARSE: dict[str, Any] = {"exchange": "sparse"}  # always compressed
OPTIONS: dict[str, dict[str, Any]] = {
    DENSE: {},
    "split": {"compression": "none"},
    "default": {},  # and the compression that the optimizer has on a slow link
    "eden-1": {"compression": "eden-1"},
    "int8": {"compression": "int8"},
    "updates": {"sync": "updates", **SPARSE},
    "updates-1": {"sync": "updates", "compression": "eden-1", "every": 2, "fragments": 2, **SPARSE},
    "updates-1-in-3": {"sync": "updates", "compression": "eden-1", "every": 3, "fragments": 3, **SPARSE},
    "updates-topk": {"sync": "updates", "density": 0.05, **SPARSE},
    "local-4": {"every": 4, **SPARSE},
    "local-4-overlap-0": {"every": 4, "overlap": 0, **SPARSE},
    "local-8": {"every": 8, **SPARSE},
    "local-30": {"every": 30, **SPARSE},
    "topk": {"compression": "topk", "density": 0.01, **SPARSE},
    "dgc": {"compression": "dgc", "density": 0.01, **SPARSE},
    "powersgd-4": {"compression": "powersgd", "rank": 4, **SPARSE},
    "bf16": {"compression": "bf16"},
}
CLIPS = ("dgc",)  # contenders that clip each worker's own gradients, before selection, as in their papers
EXPLAINED = {
    DENSE: "one worker with the whole batch: what any number of workers computes, up to rounding",
    "split": "uncompressed gradients of all workers: what rounding alone changes",
}


def options_of(name: str, inner: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the arguments of a contender with these optimizers."""
    options = {**OPTIONS[name], **PLAN}
    if name == "default":
        options["compression"] = min((candidates_for(one) for one in inner), key=len)[-1]
    return options


def told(name: str, options: dict[str, Any]) -> str:
    """Return a contender's call as text."""
    if name in EXPLAINED:
        return EXPLAINED[name]
    kind = "LocalOptimizer" if name.startswith("local-") else "DistributedOptimizer"
    words = [f"{key}={value!r}" for key, value in options.items() if key not in PLAN]
    words += [f"memory=sparsifiers.memory({name!r}, clipping={CLIP})"] if name in CLIPS else []
    return f"{kind}({', '.join(words)})"


def wrapped(name: str, inner: list[torch.optim.Optimizer], model: torch.nn.Module, **more: Any) -> Any:
    """Collective. Return the distributed optimizer of a contender other than dense.

    Args:
        name: of ``OPTIONS``.
        inner: the optimizers of the model.
        model: as on all other ranks.
        more: arguments beside those of the contender.
    """
    kind = agmerge.LocalOptimizer if name.startswith("local-") else agmerge.DistributedOptimizer
    options = {**options_of(name, inner), "timeout": 3600.0, **more}
    if name in CLIPS:
        options["memory"] = sparsifiers.memory(name, clipping=CLIP)
    return kind(inner if len(inner) > 1 else inner[0], model.named_parameters(), **options)
