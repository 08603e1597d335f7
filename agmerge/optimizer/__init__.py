# SPDX-License-Identifier: Apache-2.0
"""Optimizers for training scripts.

* ``distributed``: :class:`DistributedOptimizer`, which every step goes through.
* ``local``: :class:`LocalOptimizer` and :class:`LocalSync`, for workers that exchange every so many steps, and
  :class:`Nesterov`.
* ``saving``: states and checkpoints of these.

May import checkpoint/, engine/ and below.
"""

from agmerge.optimizer.distributed import DistributedOptimizer
from agmerge.optimizer.local import LocalOptimizer, LocalSync
from agmerge.updates.outer_steps import Nesterov

__all__ = ["DistributedOptimizer", "LocalOptimizer", "LocalSync", "Nesterov"]
