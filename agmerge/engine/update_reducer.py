"""Exchange what the optimizer did to the parameters: every worker steps by itself, then the ways are averaged.

Step by step, with x the parameters of this worker and ``base`` what all have in common:

1. The optimizer steps with this worker's own gradients: x moves.
2. Where an exchange is due, what is selected of the way ``base - x`` is sent, averaged over workers and taken off
   ``base``; x moves along.
3. What was not sent stays on the way: in x itself (``carry="apply"``), or in a residual (``carry="hold"``).

The mean of x over workers follows the mean of their optimizers' steps, whatever is sent of it: compression decides only
how far a worker's x may stray from that mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from agmerge.backends import status
from agmerge.engine.carry import Applied, Carry, Kept, wide
from agmerge.engine.own_step import own_step
from agmerge.engine.synchronizer import Synchronizer
from agmerge.errors import NonFiniteError, and_more
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.options.config import Config
from agmerge.options.updates import APPLY, planner_for
from agmerge.runtime import workers
from agmerge.step.agreed_state import Plans
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.nonfinite_verdict import MOST_IN_A_ROW
from agmerge.tensors.nonfinite import RAISE
from agmerge.tensors.parameters import ParameterInfo, ParameterTable

ELASTIC = (
    "sync='updates' under horovod.torch.elastic is not built yet: newcomers would have to get the shared parameters. "
    "Use sync='gradients', or restart from a checkpoint of agmerge.gather_state()"
)


class WayTable:
    """List the ways that are exchanged: of the parameters, in float32 or wider."""

    def __init__(self, members: ParameterTable) -> None:
        self._members = members

    def active(self) -> list[ParameterInfo]:
        """Return the parameters that need a gradient, each with the dtype of its way."""
        return [replace(member, dtype=wide(member.dtype)) for member in self._members.active()]

    def snapshot(self) -> object:
        """Return what must not change unnoticed."""
        return self._members.snapshot()


class UpdateReducer(Synchronizer):
    """Step the optimizer with this worker's own gradients, and exchange the ways when they are due."""

    combines_gradients = False

    def __init__(self, members: ParameterTable, config: Config) -> None:
        assert config.updates is not None
        self.updates = config.updates
        elements = sum(member.parameter.numel() for member in members.active())
        config = replace(config, planner=planner_for(config.updates, config.planner, elements))
        super().__init__(members, WayTable(members), config)
        self.steps = 0  # of the optimizer, exchanged or not
        self.flags_of_all = int(Flag.ACTIVE)  # what all ranks said together in the last exchange
        self._flag = Flag.ACTIVE  # what this rank says in its messages; JOINED in join()
        self._bad: tuple[str, ...] = ()  # whose gradients were not finite since the last exchange
        self._skipped_in_a_row = 0
        self._receive_at: int | None = None  # the step after which messages under way are taken in
        self._due: Callable[[int], Any] | None = None  # which merge buffers these are of
        self._snapshot: object = None  # of the members, as of the last look
        self.carry = self._make_carry()

    def _make_carry(self) -> Carry:
        """Return who keeps what is not sent, and give the exchange the memory that this needs."""
        updates, members = self.updates, self.members.active()
        narrow = any(wide(member.dtype) != member.dtype for member in members)
        memory = updates.memory_for(self.config.compressor, narrow=narrow)
        self.exchange.adopt(replace(self.config, memory=memory))
        if memory.hands_back or (not memory.has_residual and not narrow):
            return Applied(self.exchange, updates.outer, overlap=updates.overlap > 0)
        if updates.overlap:
            raise ValueError(
                f"overlap={updates.overlap} with parameters of 16 bits is not built yet: hold them in float32 under "
                "autocast, or leave overlap out"
            )
        return Kept(self.exchange, updates.outer, applied=updates.carry == APPLY)

    def _on_agreement(self, buffers: MergeBuffers, times: RunningStepTimes) -> Plans | None:
        return super()._on_agreement(buffers, times) if self.updates.fragments == 1 else None

    def connect(self) -> None:
        """Collective. See :meth:`Synchronizer.connect`. Raises ``ValueError`` in an elastic job."""
        if workers.elastic():
            raise ValueError(ELASTIC)
        super().connect()

    def _fit_to_group(self, shard_before: tuple[int, int] | None) -> None:
        origin, comm = self.exchange.origin, self.exchange.comm
        super()._fit_to_group(shard_before)
        if origin is not None and comm is not None and origin[1] != comm.size:
            with torch.no_grad():
                self.carry.rescale(comm.size / origin[1])

    @property
    def alone(self) -> bool:
        """Tell whether this worker exchanges with nobody."""
        return self.exchange.outside or self.exchange.comm is None or self.exchange.comm.size == 1

    def compared_tensors(self) -> dict[str, torch.Tensor]:
        """Return what all workers have in common, by name."""
        return dict(self.carry.base)

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, wrapper: torch.optim.Optimizer, closure: Callable[[], Any] | None, *, combine: bool) -> Any:
        """Collective. Step the optimizer by itself, then exchange what is due. Return the loss, or its result.

        Raises :class:`agmerge.NonFiniteError` on every rank, when the next exchange is due, where a rank had gradients
        that were not finite, as ``nonfinite=`` has it. That rank has not stepped.
        """
        if not combine:
            raise ValueError(self.refusal("step() inside skip_synchronize()"))
        self.before_step()
        own = own_step(self.members, wrapper, closure)
        self._count(own.stepped, own.bad, scaled=own.scaled)
        self.after_step()
        return own.result

    def _count(self, stepped: bool, bad: tuple[str, ...], *, scaled: bool) -> None:
        """Count a step that was left out; raise, here or at the next exchange on all ranks, where it is no accident."""
        if stepped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        self.exchange.totals.skipped(0, 0)
        if (self.config.nonfinite == RAISE and not scaled) or self._skipped_in_a_row >= MOST_IN_A_ROW:
            self._bad = tuple(dict.fromkeys([*self._bad, *(bad or ("(found by the GradScaler)",))]))
            if self.alone:
                names, self._bad = self._bad, ()
                raise NonFiniteError(f"gradients are infinite or NaN: {and_more(names)}. The optimizer has not stepped")

    @torch.no_grad()
    def before_step(self) -> None:
        """Collective. Connect, if need be, and note where parameters are before the optimizer moves them."""
        self.connect()
        self.exchange.check_unbroken()
        snapshot = self.members.snapshot()
        if self.alone or snapshot == self._snapshot:
            return
        if self._snapshot is not None:
            self.flush()
            before, self.carry = self.carry, self._make_carry()
            self.carry.base.update(before.base)
        self.carry.admit(self.members.active())
        self._snapshot = snapshot

    @torch.no_grad()
    def after_step(self) -> None:
        """Collective. Receive and send what is due: the optimizer has stepped."""
        self.steps += 1
        if self.alone:
            return
        if self._receive_at is not None and self.steps >= self._receive_at:
            self._receive()
        fragment = self.updates.fragment_at(self.steps)
        if fragment is None:
            self.exchange.totals.passed(sum(tensor.numel() for tensor in self.carry.base.values()))
            return
        status.current().enter("is in step()", self.exchange.step)
        self._due = self.updates.merge_buffers_of(fragment)
        self._receive_at = self.steps + self.updates.overlap
        if self.updates.overlap:
            self.exchange.start(self.carry.way, self._flag, self._due, self._bad)
        else:
            self._receive()

    def exchange_alone(self) -> int:
        """Collective. Exchange what is due after a step that only others make; return what all ranks said, see Flag.

        Without an exchange nobody said anything else than that they go on.
        """
        self.flags_of_all = int(Flag.ACTIVE)
        self.after_step()
        return self.flags_of_all

    def _receive(self) -> None:
        """Collective. Take in what is due, or under way."""
        bad, self._bad, self._receive_at = self._bad, (), None
        combined = self.exchange.finish(self.carry.way, self._flag, self._due, bad)
        with self.exchange.breaking():
            self.exchange.commit()
            self.carry.take_in(combined)
        self.flags_of_all = combined.flags
        self.end_exchange()

    @torch.no_grad()
    def flush(self) -> None:
        """Collective. Take in what is under way."""
        if self._receive_at is not None and not self.exchange.is_broken:
            self._receive()

    @torch.no_grad()
    def consolidate(self) -> None:
        """Collective. Exchange all that workers carry, whole: then every parameter is the shared one, to the bit."""
        self.before_step()
        if self.alone:
            return
        self.flush()
        self._due, buffers = None, None
        while buffers is None or buffers is not self.exchange.buffers:  # else ranks have agreed anew meanwhile
            if self.exchange.buffers is None:
                self._receive()
            buffers = self.exchange.buffers
            with self.exchange.sending_whole():
                self._receive()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Tell the other ranks inside that this one has no batches left, and sends only what it carries."""
        self._flag = Flag.JOINED
        try:
            yield
        finally:
            self._flag = Flag.ACTIVE

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let the parameters, inside, be those that all workers have in common. Changes inside are lost."""
        own = {name: parameter.detach().clone() for name, parameter in self.carry.parameters.items()}
        with torch.no_grad():
            for name, parameter in self.carry.parameters.items():
                parameter.copy_(self.carry.base[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.carry.parameters.items():
                    parameter.copy_(own[name])

    # -- guards -----------------------------------------------------------------------------------------------------

    def refusal(self, call: str) -> str:
        """Return why ``call``, which is about combined gradients, means nothing here."""
        return (
            f"{call}: with sync='updates' gradients are never combined, p.grad is this worker's own. Clip or change it "
            "between backward() and step(), as without agmerge; accumulate with several backward passes a step"
        )

    def check_combines(self, what: str) -> None:
        """Refuse ``what``, with ``ValueError``: gradients are never combined."""
        raise ValueError(self.refusal(what))

    def synchronize(self) -> None:
        """Refuse, with ``ValueError``: gradients are never combined."""
        raise ValueError(self.refusal("synchronize()"))

    def paused(self) -> AbstractContextManager[None]:
        """Refuse, with ``ValueError``: no gradient is sent anyway."""
        raise ValueError(self.refusal("no_sync()"))

    def set_passes(self, passes: int) -> None:
        """Refuse any number but 1, with ``ValueError``: a step takes the gradients that are there."""
        if passes != 1:
            raise ValueError(self.refusal(f"set_backward_passes_per_step({passes})"))

    def check_idle(self, what: str) -> None:
        """Collective. Take in what is under way."""
        self.flush()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def saved_updates(self) -> dict[str, Any]:
        """Return the shared parameters, where this worker's stand from them, the outer optimizer and the steps.

        ``displacements``: of the parameters since the last exchange; what is kept beside them is among the residuals.
        """
        base = self.carry.base
        return {
            "carry": self.updates.carry,
            "steps": self.steps,
            "base": {name: tensor.clone() for name, tensor in base.items()},
            "displacements": {name: self.carry.displacement(name) for name in base},
            "outer": self.carry.outer_state(),
        }

    @torch.no_grad()
    def restore_updates(self, saved: Mapping[str, Any] | None) -> None:
        """Take what :meth:`saved_updates` gave; None: the parameters as they are become the shared ones.

        Parameters are put where they were. Call it once residuals are restored.
        """
        self._receive_at, self._bad = None, ()
        self.carry = self._make_carry()
        self._snapshot = None
        if saved is None or not saved["base"]:
            return
        self.carry.admit(self.members.active())
        self.carry.restore(saved["base"], saved["displacements"])
        self.carry.load_outer_state(saved["outer"])
        self.steps, self._snapshot = saved["steps"], self.members.snapshot()

    def step_count(self) -> int:
        return self.steps

    def unsent(self) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {name: self.carry.unsent(name) for name in self.carry.base}
