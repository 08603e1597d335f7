"""Exchange of the optimizer's updates: every worker steps by itself, then the pseudo-gradients are averaged.

Step by step, with x the parameters of this worker and ``base`` the shared ones:

1. The optimizer steps with this worker's own gradients: x moves.
2. Where an exchange is due, the selection of the pseudo-gradient ``base - x`` is sent, averaged over workers and
   subtracted from ``base``; x moves by the same.
3. The unsent remainder is kept: in x itself (``carry="apply"``), or in a residual (``carry="hold"``).

The mean of x over workers follows the mean of their optimizers' steps, whatever is sent: compression decides only how
far a worker's x may deviate from that mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from agmerge.backends import status
from agmerge.engine import strayed
from agmerge.engine.carry import Applied, Carry, Kept, wide
from agmerge.engine.own_step import own_step
from agmerge.engine.sharded_steps import ShardedSteps
from agmerge.engine.synchronizer import Synchronizer
from agmerge.engine.way_table import WayTable
from agmerge.errors import AGMergeError, NonFiniteError, and_more
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.runtime import workers
from agmerge.step.agreed_state import Plans
from agmerge.step.config import Config
from agmerge.step.gradient_exchange import Due
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.nonfinite_verdict import MOST_IN_A_ROW
from agmerge.step.updates import APPLY, HOLD, planner_for
from agmerge.tensors.nonfinite import RAISE
from agmerge.tensors.parameters import ParameterTable
from sparsifiers.memories import Memory, Residual

ELASTIC = (
    "sync='updates' under horovod.torch.elastic is not built yet: newcomers would have to get the shared parameters. "
    "Use sync='gradients', or restart from a checkpoint of agmerge.gather_state()"
)


class UpdateReducer(Synchronizer):
    """Reducer with local steps of the optimizer, which exchanges the pseudo-gradients when they are due."""

    combines_gradients = False

    def __init__(self, members: ParameterTable, config: Config) -> None:
        assert config.sync.updates is not None
        self.updates = config.sync.updates
        self._ways = WayTable(members)
        super().__init__(members, self._ways, self._with_planner(config))
        self.steps = 0  # of the optimizer, exchanged or not
        self._bad: tuple[str, ...] = ()  # parameters with gradients that were not finite since the last exchange
        self._said: tuple[str, ...] = ()  # likewise, in the messages under way
        self._skipped_in_a_row = 0
        self._receive_at: int | None = None  # the step after which messages under way are applied
        self._due: Due | None = None  # which merge buffers these are of
        self._snapshot: object = None  # of the table, as of the last check
        self.in_shared = False  # parameters are the shared ones for a while
        self._sharded = ShardedSteps(members)
        self._strayed = strayed.watch(self)
        self.carry = self._make_carry()

    def _with_planner(self, config: Config) -> Config:
        """Return ``config`` with a planner that makes as many merge buffers as take turns."""
        elements = sum(member.local.numel() for member in self._ways.parameters())
        return config.changed(planner=planner_for(self.updates, config.merging.planner, elements))

    def _make_carry(self) -> Carry:
        """Return the carry for the present config, and give the exchange the memory that it needs."""
        updates, narrow = self.updates, self._narrow
        memory = self._memory_for(self.config)
        self.exchange.adopt(self.config.changed(memory=memory))
        if memory.hands_back or (not memory.has_residual and not narrow):
            return Applied(self.exchange, updates.outer, overlap=updates.overlap > 0)
        if updates.overlap:
            raise ValueError(
                f"overlap={updates.overlap} with parameters of 16 bits is not built yet: hold them in float32 under "
                "autocast, or leave overlap out"
            )
        return Kept(self.exchange, updates.outer, applied=updates.carry == APPLY)

    @property
    def _narrow(self) -> bool:
        """Return whether a parameter has 16 bits."""
        return any(wide(member.dtype) != member.dtype for member in self._ways.parameters())

    def _memory_for(self, config: Config) -> Memory:
        """Return the memory of unsent updates with ``config``; a residual that exists is kept in any case."""
        memory = self.updates.memory_for(config.compression.compressor, narrow=self._narrow)
        return Residual() if self.exchange.residuals() and not memory.has_residual else memory

    def _admit(self) -> None:
        """Add the parameters that take part now to the carry. They stay as long as there is this optimizer."""
        self.carry.admit({member.name: member.local for member in self._ways.parameters()})
        self._ways.keep(self.carry.parameters)

    def _change_carry(self) -> None:
        """Replace the carry, where the memory or the dtypes ask for another one. Nothing is under way."""
        before, self.carry = self.carry, self._make_carry()
        self.carry.take_over(before)

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Use another config, as :meth:`Synchronizer.reconfigure`; unsent updates stay where they are."""
        self._check_outside_shared(what)
        self.check_idle(what)
        config = self._with_planner(config).changed(memory=self._memory_for(config))
        super().reconfigure(config, what, advice)
        self._change_carry()

    def leave(self) -> None:
        """Forget the group of workers, and messages under way: they count as not sent."""
        super().leave()
        self._receive_at = None
        self._sharded.forget()
        self.carry.forget_sent()

    def _on_agreement(self, buffers: MergeBuffers, times: RunningStepTimes) -> Plans | None:
        return super()._on_agreement(buffers, times) if self.updates.fragments == 1 else None

    def connect(self) -> None:
        """Collective. See :meth:`Synchronizer.connect`.

        Raises ``ValueError`` in an elastic job, and for an optimizer that steps shards among several workers.
        """
        if workers.elastic():
            raise ValueError(ELASTIC)
        super().connect()
        if not self.alone:
            assert self.exchange.comm is not None
            self._sharded.begin(together=self.exchange.comm.size == workers.size())

    def _fit_to_group(self, shard_before: tuple[int, int] | None) -> None:
        origin, comm = self.exchange.origin, self.exchange.comm
        factor = 1.0 if origin is None or comm is None else comm.size / origin[1]
        with torch.no_grad():
            moved = {name: self.carry.displacement(name) * factor for name in self.carry.parameters if factor != 1.0}
            super()._fit_to_group(shard_before)
            self.carry.put(moved)

    def compared_tensors(self) -> dict[str, torch.Tensor]:
        """Return the shared parameters, by name."""
        return dict(self.carry.base)

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, wrapper: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Collective. Step the optimizer by itself, then make the exchange that is due. Return the loss, or its result.

        Raises :class:`agmerge.NonFiniteError` on every rank, at the next exchange, where a rank had gradients that were
        not finite, according to ``nonfinite=``. That rank has not stepped.
        """
        self.before_step()
        own = own_step(self.members, wrapper, self._sharded.noting(closure))
        self.count_step(own.stepped, own.bad, scaled=own.scaled)
        self.after_step()
        return own.result

    def count_step(self, stepped: bool, bad: tuple[str, ...], *, scaled: bool) -> None:
        """Count a step that was left out; raise, here or at the next exchange on all ranks, where that is an error.

        ``bad``: parameters with gradients that were not finite, if known. ``scaled``: a GradScaler has made the check.
        """
        if stepped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        self.exchange.totals.skipped(0, 0)
        if (self.config.guards.nonfinite == RAISE and not scaled) or self._skipped_in_a_row >= MOST_IN_A_ROW:
            self._bad = tuple(dict.fromkeys([*self._bad, *(bad or ("(found by the GradScaler)",))]))
            if self.alone:
                names, self._bad = self._bad, ()
                raise NonFiniteError(f"gradients are infinite or NaN: {and_more(names)}. The optimizer has not stepped")

    @torch.no_grad()
    def before_step(self) -> None:
        """Collective. Connect, if need be, and sample parameters before the optimizer moves them."""
        self._check_outside_shared("a step")
        self.connect()
        self.exchange.check_unbroken()
        self._sharded.note()
        snapshot = self._ways.snapshot()
        if self.alone:
            self._take_residuals()
        if self.alone or snapshot == self._snapshot:
            return
        self._admit()  # ranks may have to agree first, on the parameters that there are now
        if self._snapshot is None:
            self._check_not_averaged()  # by a framework, which has wrapped the model after the optimizer
        else:
            self.flush()
            self._change_carry()
        self._snapshot = snapshot

    def _take_residuals(self) -> None:
        """Subtract residuals kept beside the parameters from these: a lone worker sends nothing any more."""
        for name, residual in self.exchange.residuals().items():
            if self.updates.carry == HOLD and name in self.carry.parameters:
                self.carry.parameters[name].detach().sub_(residual)
            self.exchange.carry("residual", name, None)

    @torch.no_grad()
    def after_step(self) -> None:
        """Collective. Make the exchanges that are due: the optimizer has stepped.

        Raises ``ValueError``, in the first steps, for an optimizer that has stepped shards.
        """
        self.steps += 1
        if self.alone:
            return
        self._strayed.stepped(says=workers.rank() == 0 and workers.bound() is None)
        if self._receive_at is None:  # else parameters are about to move by others' updates
            assert self.exchange.comm is not None
            with self.exchange.breaking():
                self._sharded.compare(self.exchange.comm, self.config.guards.timeout)
        if self._receive_at is not None and self.steps >= self._receive_at:
            self._receive()
        fragment = self.updates.fragment_at(self.steps)
        due = None if fragment is None else self.updates.merge_buffers_of(fragment)
        # With fewer merge buffers than fragments some of these have none.
        if fragment is None or (due is not None and not due(len(self.exchange.agree().plan.counts))):
            self.exchange.totals.passed(sum(tensor.numel() for tensor in self.carry.base.values()))
            return
        status.current().enter("is in step()", self.exchange.step)
        self._due = due
        self._said, self._bad = self._bad, ()
        self._receive_at = self.steps + self.updates.overlap
        if self.updates.overlap:
            self.exchange.agree()
            self.exchange.start(self.carry.way, self._flag, self._due, self._said)
        else:
            self._receive()

    def exchange_alone(self) -> int:
        """Collective. Make the exchange due after others' step; return all ranks' flags, without one ``ACTIVE``."""
        self.flags_of_all = int(Flag.ACTIVE)
        self.after_step()
        return self.flags_of_all

    def _receive(self) -> None:
        """Collective. Receive and apply the exchange that is due, or under way."""
        said, self._said, self._receive_at = self._said, (), None
        combined = self.exchange.finish(self.carry.way, self._flag, self._due, said)
        with self.exchange.breaking():
            self.exchange.commit()
            self.carry.take_in(combined)
            combined.buffers.forget_round()
        self.flags_of_all = combined.flags or int(Flag.ACTIVE)  # without a message all are active
        self.end_exchange()

    @torch.no_grad()
    def flush(self) -> None:
        """Collective. Receive and apply the exchange under way."""
        if self._receive_at is not None and not self.exchange.is_broken:
            self._receive()

    @torch.no_grad()
    def consolidate(self) -> None:
        """Collective. Exchange all unsent updates, dense: then every parameter is the shared one, to the bit."""
        self.before_step()
        if self.alone:
            return
        self.flush()
        self._due, buffers = None, None
        while buffers is None or buffers is not self.exchange.buffers:  # else ranks have agreed again meanwhile
            buffers = self.exchange.agree()
            self._said, self._bad = self._bad, ()
            with self.exchange.sending_whole():
                self._receive()
        self._strayed.settled()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Make the parameters, inside, the shared ones. Changes inside are lost.

        States that are saved inside have this worker's own all the same.
        """
        self._strayed.seen()
        parameters = self.carry.parameters
        own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.carry.base[name])
        self.carry.parameters, was_in_shared, self.in_shared = own, self.in_shared, True
        try:
            yield
        finally:
            self.carry.parameters, self.in_shared = parameters, was_in_shared
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(own[name])

    def shared_values(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the shared parameters, by parameter; nothing before the first step."""
        self._strayed.seen()
        base, members = self.carry.base, self.members
        return {p: base[members.name_of(p)] for p in members.name_all() if members.name_of(p) in base}

    def close(self) -> None:
        """Collective. Consolidate, where steps have been made since; after an error do not wait for others."""
        world = self.exchange.world
        if self._strayed.ahead and not self.exchange.is_broken and workers.current(world) and sys.exc_info()[1] is None:
            self.consolidate()
        super().close()

    def _check_outside_shared(self, what: str) -> None:
        """Raise :class:`agmerge.AGMergeError` inside of :meth:`shared`, where changes of parameters would be undone."""
        if self.in_shared:
            raise AGMergeError(f"{what} inside shared(): changes of parameters inside are lost. Call it outside")

    # -- guards -----------------------------------------------------------------------------------------------------

    def refusal(self, call: str) -> str:
        """Return why ``call``, which is about combined gradients, has no meaning here."""
        return (
            f"{call}: with sync='updates' gradients are never combined, p.grad is this worker's own. Clip or change it "
            "between backward() and step(), as without agmerge; accumulate with several backward passes a step"
        )

    def taking_combined(self, what: str) -> AbstractContextManager[None]:
        """Raise ``ValueError``: gradients are never combined."""
        raise ValueError(self.refusal(what))

    def synchronize(self) -> None:
        """Raise ``ValueError``: gradients are never combined."""
        raise ValueError(self.refusal("synchronize()"))

    def paused(self) -> AbstractContextManager[None]:
        """Raise ``ValueError``: no gradient is sent anyway."""
        raise ValueError(self.refusal("no_sync()"))

    def set_passes(self, passes: int) -> None:
        """Raise ``ValueError`` for any number but 1: a step uses the gradients that exist."""
        if passes != 1:
            raise ValueError(self.refusal(f"set_backward_passes_per_step({passes})"))

    def check_idle(self, what: str) -> None:
        """Collective. Receive and apply the exchange under way."""
        self.flush()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def saved_updates(self) -> dict[str, Any]:
        """Return the shared parameters, this worker's own, the outer optimizer and the steps.

        Unsent updates are the difference of the two; those kept beside parameters are among the residuals. When they
        are distributed over another number of workers, ``displacements`` take the place of ``own``.
        """
        base = self.carry.base
        return {
            "carry": self.updates.carry,
            "steps": self.steps,
            "base": {name: tensor.clone() for name, tensor in base.items()},
            "own": {
                name: self.carry.parameters[name].detach().clone() for name in base if name in self.carry.parameters
            },
            "displacements": {},
            "outer": self.carry.outer_state(),
        }

    @torch.no_grad()
    def restore_updates(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the result of :meth:`saved_updates`; None: the present parameters become the shared ones.

        Parameters are moved to where they were. Call it once residuals are restored.
        """
        self._check_outside_shared("load_state_dict()")
        self._receive_at, self._bad, self._said = None, (), ()
        self.carry = self._make_carry()
        self._snapshot = None
        if saved is None:
            return
        self.steps = saved["steps"]
        if saved["base"]:  # else a lone worker saved it, without shared parameters
            self._ways.keep(saved["base"])
            self._admit()
            self.carry.restore(saved["base"], saved["own"], saved["displacements"])
            self.carry.load_outer_state(saved["outer"])
            self._snapshot = self._ways.snapshot()

    def step_count(self) -> int:
        return self.steps

    def unsent(self) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {name: self.carry.unsent(name) for name in self.carry.base}
