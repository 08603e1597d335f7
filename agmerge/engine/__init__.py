"""Decide when something is exchanged: hooks, accumulation, loss scales, join, guards, local steps.

``synchronizer``: keeps an optimizer among its group of workers; ``reducers``: which kind of it is wanted. ``reducer``:
of gradients, which counts backward passes and drives rounds. ``grad_hooks``: on parameters. ``grad_scaler``: AMP.
``gathered``: sparse gradients, for an optimizer that takes no others.
``join``: uneven inputs. ``optimizer_wrapper``: what stays the inner optimizer's; ``optimizer_group``: several that step
as one; ``optimizer_states``: their states; ``outermost_step``: of nested calls. ``replicas``: compared, levelled.
``bucket_reducer``: of gradients that somebody else gathers, as DistributedDataParallel does.
``dear``, ``dear_modules`` and ``dear_times``: ``merging="dear"``, whose updates come in the next forward.

``update_reducer``: of what the optimizer did (``sync="updates"``). ``own_step``: a worker steps by itself;
``step_hooks``: somebody else steps it. ``carry``: what all have in common, and what one has done beyond it;
``sent_pieces``: its functions of flat tensors. ``strayed``: who ends while ranks differ. ``way_table``: which tensors
travel. ``outer``: optimizers of what is shared.

May import planning/ and below.
"""
