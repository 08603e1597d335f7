# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps beside the model, in checkpoints: residuals, momentum, plan and counters.

* ``rank_state``: section of one rank in ``state_dict()``.
* ``redistribute``: sections for another number of ranks.
* ``dcp``: all ranks in one file, or in torch.distributed.checkpoint; ``torch_helpers``: support of torch's helpers.
* ``elastic``: state and samples of workers that come and leave.
* ``horovod_elastic``: elastic training of Horovod.

May import engine/ and below.
"""
