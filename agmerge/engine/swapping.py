# SPDX-License-Identifier: Apache-2.0
"""Change of the compressor, in the middle of training."""

from __future__ import annotations

from typing import Any

import torch

from agmerge.engine.reducers import AnyReducer
from agmerge.options import notices
from agmerge.options.arguments import Options
from agmerge.options.prepare import prepare_change


class SwappingMixin:
    """Method to change the compressor, for all that exchanges for a script."""

    _inner: torch.optim.Optimizer | None  # the one that steps; None: it is not known
    _reducer: AnyReducer
    _options: Options  # those in use

    def set_compressor(
        self,
        compression: Any,
        *,
        density: Any = None,
        rank: Any = None,
        memory: Any = None,
        warmup: Any = None,
        **options: Any,
    ) -> None:
        """Collective. Compress otherwise from the next step on. Between steps; residuals and plan stay.

        Arguments are those of :class:`agmerge.DistributedOptimizer`; ``density`` and ``rank`` None are those in use,
        ``options`` are the compressor's. Residuals are sent by the new compressor; by one that drops nothing, entirely
        in the next step. A momentum that the new memory does not have, and bases that the new compressor does not have,
        are kept, and saved, until a later one uses them; an SGD's own momentum then begins at zero.
        """
        reducer, optimizer, before = self._reducer, self._inner, self._reducer.exchange.agreed.config
        chosen = {"density": density, "rank": rank, "memory": memory, "warmup": warmup}
        changed = prepare_change(self._options, optimizer, compression, chosen, options)
        advice = "Set the same compressor on every rank, at the same step."
        reducer.reconfigure(changed.config, "set_compressor()", advice)
        self._options = changed.options
        notices.warn_of_changes(reducer.exchange, optimizer, before)
