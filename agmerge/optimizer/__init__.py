# SPDX-License-Identifier: Apache-2.0
"""Optimizers for training scripts.

``distributed``: :class:`DistributedOptimizer`, which every step goes through. ``saving``: its state and checkpoints.
``local``: :class:`LocalOptimizer` and :class:`LocalSync`, for workers that step by themselves and exchange every so
many steps; :class:`Nesterov` steps with what they have exchanged.

May import checkpoint/, engine/ and below.
"""

from agmerge.engine.outer import Nesterov
from agmerge.optimizer.distributed import DistributedOptimizer
from agmerge.optimizer.local import LocalOptimizer, LocalSync

__all__ = ["DistributedOptimizer", "LocalOptimizer", "LocalSync", "Nesterov"]
