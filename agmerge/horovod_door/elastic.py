# SPDX-License-Identifier: Apache-2.0
"""``hvd.elastic``: states that a worker returns to when another one is lost, and newcomers are given.

The members of the job are agmerge's (``agmerge lighthouse``). What a loss does is Horovod's: a call of each survivor
raises, they return to their last commit, form the next group, take rank 0's state, and begin the function again.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from queue import Queue
from typing import Any

import torch

import agmerge
from agmerge import NoAnswer
from agmerge import NoAnswer as HorovodInternalError
from agmerge.checkpoint.horovod_elastic import Kept, TorchStateHandler
from agmerge.horovod_door import torch_names
from agmerge.horovod_door.torch_names import init, shutdown
from agmerge.runtime import workers

# fmt: off
__all__ = [
    "ElasticSampler", "HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt",
    "ModelStateHandler", "ObjectState", "OptimizerStateHandler", "SamplerStateHandler", "State", "StateHandler",
    "TorchState", "get_handler_registry", "init", "run", "run_fn",
    "set_handler_registry", "shutdown",
]
# fmt: on


class HostsUpdatedInterrupt(RuntimeError):
    """Interrupt of the function of :func:`run`: workers wait to be let in. ``skip_sync``: no worker needs a state."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Error of Horovod's own installations, which scripts catch; never raised here."""


# States.


class HostMessages(Queue[Any]):
    """Messages about workers that wait to be let in, of which agmerge itself knows."""

    def empty(self) -> bool:
        """Return whether no worker waits, as far as this one knows."""
        return super().empty() and not workers.newcomers_wait()


class State:
    """Base of states: what it keeps is committed, restored and handed to newcomers.

    ``bcast_object``: returns rank 0's value of an object; ``get_rank``: returns this worker's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages = HostMessages()
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call ``callbacks`` after each change of the workers, before their states are made equal."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the present workers."""
        self._host_messages = HostMessages()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: Any) -> None:
        """Make the next :meth:`check_host_updates` interrupt, if rank 0 is told so."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Collective. Keep the present values, and let workers in that wait."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Collective. Raise :class:`HostsUpdatedInterrupt` on all workers if others wait to be let in."""
        if self._bcast_object(not self._host_messages.empty() or workers.has_too_few()):
            raise HostsUpdatedInterrupt()

    def save(self) -> None:
        """Keep the present values in this process."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the values of the last commit."""
        raise NotImplementedError

    def sync(self) -> None:
        """Collective. Take the values of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt objects to the present workers."""


class ObjectState(State):
    """State of plain values, each an attribute."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = kwargs
        self.restore()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """Keep the present values in this process."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Return to the values of the last commit."""
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Collective. Take the values of rank 0, and keep them."""
        if self._saved_state:
            ObjectState.save(self)
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)


class StateHandler(Kept):
    """Handler of one object of a :class:`TorchState`: a copy of its ``state_dict()``, made at each commit."""

    def restore(self) -> None:
        """Return to the copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Collective. Take the state of rank 0, and keep it."""
        self._take()
        self.save()

    def _take(self) -> None:
        self.value.load_state_dict(agmerge.broadcast_object(self.value.state_dict()))


class ModelStateHandler(StateHandler):
    """Handler of a module. Its tensors travel one by one."""

    def _take(self) -> None:
        agmerge.broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Handler of a plain optimizer."""

    def _take(self) -> None:
        agmerge.broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Handler of an :class:`ElasticSampler`."""

    def reset(self) -> None:
        """Deal out the samples that are left anew."""
        self.value.reset()


_registry: list[tuple[type, Any]] = []  # of handlers, by the type of what they handle; the first one that fits


def get_handler_registry() -> list[tuple[type, Any]]:
    """Return which handler takes objects of which type, a list that may be changed."""
    return _registry


def set_handler_registry(registry: list[tuple[type, Any]]) -> None:
    """Replace the list of :func:`get_handler_registry`."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """State of models, optimizers, samplers and plain values.

    ``model`` and ``optimizer`` may be None; every one of ``kwargs`` becomes an attribute.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers = {
            name: next(how for kind, how in _registry if isinstance(value, kind))(value)
            for name, value in given.items()
            if any(isinstance(value, kind) for kind, _ in _registry)
        }
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(agmerge.broadcast_object, agmerge.rank, **plain)

    def save(self) -> None:
        """Keep the present values and states in this process."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the last commit."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Collective. Take the values and states of rank 0."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Adapt the objects to the present workers."""
        for handler in self._handlers.values():
            getattr(handler, "reset", lambda: None)()  # others' handlers need not have it

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler of this worker's part of an epoch, of the samples that no worker has used yet.

    Call ``record_batch`` after each batch and ``set_epoch`` after each epoch, and pass the sampler to a
    :class:`TorchState`. ``dataset``: has a length. ``shuffle``: draw an order for each epoch, from ``seed``.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is used yet."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of every worker as used."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many samples of it are used."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from a place."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out what is left of the epoch to the present workers."""
        self.num_replicas, self.rank = agmerge.size(), agmerge.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        filled = left + left[: self.total_size - len(left)]
        return iter(filled[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


_registry += [
    (torch.nn.Module, ModelStateHandler),
    (agmerge.DistributedOptimizer, TorchStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


# The function that begins again.


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """Return ``func``, whose first argument is a state, so that it begins again after changes of the workers.

    ``reset``: forms the next group of workers.
    """

    @functools.wraps(func)
    def begun(state: Any, *arguments: Any, **options: Any) -> Any:
        skips_sync = False
        while True:
            try:
                if not skips_sync:
                    state.sync()
                workers.announce_begun()
                return func(state, *arguments, **options)
            except HorovodInternalError:
                state.restore()
                skips_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skips_sync = interrupt.skip_sync
            reset()
            state.on_reset()

    return begun


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``func`` for an elastic job: a decorator. Its first argument is a state."""
    return run_fn(func, _regroup)


def _regroup() -> None:
    """Collective. Form the next group: of those that are there still, and of those that wait."""
    if not workers.is_elastic():  # a job of a fixed number of workers: none comes
        shutdown()
        init()
        return
    if not workers.world().has_failed:
        with suppress(NoAnswer):  # others are still receiving what this worker has already
            agmerge.barrier()
    while True:
        try:
            workers.regroup(lets_in=True)
            if not workers.has_too_few():
                torch_names.settle()
                return
        except NoAnswer:  # another worker was lost meanwhile
            continue
