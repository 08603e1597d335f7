# SPDX-License-Identifier: Apache-2.0
"""Workers of a job, and the calls by which scripts communicate among them.

* ``workers``: ``init``, ``rank``, ``size``, ``shutdown`` and the choice of a backend.
* ``process_sets``: groups of ranks, and the agreement on a call.
* ``broadcast``: parameters and optimizer state of one rank. ``tensor_stream``: the messages in which they travel.
* ``collectives/``: the calls of ``horovod.torch`` on single tensors and objects.
* ``peers/``: which ranks are missing, and where.
* ``pretended_link``: a slow network on a laptop.

May import backends/, tensors/ and the ground files.
"""
