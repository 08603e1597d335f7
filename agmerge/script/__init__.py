# SPDX-License-Identifier: Apache-2.0
"""Checks of the calls that a script or a framework makes between two calls of agmerge: errors and warnings.

* ``seen_steps``: steps of the optimizers of a process, whichever object the script calls.
* ``module_hooks``: forward passes of modules that read parameters.
* ``averaged_steps``: are gradients averaged, and once? ``sharded_steps``: does each rank step a shard?
* ``clipping_watch``: changes of combined gradients; ``plain_clipping``: clipping of a worker's own gradients.
* ``parameter_access``: parameters that are read, written or saved between steps of ``sync="updates"``.

Nothing here communicates, and nothing changes a gradient or a parameter. May import step/, runtime/, exchanges/,
tensors/, backends/ and below.
"""
