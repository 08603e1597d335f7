# SPDX-License-Identifier: Apache-2.0
"""Backends, which move the bytes: the same calls in each.

* ``base``: the contract of a backend and of a handle. ``registry``: the table of backends, and the choice of one.
* ``local``: ranks are threads of a process. ``mpi``: mpi4py. ``horovod``: Horovod.
* ``torch``: torch.distributed; ``torch_groups``, ``torch_store``: its groups and errors, addresses.
* ``torch_objects``, ``torch_calls``: groups, models and collectives of a script's own.
* ``streams``: devices. ``staging``: their tensors, for backends that move tensors of the CPU alone.
* ``handshake``: facts compared between ranks. ``topology``: ranks that share a machine.
* ``status``: what this rank does, for errors. ``timeouts``: deadlines of waits. ``open_files``: limits, sockets.
* ``addresses``: of this machine, for other ranks. ``slurm``: variables of a launcher.
* ``generations``: groups of an elastic job, one after the other; ``membership``: who is in the next one.
* ``lighthouse``, ``job_store``: its store, and the records there. ``bare_gloo``: groups that can be left when a
  rank is lost.

Backend libraries are imported when a backend is opened, never when this package is imported. May import the ground
files (errors, ops, version), and nothing else of agmerge.
"""

from __future__ import annotations

from agmerge.backends.base import Backend, Handle, matched

__all__ = ["Backend", "Handle", "matched"]
