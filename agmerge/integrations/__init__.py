# SPDX-License-Identifier: Apache-2.0
"""Compress the exchanges of training frameworks, with a line in the script: each file is for one framework.

``ddp``: ``compress(model)`` for torch's DistributedDataParallel. ``ddp_hook``: which gives its buckets to a reducer;
``ddp_refusals``: what it cannot take; ``unsaved``: what scripts leave out of checkpoints; ``shared_model``: a model
that shows shared parameters. ``transformers``: ``compress(trainer)``; ``transformers_exchange``: what it does around a
Trainer's methods; ``transformers_elastic``: in an elastic job. ``accelerate``: ``compress(accelerator, model)``;
``accelerate_elastic``: in an elastic job. ``lightning``: ``CompressedDDPStrategy``. ``files``: ranks' own states beside
the checkpoints of these three.

Nothing is imported before a script asks for the file of its framework, ``agmerge.integrations.ddp`` or ``from
agmerge.integrations import ddp``. Each may import that framework and torch.distributed, and of agmerge/ what is below.
Only ``agmerge`` itself imports this room, when it is asked for.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import the file of a framework, which has to be installed: else there is an ``ImportError`` that names it."""
    if name == "accelerate":
        return importlib.import_module("agmerge.integrations.accelerate")
    if name == "ddp":
        return importlib.import_module("agmerge.integrations.ddp")
    if name == "files":
        return importlib.import_module("agmerge.integrations.files")
    if name == "lightning":
        return importlib.import_module("agmerge.integrations.lightning")
    if name == "transformers":
        return importlib.import_module("agmerge.integrations.transformers")
    raise AttributeError(f"module 'agmerge.integrations' has no attribute {name!r}")
