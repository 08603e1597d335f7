# SPDX-License-Identifier: Apache-2.0
"""Recognise objects of Horovod that scripts pass: its constants, its compressors and its process sets.

Objects are known by where they come from, and Horovod is never imported: a script that passes one of its objects has
imported it already.
"""

from __future__ import annotations

import sys


def horovod_reduction(op: object) -> str | None:
    """Return the meaning of a constant of Horovod's ("average", "sum", "adasum", ...); None for anything else."""
    hvd = sys.modules.get("horovod.torch")
    if hvd is None or type(op) is not int:
        return None
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    return next((name.lower() for name in names if getattr(hvd, name, None) == op), None)


def horovod_compression(given: object) -> str | None:
    """Return the name of one of Horovod's own compressors ("none", "fp16"); None for anything else."""
    if getattr(given, "__module__", None) != "horovod.torch.compression":
        return None
    return {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(getattr(given, "__name__", ""))


def is_process_set(given: object) -> bool:
    """Return whether ``given`` is a process set of Horovod's, as opposed to a :class:`agmerge.ProcessSet` or ranks.

    Such a set has ``ranks``, ``process_set_id`` (0: all ranks; None: not registered) and ``included()``; a backend
    makes a communicator over it by :meth:`agmerge.backends.Backend.over`.
    """
    return type(given).__module__ == "horovod.common.process_sets"
