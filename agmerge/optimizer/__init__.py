"""Offer what a training script wraps its optimizer with.

``distributed``: :class:`DistributedOptimizer`, which every step goes through. ``local``: :class:`LocalOptimizer` and
:class:`LocalSync`, for workers that step by themselves and exchange every so many steps. ``swapping``: go on with
another compressor.

May import reporting.py, checkpoint/, engine/ and below.
"""

from agmerge.optimizer.distributed import DistributedOptimizer, _restore
from agmerge.optimizer.local import LocalOptimizer, LocalSync

__all__ = ["DistributedOptimizer", "LocalOptimizer", "LocalSync", "_restore"]  # pickles until 2026-11 name the last
