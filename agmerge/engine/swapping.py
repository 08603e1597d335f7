# SPDX-License-Identifier: Apache-2.0
"""Change of the compressor, in the middle of training."""

from __future__ import annotations

from typing import Any

import torch

from agmerge.engine.reducers import AnyReducer
from agmerge.options import notices
from agmerge.options.arguments import Options
from agmerge.options.prepare import prepare_change
from agmerge.step.treatments import check_patterns


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
        """Collective. Change the compressor, from the next step on. Call it between two steps, on every rank.

        The plan and the residuals are kept. The new compressor sends the residuals, or sends them completely in the
        next step if it has no residual itself. A momentum or a low-rank basis that the new compressor does not use is
        kept, and saved, until a later one uses it. An SGD's own momentum then starts at zero.

        Args:
            compression (str, list, dict or object): As in :class:`agmerge.DistributedOptimizer`.
            density (float, dict or str): As there. None: keep the present one.
            rank (int or dict): As there. None: keep the present one.
            memory (str or object): As there. None: what the compressor needs.
            warmup (int, str or callable): As there. None: no warm-up.
            **options: Options of the compressor, such as ``bits=8`` for ``"qsgd"``.

        Raises:
            ValueError: If an argument has no effect with this compressor.
            agmerge.RankMismatchError: On all ranks, if they set different compressors.
        """
        reducer, optimizer, before = self._reducer, self._inner, self._reducer.exchange.agreed.config
        chosen = {"density": density, "rank": rank, "memory": memory, "warmup": warmup}
        changed = prepare_change(self._options, optimizer, compression, chosen, options)
        check_patterns(changed.config, (reducer.members.name_of(one) for one in reducer.members.name_all()))
        advice = "Set the same compressor on every rank, at the same step."
        reducer.reconfigure(changed.config, "set_compressor()", advice)
        self._options = changed.options
        notices.warn_of_changes(reducer.exchange, optimizer, before)
