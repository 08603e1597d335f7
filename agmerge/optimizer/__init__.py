"""Offer what a training script wraps its optimizer with.

``distributed``: :class:`DistributedOptimizer`, which every step goes through. ``saving``: what it keeps. ``local``:
:class:`LocalOptimizer` and :class:`LocalSync`, for workers that step by themselves and exchange every so many steps.
``sharing``: the parameters that all have in common. ``swapping``: go on with another compressor. What a model in
DistributedDataParallel offers (``integrations/ddp.py``) is of the last two, too.

May import reporting.py, checkpoint/, engine/ and below.
"""

from agmerge.optimizer.distributed import DistributedOptimizer, _restore
from agmerge.optimizer.local import LocalOptimizer, LocalSync

__all__ = ["DistributedOptimizer", "LocalOptimizer", "LocalSync", "_restore"]  # pickles until 2026-11 name the last
