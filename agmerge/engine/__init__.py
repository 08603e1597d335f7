"""Schedule of exchanges: hooks, accumulation, loss scales, join, guards, local steps.

``synchronizer``: connects an optimizer with its group of workers; ``reducers``: chooses its kind. ``reducer``: for
gradients; it counts backward passes and drives rounds. ``grad_hooks``: on parameters. ``grad_scaler``: AMP.
``gathered``: sparse gradients, for an optimizer that accepts only these. ``join``: uneven inputs.
``optimizer_wrapper``: attributes of the inner optimizer; ``optimizer_group``: several that step as one;
``optimizer_states``: their states; ``outermost_step``: of nested calls. ``replicas``: compared, levelled.
``bucket_reducer``: for gradients that DistributedDataParallel collects in buckets. ``dear``, ``dear_modules`` and
``dear_times``: ``merging="dear"``, with updates in the next forward.

``update_reducer``: for parameter updates (``sync="updates"``). ``own_step``: a worker's local step; ``step_hooks``: the
same where a framework steps the optimizer. ``carry``: the common parameters, and a worker's pseudo-gradients beyond
them; ``sent_pieces``: its functions of flat tensors. ``strayed``: reports a run that ends while ranks differ.
``way_table``: which tensors are exchanged. ``outer``: optimizers of the common parameters.

``reporting``, ``sharing`` and ``swapping``: methods that an optimizer has around another, and a model in
DistributedDataParallel. ``withheld_momentum``: of an optimizer, in the steps for which a memory has applied it.

May import planning/, options/ and below.
"""
