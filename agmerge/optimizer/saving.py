# SPDX-License-Identifier: Apache-2.0
"""State of a wrapped optimizer, with its rank's section: saving and loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from agmerge.checkpoint import rank_state, torch_helpers
from agmerge.checkpoint.dcp import gather_state
from agmerge.checkpoint.rank_state import Wrapper
from agmerge.engine.optimizer_group import as_state, check_state, load_state, sections_of
from agmerge.engine.optimizer_wrapper import OptimizerHolder
from agmerge.engine.reducer import Reducer
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.options import defaults
from agmerge.options.resolve import with_momentum_of
from agmerge.options.typed import Options


class SavingMixin:
    """State of :class:`agmerge.DistributedOptimizer`, in a dictionary that the plain optimizer can load, too."""

    _inner: torch.optim.Optimizer
    _reducer: Reducer | UpdateReducer
    _options: Options
    # Of consolidate_state_dict(): how many steps had been made, and the state of all ranks.
    _gathered: tuple[int, dict[str, Any] | None] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with this rank's residuals and the plan under the key ``"agmerge"``.

        The plain optimizer can load it, too. With several optimizers ``"optimizers"`` is the list of their states. A
        message under way with ``overlap=1`` is sent again after loading, so that training resumes bitwise identically.
        With a larger ``overlap``, call :meth:`flush` on all ranks first, or updates under way count as unsent.

        Returns:
            A dictionary for :meth:`load_state_dict`.

        Raises:
            ValueError: If torch's ``get_optimizer_state_dict`` calls it. Pass that function ``optimizer.optimizer``
                instead.
        """
        torch_helpers.refuse(cast("OptimizerHolder", self))
        gathered, self._gathered = self._gathered, None
        if gathered is not None and gathered[0] == self._reducer.replica.steps and gathered[1] is not None:
            return gathered[1]
        if self._reducer.combines_gradients:
            self._reducer.flush()
        return rank_state.whole_state(self._reducer, self._inner.state_dict())

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collective. Make the next :meth:`state_dict` on rank 0 return the residuals of all ranks.

        That is the result of :func:`agmerge.gather_state`. Frameworks that save on rank 0 only call this method on all
        ranks before, as with torch's ``ZeroRedundancyOptimizer``. A step in between undoes it. Parameters do not
        change, unlike with :meth:`consolidate`.

        Args:
            to (int): The rank that gets the state. Only 0 is supported.

        Raises:
            ValueError: For another rank than 0.
        """
        if to != 0:
            raise ValueError(
                f"consolidate_state_dict(to={to}) is not supported: only rank 0 gathers the state of all ranks. "
                "Remove to=."
            )
        self._gathered = None
        self._gathered = (self._reducer.replica.steps, gather_state(cast("Wrapper", self)))

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Collective. Load a saved state.

        If the state is of a plain optimizer, residuals start from zero, with a warning.

        Args:
            state_dict (dict or list): The result of :meth:`state_dict` on this rank, or of :func:`agmerge.gather_state`
                on rank 0, or the state of a plain optimizer. For several optimizers also a list of their states.

        Raises:
            ValueError: If the state is of another model or another number of optimizers, if residuals are not finite,
                or if torch's ``set_optimizer_state_dict`` calls it. Pass that function ``optimizer.optimizer`` instead.
        """
        torch_helpers.refuse(cast("OptimizerHolder", self))
        state = as_state(state_dict)
        inner = {key: value for key, value in state.items() if key != rank_state.SECTION}
        check_state(self._inner, inner)
        before = self._reducer.exchange.agreed.config
        groups = [group for section in sections_of(self._inner, inner) for group in section["param_groups"]]
        rates = with_momentum_of(before, self._inner, groups).compression.rates
        inner = rank_state.load(self._reducer, state.get(rank_state.SECTION)) or inner
        config = self._reducer.exchange.agreed.config.changed(rates=rates)
        self._reducer.exchange.agreed.adopt(config)
        load_state(self._inner, inner)
        defaults.warn_of_changes(self._reducer.exchange, self._inner, before)
