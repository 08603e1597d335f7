# SPDX-License-Identifier: Apache-2.0
"""Engine, which says when something is exchanged: hooks, accumulation, loss scales, guards, local steps, reports.

* ``reducer``: gradients of backward passes, and ``join()``. ``reducers``: choice of the reducer.
* ``bucket_reducer``: buckets of DistributedDataParallel; ``averaged_steps``: are gradients averaged, and once?
* ``update_reducer``: deltas of parameters, ``sync="updates"``; ``local_replica``, ``shared_parameters``: a worker that
  steps by itself, and the shared parameters; ``outer_steps``: their outer optimizer.
* ``mean_moments``, ``moments``, ``moment_scales``: moments of workers' own optimizers, brought to those of the mean
  gradient.
* ``dear``: ``merging="dear"``, updates in the next forward; ``dear_modules``: modules that read parameters.
* ``participation``: connects, compares replicas, plans anew, leaves.
* ``grad_hooks``: gradients on their way from backward. ``grad_scaler``: AMP, and sparse gradients.
* ``optimizer_wrapper``: attributes of the inner optimizer. ``optimizer_group``: several that step as one.
* ``step_hooks``: the work around steps that others call; ``seen_steps``: these steps.
* ``reporting``: figures, tables and traces, and five lines for people.
* ``gradient_clipping``: ``clip_grad_norm_()``, by the norm that the averaged gradient has.
* ``clipping_watch``, ``plain_clipping``, ``averaged_steps``, ``sharded_steps``, ``script_access``:
  warnings of what a script does to gradients and parameters.

May import planning/, options/ and below.
"""
