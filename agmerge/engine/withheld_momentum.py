# SPDX-License-Identifier: Apache-2.0
"""Momentum that a memory has applied before selection, and that the inner optimizer does not apply again.

``param_groups`` show the momentum that the script gave, to schedulers, hooks and checkpoints; only the arithmetic of
the inner optimizer's step sees 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from agmerge.engine.seen_steps import after_closure
from agmerge.ops import Average
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.step.momentum import check_dampening, rate, rates
from agmerge.tensors.dtensors import local_of
from agmerge.tensors.parameters import ParameterTable, optimizers_of

GONE = (
    "AGM405: No parameter group of {optimizer} has a momentum any more, so memory={memory!r} applies none. If the "
    "groups were loaded from a checkpoint of SGD(momentum=0), set the momentum again."
)
SHARDS = (
    "AGM405: The momentum buffers of {optimizer} are for full tensors, but each rank holds shards with "
    "exchange='two-level'. Momentum is reset to zero."
)


@contextmanager
def withheld(exchange: GradientExchange, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep a step of ``optimizer``, inside, from applying momentum that a memory has applied; its hooks see it.

    Raises ``ValueError`` if the groups have got a momentum that the memory does not follow, and warns on rank 0 where
    no group has a momentum any more.
    """
    if not _has_applied(exchange, optimizer):
        yield
        return
    with ExitStack() as steps:
        for each in optimizers_of(optimizer):
            steps.callback(_withhold_from(each, lambda: True))
        yield


def withhold(exchange: GradientExchange, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Withhold applied momentum, as :func:`withheld`, from every step of the script's; return a function that ends it.

    Hooks before the step that are registered later see no momentum. Of several optimizers each is stepped by itself.
    """
    ends = ExitStack()
    for each in optimizers_of(optimizer):
        ends.callback(_withhold_from(each, lambda: _has_applied(exchange, optimizer)))
    return ends.close


def _withhold_from(optimizer: torch.optim.Optimizer, has_applied: Callable[[], bool]) -> Callable[[], None]:
    """Withhold applied momentum from every step of one optimizer; return a function that ends it."""
    hidden = _Hidden(optimizer)

    def hide_now() -> None:
        hidden.show()  # the step before has raised
        if has_applied():
            hidden.hide()

    def hide(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return after_closure(hide_now, args, kwargs)  # backward passes in a closure apply it before selection

    last, first = optimizer.register_step_pre_hook(hide), optimizer.register_step_post_hook(hidden.show)
    hooks: Any = first.hooks_dict_ref()
    hooks.move_to_end(first.id, last=False)  # those of the script see the momentum, before the step and after it

    def end() -> None:
        hidden.show()  # the step has raised
        last.remove()
        first.remove()

    return end


class _Hidden:
    """Momentum of an optimizer's groups, while it is taken out of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._values: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of each group, while they are hidden

    def hide(self, *_: Any) -> None:
        for group in self._optimizer.param_groups:
            self._values.append((group, {name: group[name] for name in ("momentum", "nesterov")}))
            group.update(momentum=0.0, nesterov=False)

    def show(self, *_: Any) -> None:
        while self._values:  # once: changes by a later hook are the script's
            group, values = self._values.pop()
            group.update(values)


def _has_applied(exchange: GradientExchange, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a memory has applied ``optimizer``'s momentum in this step. Raises as :func:`withheld` does."""
    memory = exchange.agreed.config.compression.memory
    if not memory.has_momentum or exchange.group.outside:
        return False
    if exchange.agreed.config.compression.rates is None:
        if rates(optimizer, memory) is not None:
            raise ValueError(
                f"a parameter group of {type(optimizer).__name__} now has a momentum, but {memory} applies its own, "
                "0.9, before selection. Set it back to 0, or call "
                f"set_compressor({exchange.agreed.config.compression.compressor.name!r}) on every rank."
            )
        return False
    check_dampening(optimizer.param_groups)
    rank_0 = exchange.group.comm is not None and exchange.group.comm.rank == 0
    if rank_0 and not any(group["momentum"] for group in optimizer.param_groups):
        warnings.warn(GONE.format(memory=memory.name, optimizer=type(optimizer).__name__), stacklevel=5)
    return True


def take_over(exchange: GradientExchange, members: ParameterTable, optimizer: torch.optim.Optimizer) -> None:
    """Make the momentum buffers of ``optimizer`` the memory's momentum, before the next agreement.

    ``members``: the parameters that are exchanged, all of them the optimizer's.

    It is the same recursion. The buffers are averages (or sums) over all ranks and alike on all of them: where updates
    are averages every rank takes them; where they are sums rank 0 does, so that they count once.
    """
    if exchange.agreed.config.compression.rates is None or exchange.group.comm is None or exchange.agreed.is_valid:
        return
    dropped = False
    for parameter, group in [(p, its_group) for its_group in optimizer.param_groups for p in its_group["params"]]:
        state = optimizer.state.get(parameter, {})
        buffer = state.pop("momentum_buffer", None)
        if not state:
            optimizer.state.pop(parameter, None)
        if buffer is None or not local_of(buffer).any():
            continue  # torch.distributed.checkpoint makes empty ones: they are no momentum in place of a loaded one
        dropped |= exchange.group.shard is not None
        own_part = None  # this rank's share of it
        if exchange.group.shard is None and (
            exchange.agreed.config.sync.op is Average or exchange.group.comm.rank == 0
        ):
            factor, nesterov = rate(group)
            own_part = local_of(buffer)
            own_part = own_part * factor if nesterov else own_part  # nesterov's has its factor in DGCMemory
        exchange.agreed.carried.stash("momentum", members.name_of(parameter), own_part)  # in place of an older one
    if dropped and exchange.group.comm.rank == 0:
        warnings.warn(SHARDS.format(optimizer=type(optimizer).__name__), stacklevel=4)
