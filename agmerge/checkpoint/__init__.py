"""Keep what a rank has beside the model: residuals, momentum, plan and counters.

``rank_state``: the section in ``state_dict()``. ``redistribute``: among another number of ranks. ``gather``: all ranks'
sections in one. ``dcp``: torch.distributed.checkpoint; ``torch_helpers``: getting along with its helpers.
``horovod_elastic``: Horovod's elastic state.

May import engine/ and below.
"""
