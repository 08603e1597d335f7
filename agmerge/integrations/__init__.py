# SPDX-License-Identifier: Apache-2.0
"""Exchanges of training frameworks, compressed with a line in the script.

* ``ddp``: DistributedDataParallel, ``compress(model)``; ``ddp_refusals``: what is not supported.
* ``transformers``: ``compress(trainer)``; ``transformers_exchange``: around a Trainer's methods;
  ``transformers_elastic``: in an elastic job.
* ``accelerate``: ``compress(accelerator, model)``.
* ``lightning``: ``CompressedDDPStrategy``.
* ``files``: ranks' own states beside the checkpoints of these three. ``unsaved``: states that scripts leave out.
* ``logged``: figures for logs and trackers.

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
