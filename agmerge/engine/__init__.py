# SPDX-License-Identifier: Apache-2.0
"""Engine, which says when something is exchanged: hooks, accumulation, loss scales, guards, local steps, reports.

* ``reducer``: gradients of backward passes, and ``join()``. ``bucket_reducer``: buckets of DistributedDataParallel.
  ``dear``: ``merging="dear"``, updates in the next forward. ``update_reducer``: deltas of parameters,
  ``sync="updates"``, of which ``updates/`` has the state.
* ``participation``: connects, compares replicas, plans anew, leaves.
* ``grad_hooks``: gradients on their way from backward. ``grad_scaler``: AMP, and sparse gradients.
* ``gradient_clipping``: ``clip_grad_norm_()``, by the norm that the averaged gradient has.
* ``optimizer_wrapper``: choice of the reducer, and attributes of the inner optimizer. ``optimizer_group``: several
  optimizers that step as one. ``step_hooks``: the work around steps that others call.
* ``reporting``: figures, tables and traces, and five lines for people.

``script/`` checks the calls that a script makes between two calls of agmerge.

May import updates/, script/, planning/, options/ and below.
"""
