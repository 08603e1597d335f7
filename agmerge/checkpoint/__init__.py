# SPDX-License-Identifier: Apache-2.0
"""State of a rank beside the model, in checkpoints: residuals, momentum, plan and counters.

``rank_state``: the section in ``state_dict()``; ``section_check``: whether it is damaged. ``redistribute``: over
another number of ranks. ``gather``: all ranks' sections in one. ``dcp``: torch.distributed.checkpoint;
``torch_helpers``: support of its helpers. ``elastic``: state that newcomers are handed; ``horovod_elastic``: Horovod's.

May import engine/ and below.
"""
