"""Exchange of one optimizer in its group of workers: connect, agree, plan, measure. Subclasses choose the tensors."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from agmerge.backends import status, torch_objects
from agmerge.engine.grad_scaler import LossScale
from agmerge.engine.replicas import compare_replicas
from agmerge.errors import DISTRIBUTED_DATA_PARALLEL, OTHER_SHARDS
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.planning.replanner import Replanner
from agmerge.runtime import process_sets, workers
from agmerge.step.agreed_state import Plans, TensorTable
from agmerge.step.config import Config, check_two_level
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.treatments import check_patterns
from agmerge.tensors.dtensors import local_of
from agmerge.tensors.parameters import ParameterTable
from agmerge.version import __version__


class Synchronizer:
    """Owner of the exchange of one optimizer, which takes part in it with the present group of workers.

    ``members``: the parameters of the wrapped optimizer; ``table``: the tensors of them that are exchanged.
    """

    combines_gradients: ClassVar[bool]  # p.grad becomes the combined gradient

    def __init__(self, members: ParameterTable, table: TensorTable, config: Config) -> None:
        check_two_level(config)
        check_patterns(config, (members.name_of(parameter) for parameter in members.name_all()))
        self.members, self.passes = members, config.sync.passes
        self.synchronized = False  # the tensors are combined, and the step has not ended
        self.scaling = LossScale(None)
        self.flags_of_all = 0  # flags of all ranks in the last exchange, see Flag
        self._flag = Flag.ACTIVE  # in this rank's messages; JOINED in join()
        self._compared = False  # replicas, after the first step among these workers
        me = weakref.ref(self)  # an optimizer that was dropped must not live on in its own exchange

        def on_agreement(buffers: MergeBuffers, times: RunningStepTimes) -> Plans | None:
            synchronizer = me()
            return None if synchronizer is None else synchronizer._on_agreement(buffers, times)

        self.exchange = GradientExchange(table, config, on_agreement, workers.current)
        if config.merging.plan is not None:
            config.merging.plan.check(len(self.exchange.members()))

    @property
    def config(self) -> Config:
        """Return the config for the next agreement."""
        return self.exchange.config

    # -- the group of workers -----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Collective. Connect to the present workers, if this has not happened, and compare facts (G1).

        The group is another one after ``shutdown()`` and ``init()``, and after a reset of an elastic Horovod: residuals
        are then scaled to the number of its workers.
        """
        exchange, world = self.exchange, workers.world()
        if exchange.world is not None and exchange.world is not world:
            self.leave()
        if exchange.comm is not None or exchange.outside:
            return
        shard_before = exchange.shard
        self._check_not_averaged()
        facts = [("library version", __version__), *exchange.facts()]  # refuses before anything is sent
        workers.listen()
        wants_second = self.config.quantises and world.size > 2
        comm, second = process_sets.communicators(
            world, self.config.sync.process_set, self.config.guards.timeout, wants_second=wants_second
        )
        exchange.connect(world, comm, facts, second)
        if comm is None:
            self._stay_outside()
            return
        for held in (comm, second):
            if held is not None:
                weakref.finalize(self, held.drop)  # an optimizer that was dropped holds no threads and no connections
        self._fit_to_group(shard_before)

    def _check_not_averaged(self) -> None:
        """Raise ``ValueError`` where DistributedDataParallel averages gradients as well."""
        averaged = self._averaged_too()
        if averaged:
            raise ValueError(DISTRIBUTED_DATA_PARALLEL.format(name=averaged))

    def _averaged_too(self) -> str:
        """Return the name of a parameter with a gradient that DistributedDataParallel averages as well; empty: none."""
        return torch_objects.averaged(self.members.name_all())

    def _stay_outside(self) -> None:
        """React to being outside of the process set, where this rank exchanges nothing."""

    def _fit_to_group(self, shard_before: tuple[int, int] | None) -> None:
        """Scale residuals to the number of workers. ``shard_before``: this rank's shard of each tensor (two-level)."""
        if not self.exchange.fit_to_group(shard_before):
            warnings.warn(OTHER_SHARDS, stacklevel=5)

    def leave(self) -> None:
        """Forget the group of workers; the next step connects to the group that exists then."""
        self.exchange.leave()
        self._compared = False

    def _on_agreement(self, buffers: MergeBuffers, times: RunningStepTimes) -> Plans | None:
        """Return a planner of the exchange of the parameters that take part now."""
        return Replanner(buffers, times)

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Use another config from the next step on, with residuals and plan unchanged.

        ``what``: the call of the script, and ``advice`` for it, where ranks differ. Raises between ``backward()`` and
        ``step()``.
        """
        self.check_idle(what)
        check_two_level(config)
        if config.compression.partial is not None:
            config = config.changed(
                partial=self.config.compression.partial
            )  # tensors that have a residual by now stay sparse
        self.exchange.reconfigure(config, what, advice)
        self.discard()

    def attach_scaler(self, scaling: LossScale) -> None:
        """Divide gradients by another loss scale from now on."""
        self.scaling = scaling

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Announce inside that this rank has no batches left: its messages carry only residuals."""
        self._flag = Flag.JOINED
        try:
            yield
        finally:
            self._flag = Flag.ACTIVE

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, wrapper: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Collective. Step the inner optimizer, and exchange its gradients or updates."""
        raise NotImplementedError

    def flush(self) -> None:
        """Apply updates that are on their way. There are none here."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Make the parameters, inside, those that all ranks share. They are already here."""
        yield

    def consolidate(self) -> None:
        """Make parameters equal on all ranks. They are already here."""

    def discard(self) -> None:
        """Discard the step: handed-over tensors are forgotten, and residuals stay as before it."""
        self.exchange.discard()

    def begin_anew(self) -> None:
        """Forget combined gradients and counted passes of a step under way: its gradients will be zeroed."""

    def check_idle(self, what: str) -> None:
        """Raise unless ``what`` may happen now: no step may be waiting for its end."""

    @property
    def unfinished(self) -> bool:
        """Return whether gradients are on their way."""
        return False

    @property
    def alone(self) -> bool:
        """Return whether this worker has no other worker to exchange with."""
        return self.exchange.outside or self.exchange.comm is None or self.exchange.comm.size == 1

    def abandon(self) -> bool:
        """Collective. Drop the gradients that are on their way, where possible; return whether none is left then."""
        return True

    def combine_for(self, scaler: torch.amp.GradScaler) -> None:
        """Collective. Combine the gradients now, where they are combined: ``scaler`` is about to unscale them."""

    def admit_group(self) -> None:
        """Check the group that the optimizer has just got. Any is allowed here."""

    def compared_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks after a step, by name."""
        return {self.members.name_of(parameter): parameter for parameter in self.members.name_all()}

    def _compare_replicas(self) -> None:
        """Collective. Compare replicas after the first exchange, and after every ``check_every`` (G11)."""
        exchange, every = self.exchange, self.config.guards.check_every
        if not self._compared or (every and exchange.steps % every == 0):
            assert exchange.comm is not None
            with exchange.breaking():
                compare_replicas(exchange.comm, self.compared_tensors(), exchange.steps, self.config.guards.timeout)
            self._compared = True

    def end_exchange(self) -> None:
        """Collective. Compare replicas and plan again, where that is due: an exchange has been committed."""
        status.current().enter("is in its script, before a backward pass", self.exchange.step)
        self._compare_replicas()
        with self.exchange.breaking():
            self.exchange.replan()

    # -- state ------------------------------------------------------------------------------------------------------

    def unsent(self) -> dict[str, torch.Tensor]:
        """Return the residuals of this rank, by name, in the shape of the parameter or of this rank's shard."""
        return self.exchange.residuals()

    def prepare_to_save(self) -> None:
        """Bring parameters up to date, as far as this rank can by itself."""

    def saved_updates(self) -> dict[str, Any] | None:
        """Return the state beside residuals where updates are exchanged; None where gradients are."""
        return None

    def restore_updates(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the result of :meth:`saved_updates`.

        Where gradients are exchanged, parameters become the shared ones.
        """
        base: Mapping[str, torch.Tensor] = {} if saved is None else saved["base"]
        with torch.no_grad():
            for parameter in self.members.name_all():
                if self.members.name_of(parameter) in base:
                    local_of(parameter).copy_(base[self.members.name_of(parameter)])

    def step_count(self) -> int:
        """Return how many steps the optimizer has made."""
        return self.exchange.steps

    def window(self) -> dict[torch.Tensor, int]:
        """Return how many backward passes each parameter has seen in the step under way."""
        return {}

    def count(self, parameter: torch.Tensor, fired: int) -> None:
        """Resume a step: ``parameter`` has seen ``fired`` backward passes already."""

    def close(self) -> None:
        """Close the communicators."""
        self.exchange.close()
