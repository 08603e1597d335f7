# SPDX-License-Identifier: Apache-2.0
"""Move the bytes: one small file per backend, the same calls in each.

``base``: those calls. ``registry``: the table of backends, and the choice of one. ``local``, ``torch``, ``mpi`` and
``horovod`` are the backends. ``timeouts``, ``status`` and ``addresses``: helpers of waiting and connecting.
``handshake`` and ``topology``: what ranks agree on and where they run. ``shared_gpus``: who has none to
itself. ``torch_objects``: scripts'
objects of torch.distributed. ``diagnosis`` and ``collective_marks``: checks.

Backend libraries are imported when a backend is opened, never when this package is imported. May import the ground
files (errors, ops, version), and nothing else of agmerge.
"""

from __future__ import annotations

from agmerge.backends.base import Backend, Handle, matched

__all__ = ["Backend", "Handle", "matched"]
