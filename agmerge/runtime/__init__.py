# SPDX-License-Identifier: Apache-2.0
"""Workers of a job, and the calls by which scripts communicate among them.

``workers``: ``init``, ``rank``, ``size``, ``shutdown`` and the choice of a backend. ``collectives/``: the
calls of ``horovod.torch`` on single tensors and objects. ``broadcast``: parameters and optimizer state.
``process_sets``: groups of ranks. ``call_agreement``: every rank states its next call. ``peers/``: which ranks are
missing, and where. ``horovod_names``: objects of Horovod's that scripts hand over.

May import backends/, tensors/ and the ground files.
"""
