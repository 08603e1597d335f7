# SPDX-License-Identifier: Apache-2.0
"""Schedule of exchanges: hooks, accumulation, loss scales, join, guards, local steps.

Three reducers have an exchange, a participation in a group of workers and a replica: ``reducer``, for gradients of
``backward_passes``; ``bucket_reducer``, for gradients that DistributedDataParallel collects in buckets; and
``update_reducer``, for deltas of parameters (``sync="updates"``). ``reducers`` chooses. ``participation``: connects,
compares, plans anew. ``replicas``: equal after every step; compared, levelled.

``grad_hooks``: on parameters. ``grad_scaler``: AMP.
``gathered``: sparse gradients, for an optimizer that accepts only these. ``join``: uneven inputs.
``optimizer_wrapper``: attributes of the inner optimizer; ``optimizer_group``: several that step as one;
``optimizer_states``: their states; ``outermost_step``: of nested calls. ``dear``, ``dear_modules``,
``dear_updates`` and ``dear_times``: ``merging="dear"``, with updates in the next forward.

``own_step``: a worker's local step; ``step_hooks``: the same where a framework steps the optimizer. ``local_replica``:
of a worker that steps by itself. ``shared_parameters``: the shared ones, and a worker's deltas beyond them;
``sent_pieces``: its functions of flat tensors. ``strayed``: reports a run that ends while ranks differ.
``delta_table``: which tensors are exchanged. ``outer``: optimizers of the shared parameters.

``reporting`` (with ``summary``), ``sharing`` and ``swapping``: methods that an optimizer has around another, and a
model in DistributedDataParallel. ``withheld_momentum``: of an optimizer, in steps for which a memory has applied it.

May import planning/, options/ and below.
"""
