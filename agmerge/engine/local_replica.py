# SPDX-License-Identifier: Apache-2.0
"""Replica of a worker that steps by itself, ahead of the parameters that all workers share."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from agmerge.engine import strayed
from agmerge.engine.delta_table import DeltaTable
from agmerge.engine.own_step import OwnSteps
from agmerge.engine.participation import check_not_averaged
from agmerge.engine.script_access import ScriptAccess
from agmerge.engine.shared_parameters import SharedParameters, UnsentInParameters, UnsentInResidual
from agmerge.errors import AGMergeError
from agmerge.step.config import APPLY, HOLD, Config, Updates
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.tensors.parameters import ParameterTable
from sparsifiers.memories import Memory, Residual


class LocalReplica:
    """Replica of a worker that steps by itself: the shared parameters, its own, and the count of its steps.

    ``members``: all parameters of the optimizer; ``table``: the deltas of those that take part, which ``exchange``
    exchanges.
    """

    def __init__(
        self, members: ParameterTable, table: DeltaTable, exchange: GradientExchange, options: Updates
    ) -> None:
        self._members, self._table, self._exchange, self._options = members, table, exchange, options
        self.own_steps = OwnSteps()  # exchanged or not
        self._snapshot: object = None  # of the table, as of the last check
        self.strayed = strayed.watch(self)
        self._access = ScriptAccess(self)  # the script's, to the parameters, between steps
        self.shared = self._fitting()

    @property
    def steps(self) -> int:
        """Return how many steps the optimizer has made."""
        return self.own_steps.count

    # -- which parameters, and where their unsent deltas stay -----------------------------------------------------

    def _fitting(self) -> SharedParameters:
        """Return shared parameters for the present config, and give the exchange the memory that they need."""
        options, memory = self._options, self.memory_for(self._exchange.agreed.config)
        self._exchange.agreed.adopt(self._exchange.agreed.config.changed(memory=memory))
        if memory.hands_back or (not memory.has_residual and not self._table.is_narrow):
            return UnsentInParameters(self._exchange, options.outer, overlap=options.overlap > 0)
        if options.overlap:
            raise ValueError(
                f"overlap={options.overlap} is not supported with 16-bit parameters. Keep them in float32 under "
                "autocast, or remove overlap."
            )
        return UnsentInResidual(self._exchange, options.outer, applied=options.carry == APPLY)

    def memory_for(self, config: Config) -> Memory:
        """Return the memory of unsent updates with ``config``; a residual that exists is kept in any case."""
        memory = self._options.memory_for(config.compression.compressor, narrow=self._table.is_narrow)
        return Residual() if self._exchange.agreed.current.residuals() and not memory.has_residual else memory

    def refit(self) -> None:
        """Keep unsent deltas where the memory and the dtypes ask for. Nothing is under way."""
        before, self.shared = self.shared, self._fitting()
        self.shared.adopt(before)

    def admit(self, flush: Callable[[], None]) -> bool:
        """Collective. Use the parameters that take part now. They stay as long as the optimizer has them.

        ``flush``: receives what is under way, which is of those that took part before. Returns whether there are new
        ones since the first step: their values have to be equal on all ranks. Raises ``ValueError``, at first, where a
        framework has wrapped the model after the optimizer, and averages gradients.
        """
        snapshot = self._table.snapshot()
        if snapshot == self._snapshot:
            return False
        is_first, has_new = (
            self._snapshot is None,
            self._admit_present(),
        )  # ranks may have to agree first, on the parameters that there are now
        if is_first:
            check_not_averaged(self._members)
        else:
            flush()
            self.refit()
        self._snapshot = snapshot
        return has_new and not is_first

    def _admit_present(self) -> bool:
        has_new = self.shared.admit({member.name: member.local for member in self._table.parameters()})
        self._table.track(self.shared.own)
        return has_new

    def absorb_residuals(self) -> None:
        """Subtract residuals kept beside the parameters from these: a lone worker sends nothing any more."""
        for name, residual in self._exchange.agreed.current.residuals().items():
            if self._options.carry == HOLD and name in self.shared.own:
                self.shared.own[name].detach().sub_(residual)
            self._exchange.agreed.carried.stash("residual", name, None)

    # -- what differs from the shared parameters ------------------------------------------------------------------

    def compared(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks after a step, by name: the shared parameters."""
        return dict(self.shared.base)

    @torch.no_grad()
    def unsent(self) -> dict[str, torch.Tensor]:
        """Return the sum of this worker's deltas that were not sent, by name of the parameter."""
        return {name: self.shared.unsent(name) for name in self.shared.base}

    def showing(self, but: Container[str] = ()) -> AbstractContextManager[None]:
        """Make the parameters, inside, the shared ones, all ``but`` some. Changes inside are lost.

        States that are saved inside have this worker's own all the same.
        """
        self.strayed.seen()
        if not but and not self.shared.is_shown:
            self._access.check(self.shared)  # it does not show what the script has written
        return self.shared.shown(but)

    def check_not_shown(self, what: str) -> None:
        """Raise :class:`agmerge.AGMergeError` inside of :meth:`showing`, where changes would be undone."""
        if self.shared.is_shown:
            raise AGMergeError(
                f"AGM117: {what} inside shared(): changes of parameters would be lost. Call it outside shared()."
            )

    def shared_values(self, but: Container[str] = ()) -> dict[torch.Tensor, torch.Tensor]:
        """Return the shared parameters, by parameter, all ``but`` some; nothing before the first step."""
        self.strayed.seen()
        base, members = self.shared.base, self._members
        names = {p: members.name_of(p) for p in members.name_all()}
        return {p: base[name] for p, name in names.items() if name in base and name not in but}

    # -- what the script does between steps -----------------------------------------------------------------------

    def begin_between(self) -> None:
        """Begin the time between two steps: the parameters are as this step, and its exchange, have left them."""
        self._access.begin(self.shared, self.steps)

    def end_between(self) -> None:
        """End the time between two steps; warn, once, of a script that has written parameters."""
        self._access.end(self.shared)

    def left(self) -> None:
        """Record that this library has moved the parameters."""
        self._access.left(self.shared)

    def written(self) -> list[str]:
        """Return the names of the parameters that the script has written since the last step; warn, once, of them."""
        return self._access.written(self.shared)

    def saved_own(self) -> None:
        """Warn, once, of a script that saves this worker's own parameters, if they are not the shared ones."""
        self._access.saved(self.shared)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def saved(self) -> dict[str, Any]:
        """Return the shared parameters, this worker's own, the outer optimizer and the steps.

        Unsent updates are the difference of the two; those kept beside parameters are among the residuals. When they
        are distributed over another number of workers, ``displacements`` take the place of ``own``.
        """
        base, own = self.shared.base, self.shared.own
        return {
            "carry": self._options.carry,
            "steps": self.steps,
            "base": {name: tensor.clone() for name, tensor in base.items()},
            "own": {name: own[name].detach().clone() for name in base if name in own},
            "displacements": {},
            "outer": self.shared.outer_state(),
        }

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the result of :meth:`saved`; None: the present parameters become the shared ones.

        Parameters are moved to where they were. Call it once residuals are restored.
        """
        self.check_not_shown("load_state_dict()")
        self.shared, self._snapshot = self._fitting(), None
        self.own_steps.restart(self.steps if saved is None else saved["steps"])
        if saved is not None and saved["base"]:  # else a lone worker saved it, without shared parameters
            self._table.track(saved["base"])
            self._admit_present()
            self.shared.restore(saved["base"], saved["own"], saved["displacements"])
            self.shared.load_outer_state(saved["outer"])
            self._snapshot = self._table.snapshot()
            self.left()
